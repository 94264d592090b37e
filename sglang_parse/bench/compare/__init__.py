"""``sglang-parse compare``: PARSE beside everything stock SGLang has, on the same machine.

lineup.py says which servers and how they are started; pool.py keeps some of them alive; drive.py
runs SGLang's own ``bench_serving`` against one; figures.py turns what came back into figures;
results.py and page.py write them; run.py is the order of events. No server imports any of it.
"""
