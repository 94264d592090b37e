"""``sglang-parse calibrate``: certifies a threshold and measures every other one.

``settings`` parses the command line and ``run`` is the order of events. ``collect`` requests first
drafts and whole answers and stores them on disk. ``first_draft`` (the loss), ``certify`` (the
test) and ``figures`` are pure statistics. ``report`` writes calibration.json and the tables that
the terminal and ``page`` (report.html) render.
"""
