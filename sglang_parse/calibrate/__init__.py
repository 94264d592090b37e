"""``sglang-parse calibrate``: a threshold with a promise, and what every threshold would cost.

settings.py reads what is asked; run.py is the order of events, made of the harness's parts.
drafts.py collects first drafts and what the target says of them, served.py answers with the
threshold beside the plain target's; both keep what they have on disk. losses.py says what a rule
keeps at a threshold, certify.py tests thresholds, figures.py counts: statistics only. report.py,
page.py and show.py write and print them.
"""
