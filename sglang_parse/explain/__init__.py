"""``sglang-parse explain``: an answer's drafts and verdicts, on one page and on the terminal.

    settings  the command's flags
    page      explain.html
    run       answers with traces, from a running server or from files; the program

``client.traced`` splits an answer into rounds and segments; compare prints one, too.
"""
