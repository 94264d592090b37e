"""``sglang-parse roofline``: what a pair can gain on a GPU, from its shapes; no GPU needed.

``settings`` has models, GPUs and the command line, ``run`` what forwards and answers take.
"""
