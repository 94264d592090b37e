"""``sglang-parse soak``: many mixed requests at once; nothing may fail, leak or come out different.

load.py makes the requests and knows what is wrong with an answer; drive.py sends them, over httpx
because some must be aborted or hung up on midway; run.py is the order of events.
"""
