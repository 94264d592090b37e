"""Attention backends that can run a verification pass, and what the pass tells them."""
