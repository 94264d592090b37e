"""``sglang-parse try``: what PARSE gains for one pair of models, why not more, and what to set.

settings.py has the flags and the servers that they start; run.py checks the pair and asks the
prompts; forecast.py computes what other judges and draft lengths would give; report.py says it.
"""
