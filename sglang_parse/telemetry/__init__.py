"""What PARSE shows of itself: metrics, and ``meta_info`` of a response."""
