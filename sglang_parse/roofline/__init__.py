"""``sglang-parse roofline``: what a pair can gain on a GPU, from its shapes; no GPU needed.

``settings`` has models, GPUs and the command line, ``forwards`` what forwards and answers take,
``rounds`` what is lost between them, ``run`` the tables.
"""
