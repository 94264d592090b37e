"""Programs a person runs: ratios and counts from real servers on one machine.

No server imports any of them. ``harness/`` holds the parts that they share. A program is what is
left: its flags (settings), its order of events (run), its own figures, its own report.

    demo/     the demo pair: PARSE beside the plain target and the draft alone
    compare/  any models and servers: PARSE beside all that stock SGLang has, as one page
    limit/    ``sglang-parse bench``: real shapes without weights, against the limit
    soak/     thousands of mixed requests: nothing may fail, leak or come out different
    kv.py     ``sglang-parse bench-kv``: KV slots held, PARSE beside STANDALONE
    tasks/    problems to grade answers by
"""
