"""Fork: one prompt, several sampled answers side by side, and the result most of them reach.

python examples/frontend/fork.py http://127.0.0.1:30000
"""

import argparse
from collections import Counter

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
NUM_BRANCHES = 5


@sgl.function
def vote(s, problem):
    s += sgl.user(problem)
    s.sync()  # fork sends the prompt ahead, so that branches share its KV, only if it is there
    branches = s.fork(NUM_BRANCHES)
    for branch in branches:
        branch += sgl.assistant(sgl.gen("answer", max_tokens=200, temperature=0.7))
    s["infos"] = [branch.get_meta_info("answer") for branch in branches]
    s["answers"] = [branch["answer"] for branch in branches]
    s["results"] = Counter(answer.splitlines()[-1] for answer in s["answers"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    state = vote.run(problem=PROBLEM, backend=backend)
    for answer, info in zip(state["answers"], state["infos"], strict=True):
        print(answer.splitlines()[-1], info["parse"])
    print("most:", state["results"].most_common(1))


if __name__ == "__main__":
    main()
