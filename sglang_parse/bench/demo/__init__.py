"""``sglang-parse demo``: PARSE, the plain target and the draft alone, measured side by side.

servers.py starts, suspends and ends SGLang servers; load.py sends problems to one of them;
figures.py turns what came back into figures; report.py and show.py write and print them; run.py
is the order of events. Nothing here is imported by a server.
"""
