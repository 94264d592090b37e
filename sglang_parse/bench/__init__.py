"""``sglang-parse bench``: real shapes without weights, simulated acceptance, beside stock SGLang.

A preset of compare: ``settings`` has the command line, the servers and the comparison that they are
for, ``run`` the order of events.
"""
