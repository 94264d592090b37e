"""Adaptive drafting: how long a draft is, how it is verified, and whether it pays."""
