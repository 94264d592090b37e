"""Adaptive drafting.

    controller    decisions of one server: plans, probes and the limits of an iteration
    drafting      whether drafts of one key pay, and how far they are accepted
    costs         stage times by size, and the cheapest kind of block
    limits        what the settings allow
    texts         length of drafts from a text
    constants     all constants

Numbers only: no tensors, and no clock.
"""
