"""``sglang-parse calibrate``: certifies a threshold and measures every other one.

``settings`` parses the command line and ``run`` is the order of events; ``tasks.collect`` requests
first drafts and whole answers. ``figures`` has the test, pure statistics.
``report`` describes them: calibration.json, the terminal, report.html.
"""
