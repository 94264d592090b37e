"""``sglang-parse compare``: PARSE beside everything stock SGLang has, on the same machine.

settings.py reads what is compared; run.py is a preset of the harness's match, as the demo is;
serving.py is its clock, SGLang's own ``bench_serving`` against one server; figures.py and
quality.py turn what came back into figures; report.py, page.py and show.py write and print them.
"""
