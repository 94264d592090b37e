"""``sglang-parse roofline``: what a pair can gain on a GPU, from its shapes; no GPU needed.

``shape`` has models and GPUs, ``settings`` the command line, ``cost`` what forwards and answers
take, ``run`` the tables.
"""
