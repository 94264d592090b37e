"""``select``: the answer is drafted; the target chooses, by log probabilities of the choices.

python examples/frontend/choose.py http://127.0.0.1:30000
"""

import argparse

import sglang as sgl

PROBLEM = "Start with 40\na: + 58\nb: - 72\nc: + 50\nd: + 13\ne: - 71\nf: + 11"
RIGHT = """\
a: 40 + 58 = 98
b: 98 - 72 = 26
c: 26 + 50 = 76
d: 76 + 13 = 89
e: 89 - 71 = 18
f: 18 + 11 = 29
Answer: 29"""
WRONG = """\
a: 40 + 58 = 98
b: 98 - 72 = 26
c: 26 + 50 = 76
d: 76 + 13 = 86
e: 86 - 71 = 15
f: 15 + 11 = 26
Answer: 26"""


@sgl.function
def check(s, problem, answer):
    s += sgl.user(problem)
    s += sgl.assistant(answer or sgl.gen("answer", max_tokens=200, temperature=0))
    s += sgl.user("Answer correct?")
    s += sgl.assistant(sgl.select("verdict", choices=["yes", "no"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    for title, answer in (("its own answer", None), ("right", RIGHT), ("wrong", WRONG)):
        state = check.run(problem=PROBLEM, answer=answer, backend=backend)
        scores = state.get_meta_info("verdict")["normalized_prompt_logprobs"]
        print(f"{title}: {state['verdict']} (log probabilities of yes and no: {scores})")


if __name__ == "__main__":
    main()
