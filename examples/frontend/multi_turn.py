"""Conversations side by side: a later turn starts from the KV of the turns before it.

    python examples/frontend/multi_turn.py http://127.0.0.1:30000

The demo pair was taught one turn: what it says in the second one means nothing.
"""

import argparse

import sglang as sgl

PROBLEMS = (
    "Start with 23\na: + 45\nb: - 31\nc: + 50\nStart with 60\np: - 12\nq: + 37\nr: - 25",
    "Start with 40\na: + 58\nb: - 72\nc: + 50\nStart with 70\np: - 27\nq: + 56\nr: - 60",
    "Start with 70\na: - 10\nb: - 31\nc: + 29\nStart with 76\np: + 13\nq: - 71\nr: + 11",
)


@sgl.function
def talk(s, problem):
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("answer", max_tokens=200, temperature=0))
    s += sgl.user(problem)
    s += sgl.assistant(sgl.gen("again", max_tokens=16, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="a PARSE server")
    backend = sgl.RuntimeEndpoint(parser.parse_args().url, chat_template_name="chatml")
    chats = [{"problem": problem} for problem in PROBLEMS]
    for state in talk.run_batch(chats, num_threads=len(chats), backend=backend):
        print(state["answer"], state.get_meta_info("answer")["parse"])
        later = state.get_meta_info("again")
        print(later["cached_tokens"], "of", later["prompt_tokens"], "tokens from the cache\n")


if __name__ == "__main__":
    main()
