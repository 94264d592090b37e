"""Texts go on where the EAGLE-3 head's proposals end, in the same verify pass: counts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR, load_problems
from support.client import Client, ids_of, parse_info
from support.demo_pair import rendered
from support.servers import COPIES, PARSE, SEED, Start, served

TARGET = ("--model-path", str(DEMO_PAIR / "target"), *PARSE, *COPIES, *SEED)
TOKEN = ("--parse-verification", "token")
HEAD = ("--parse-eagle3-path", str(DEMO_PAIR / "eagle3"))
LIMIT = {"max_new_tokens": 160}


@pytest.fixture(scope="module")
def headed(start_server: Start) -> Iterator[Client]:
    yield from served(
        start_server,
        "tails-head",
        *TARGET,
        *TOKEN,
        *HEAD,
        *json.loads(os.environ.get("MORE", "[]")),
    )


@pytest.fixture(scope="module")
def notail(start_server: Start) -> Iterator[Client]:
    yield from served(
        start_server,
        "tails-none",
        *TARGET,
        *TOKEN,
        *HEAD,
        *json.loads(os.environ.get("MORE", "[]")),
        PARSE_MAX_TAIL="0",
    )


@pytest.fixture(scope="module")
def texts(start_server: Start) -> Iterator[Client]:
    yield from served(
        start_server, "tails-texts", *TARGET, *TOKEN, *json.loads(os.environ.get("MORE", "[]"))
    )


DIGITS = str.maketrans("0123456789", "1234567890")


def changed(text: str, every: int) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(
        line.translate(DIGITS) if n % every == every - 1 else line for n, line in enumerate(lines)
    )


@pytest.fixture(scope="module")
def kinds(wordings_plain: Client):
    module = load_problems()
    asked = rendered(DEMO_PAIR / "target", module.held_out_problems(8, seed=1))
    plain = [
        one["text"].replace("<|im_end|>", "")
        for one in wordings_plain.generate_all(asked, 8, **LIMIT)
    ]
    kinds = {
        "prediction, every 3rd line": [(a, {"draft": changed(t, 3)}) for a, t in zip(asked, plain)],
        "prediction, every 2nd line": [(a, {"draft": changed(t, 2)}) for a, t in zip(asked, plain)],
        "prediction, all": [(a, {"draft": changed(t, 1)}) for a, t in zip(asked, plain)],
        "prompt, every 3rd line": [(changed(t, 3) + a, {}) for a, t in zip(asked, plain)],
        "prompt, all": [(changed(t, 1) + a, {}) for a, t in zip(asked, plain)],
        "no text": [(a, {}) for a in asked],
        "noise prediction": [(a, {"draft": "and so on, as ever. " * 20}) for a in asked],
    }
    out = {}
    for name, rows in kinds.items():
        wanted = ids_of(wordings_plain.generate_all([p for p, _ in rows], 8, **LIMIT))
        out[name] = (rows, wanted)
    return out


def passes(answers):
    return sum(parse_info(a)["target_tokens"] for a in answers) - len(answers)


def run(client: Client, rows, concurrency, **more):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(concurrency) as pool:
        return [*pool.map(lambda r: client.generate(r[0], parse={**r[1], **more}, **LIMIT), rows)]


def test_counts(headed, texts, notail, kinds):
    out = {}
    for c in json.loads(os.environ.get("CONC", "[8, 1]")):
        for name, (rows, wanted) in kinds.items():
            res = {}
            for label, client, rr, more in (
                ("head", headed, [(p, {}) for p, _ in rows], {"prompt_drafts": "off"}),
                ("texts", texts, rows, {}),
                ("untailed", notail, rows, {}),
                ("both", headed, rows, {}),
            ):
                answers = run(client, rr, c, **more)
                assert ids_of(answers) == wanted, (label, name)
                n = sum(map(len, wanted))
                res[label] = round(n / passes(answers), 2)
                if label == "both":
                    src = {}
                    for a in answers:
                        for s, v in parse_info(a)["sources"].items():
                            t = src.setdefault(s, [0, 0, 0])
                            t[0] += v["rounds"]
                            t[1] += v["drafted_tokens"]
                            t[2] += v["accepted_tokens"]
                    res["sources"] = src
            best = max(res["head"], res["texts"])
            print(
                "COUNT",
                time.strftime("%X"),
                c,
                name,
                res,
                "ratio",
                round(res["both"] / best, 3),
                flush=True,
            )
    headed.assert_nothing_lost()
