"""What the process behind ``bench_serving`` imports once, for all its runs: see serving.py."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that SGLang finds no GPU here is known
    # What ``python -m sglang.bench_serving`` is.
    from sglang.benchmark.serving import cli_main  # noqa: F401
