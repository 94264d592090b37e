"""One iteration of a PARSE server. The way a batch takes through this room, from top to bottom:

    worker      what SGLang's scheduler calls; makes the parts and hands them their settings
    prefill     prompts: their KV, the first token
    overlap     plan and launch, in SGLang's order; which iterations are under way, and until when
    arrival     how a request is served, before anything is done for it
    iteration   launch -> read -> decide -> commit, one step of every running request
    rounds      decide: what the target's numbers mean for each request
    verify      a verification pass: launched, measured, read
    drafting    the draft model: its KV, and draft chunks token by token or in blocks
    target      a decode step of the target
    head        an EAGLE-3 head ahead of the target
    readout     logits to verdicts and tokens     steps   one token per request
    forward     a forward under PARSE's own layout: a pass of the target, a block of the draft
    rows        a request's rows of a pass        sampling   SGLang's sampler, row by row
    kv          plan: moves and KV slots
    batch       SGLang's requests, batches and results      ranks   one decision for all ranks
    faults      what ends a request, and what ends the server

Calls go down this list only (an import-linter contract, and ``tests/e2e/test_road.py`` by a
profile of a running server). What each stage hands to the next is a record of its own; a request's
state changes in ``core.request`` only.
"""
