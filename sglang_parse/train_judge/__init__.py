"""``sglang-parse train-judge``: trains a verdict head on labeled first drafts.

``settings`` parses the command line and ``run`` is the order of events; ``gather`` requests drafts
with the target's hidden states, and labels them. ``drafts`` (labeled ones),
``heads`` (candidates and their weights), ``training`` (which one, on what) and ``figures`` (how
well it tells right from wrong) are pure. ``result`` is judge.json and the head's weights,
``report`` describes it on the terminal and in report.html.
"""
