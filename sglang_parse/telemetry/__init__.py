"""Metrics and ``meta_info`` of PARSE."""
