"""``sglang-parse doctor``: will a server work, and does a running one? A line and a fix per thing.

No rule stands here twice: what is asked before a server is what ``startup`` asks when one starts,
one thing at a time and to the end, where a start stops at the first refusal.

    finding   a line of the table
    machine   this Python: versions, plugin, SGLang API, patches
    start     the server that some flags would start
    memory    what its models take
    served    a server that runs
"""
