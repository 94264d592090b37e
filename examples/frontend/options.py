"""PARSE's options for one program: the server's, exact, switched off, a draft; with traces.

python examples/frontend/options.py http://127.0.0.1:30000
"""

import argparse

import sglang as sgl

from sglang_parse.frontend import ParseEndpoint

PROBLEM = """\
Start with 23
a: + 45
b: - 31
c: + 50
Start with 60
p: - 12
q: + 37
r: - 25"""
WAYS = {
    "as the server has it": {},
    "exact": {"threshold": 1.5},
    "switched off": {"enabled": False},
}


@sgl.function
def solve(s, problem):
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("answer", max_tokens=200, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = ParseEndpoint(parser.parse_args().url, chat_template_name="chatml", trace=True)
    answers = {
        title: show(title, backend.with_options(**options)) for title, options in WAYS.items()
    }
    show("its answer as a draft", backend.with_options(draft=answers["exact"]))


def show(title: str, backend: ParseEndpoint) -> str:
    state = solve.run(problem=PROBLEM, backend=backend)
    (info,) = state.get_meta_info("answer")["parse"]
    kept = f"{info['accepted_tokens']} of {info['drafted_tokens']} draft tokens kept"
    print(f"{title}: {info['mode']}, {kept}, {state['answer'].splitlines()[-1]!r}")
    for record in info["trace"]:
        print("  verdicts", record["source"], [round(verdict, 4) for verdict in record["verdicts"]])
    return state["answer"]


if __name__ == "__main__":
    main()
