"""One generation, streamed: the text as it comes, then what PARSE did for it.

python examples/frontend/gen.py http://127.0.0.1:30000
"""

import argparse

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


@sgl.function
def solve(s, problem):
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("answer", max_tokens=200, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    # The frontend guesses the chat format from the model's path; the demo pair's is ChatML.
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    state = solve.run(problem=PROBLEM, stream=True, backend=backend)
    for text in state.text_iter("answer"):
        print(text, end="", flush=True)
    print("\n", state.get_meta_info("answer")["parse"])


if __name__ == "__main__":
    main()
