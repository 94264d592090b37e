"""``sglang-parse explain``: every judgement of an answer, on one page and on the terminal.

    settings  what can be asked for
    sources   answers with traces: from a running server, or from files
    page      explain.html, one file that needs nothing else
    run       the order of events

The answer is taken apart in ``client.traced``, which the demo shows its answer with, too.
"""
