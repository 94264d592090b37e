"""``sglang-parse compare``, ``demo`` and ``load``: PARSE versus stock SGLang on one machine.

settings.py has the flags and the presets; run.py is the run loop over servers; serving.py runs
SGLang's ``bench_serving`` against one of them; figures.py makes figures of what comes back;
report.py describes them.
"""
