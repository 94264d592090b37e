"""``select``: text is drafted; the target chooses, by log probabilities of the choices.

python examples/frontend/choose.py http://127.0.0.1:30000
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
SUMS = ("a: 23 + 45 = 68", "a: 23 + 45 = 78", "a: 23 + 45 = 58")


@sgl.function
def check(s, problem):
    s += sgl.user(problem)
    with s.assistant():
        s += sgl.gen("first line", max_tokens=32, temperature=0, stop="\n") + "\n"
        s += sgl.select("sum", choices=list(SUMS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    state = check.run(problem=PROBLEM, backend=backend)
    print("drafted:", state["first line"], state.get_meta_info("first line")["parse"])
    scores = state.get_meta_info("sum")["normalized_prompt_logprobs"]
    print(f"chosen: {state['sum']!r} (log probabilities of {SUMS}: {scores})")


if __name__ == "__main__":
    main()
