"""Conversations side by side: a later turn starts from the KV of the turns before it.

    python examples/frontend/multi_turn.py http://127.0.0.1:30000

The demo pair knows two kinds of turns: a problem, and the question whether its answer is correct.
"""

import argparse

import sglang as sgl

PROBLEMS = (
    "Start with 40\na: + 58\nb: - 72\nc: + 50\nd: + 13\ne: - 71\nf: + 11",
    "Start with 70\na: - 27\nb: + 56\nc: - 60\nd: + 14\ne: + 36\nf: - 10\ng: + 20",
    "Start with 70\na: - 10\nb: - 31\nc: + 29\nd: - 29\ne: + 66\nf: - 36",
)


@sgl.function
def talk(s, problem):
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("answer", max_tokens=200, temperature=0))
    s += sgl.user("Answer correct?")
    s += sgl.assistant(sgl.gen("opinion", max_tokens=1, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    chats = [{"problem": problem} for problem in PROBLEMS]
    for state in talk.run_batch(chats, num_threads=len(chats), backend=backend):
        print(f"{state['answer']}\ncorrect? {state['opinion']}")
        print(state.get_meta_info("answer")["parse"])
        later = state.get_meta_info("opinion")
        print(later["cached_tokens"], "of", later["prompt_tokens"], "tokens from the cache\n")


if __name__ == "__main__":
    main()
