"""Adaptive drafting: decides whether to draft, how many tokens, and how to verify them."""
