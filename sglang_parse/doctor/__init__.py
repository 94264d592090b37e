"""``sglang-parse doctor``: checks a server before it starts, or while it runs.

The checks before a start are those of ``startup``. A start stops at the first failure; the doctor
runs all of them and reports each with its fix.

    finding   a line of the table
    machine   this Python: versions, plugin, patches
    start     the server that the given flags would start
    memory    what it adds on each GPU
    served    a running server: its settings, and answers to prompts
    evidence  what the answers tell
"""
