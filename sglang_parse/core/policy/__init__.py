"""Adaptive drafting: decides whether to draft, how many tokens, and how to verify them.

    controller        decisions of one server: plans, probes and the limits of an iteration
    planner           fastest plan from stage costs and acceptance
    limits            candidate plans and latency bounds from the settings
    stage_cost        wall time of each stage by its size
    threshold_stats   acceptance statistics and drafting state per threshold
    acceptance        acceptance of drafts by depth
    agreement         matched tokens after a rejection point
    text_length       length of drafts from a text
    layout_choice     draft layout with the lowest cost per accepted token
    eagle_gate        whether the EAGLE-3 head runs for a request
    lru               bounded map for keys that clients choose

Numbers only: no tensors, and no clock.
"""
