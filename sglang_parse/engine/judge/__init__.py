"""The judge: where verdicts on a draft's prefixes come from.

    judge       from a question, a verdict head, or both; what the engine asks
    scorer      the likelihood and verdict heads on the device, and the hidden states they read
    likelihood_kernel    the likelihood on a GPU

``core.judge`` has the formulas, ``core.selection`` what verdicts decide.
"""
