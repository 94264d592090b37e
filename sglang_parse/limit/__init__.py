"""``sglang-parse bench``: real shapes without weights, simulated acceptance, beside stock SGLang.

``shape`` and ``shapes/`` are the models, ``settings`` the command line and the servers, ``run`` the
order of events and the requests, ``figures`` the results.
"""
