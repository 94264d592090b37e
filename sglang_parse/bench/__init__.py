"""Benchmarks people can run again: ratios and counts from real servers on one machine."""
