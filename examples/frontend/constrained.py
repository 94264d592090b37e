"""Constrained generation: what a grammar rules is drafted under it.

python examples/frontend/constrained.py http://127.0.0.1:30000
"""

import argparse
import json

import sglang as sgl

PROBLEM = """\
Start with 23
a: + 45
b: - 31
c: + 50
Start with 60
p: - 12
q: + 37
r: - 25"""
LINE = r"[ap]: \d\d [+-] \d\d = \d\d\n"
SCHEMA = json.dumps({"enum": ["yes", "no"]})


@sgl.function
def fill_in(s, problem):
    s += sgl.user(problem)
    with s.assistant():
        s += sgl.gen("first line", max_tokens=32, temperature=0, regex=LINE)
        s += sgl.gen("free", max_tokens=200, temperature=0)
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("number", max_tokens=8, temperature=0, dtype=int))
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("word", max_tokens=8, temperature=0, json_schema=SCHEMA))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    state = fill_in.run(problem=PROBLEM, backend=backend)
    for name in ("first line", "free", "number", "word"):
        (info,) = state.get_meta_info(name)["parse"]
        print(f"{name}: {state[name]!r} {info['mode']}: {info.get('reason', 'drafted')}")


if __name__ == "__main__":
    main()
