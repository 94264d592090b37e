"""``sglang-parse bench``: real shapes without weights, simulated acceptance, against the limit.

shape.py and shapes/ are the models; settings.py reads what is measured and makes the servers;
run.py is the order of events; load.py sends random tokens; memory.py and bounds.py know what memory
is taken and what the device could do at best; figures.py and report.py turn it into figures and
show them.
"""
