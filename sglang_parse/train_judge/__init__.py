"""``sglang-parse train-judge``: trains a verdict head on labeled first drafts.

``settings`` parses the command line and ``run`` is the order of events. ``labels`` says where the
labels come from and ``gather`` requests drafts with the target's hidden states. ``training`` (the
head) and ``figures`` (how well it tells right from wrong) are pure. ``report`` writes judge.json
and the terminal's output, ``page`` report.html.
"""
