"""``sglang-parse models``: which models PARSE serves, and whether it serves a given one."""
