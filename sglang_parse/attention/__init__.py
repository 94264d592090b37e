"""Attention backends that run verify passes, and the input they take."""
