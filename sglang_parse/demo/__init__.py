"""``sglang-parse demo``: PARSE, the plain target and the draft alone, measured side by side.

run.py is a preset of the harness's match, as the comparison is; figures.py turns its legs into
figures; report.py and show.py write and print them. Our own clock times it, not ``bench_serving``
as in the comparison: the limit needs the stage times of the very requests that are timed.
"""
