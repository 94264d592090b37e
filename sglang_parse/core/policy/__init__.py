"""Adaptive drafting."""
