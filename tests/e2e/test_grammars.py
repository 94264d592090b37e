"""Constrained requests are drafted: JSON schemas, regexes, EBNF, structural tags and tool calls.

The random pair knows no format: what it writes under a grammar is nonsense, but valid, and token
for token the plain server's.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from support.bodies import by_value
from support.client import EXACT, Client, assert_same, ids_of, parse_info, random_prompts
from support.demo_pair import DEMO
from support.models import load_tokenizer

PROMPTS = random_prompts(10, 61)
FREE = {"max_new_tokens": 40, "ignore_eos": True}


def schema(**properties: dict) -> dict[str, str]:
    wanted = {"type": "object", "properties": properties, "required": [*properties]}
    return {"json_schema": json.dumps(wanted)}


GRAMMARS = {
    "line": {"regex": "[a-z ]{20,40}"},
    "lines": {"regex": "([ab]: [0-9]+\n){3,5}"},
    "choice": {"regex": "(ab|cd){4,6}"},
    "equations": {"regex": "([0-9]{1,3} [+*-] [0-9]{1,3} = -?[0-9]{1,4}\n){2,4}"},
    "date": {"regex": "20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"},
    "unbounded": {"regex": "x[0-9a-f]*"},
    "stops": {"regex": "([ab]: [0-9]+\n){3,5}", "stop": ["7\n", "b: ", "<|im_end|>"]},
    "yes or no": {"ebnf": 'root ::= ("yes" | "no " root)'},
    "list": {"ebnf": 'root ::= "[" num ("," num)* "]"\nnum ::= [0-9]+'},
    "nested": {"ebnf": 'root ::= "(" root* ")" | [a-c]'},
    "boolean": {"json_schema": '{"type": "boolean"}'},
    "object": schema(ok={"type": "boolean"}, n={"enum": [1, 22]}),
    "numbers": schema(n={"type": "integer"}, x={"type": "number"}),
    "string": schema(name={"type": "string", "maxLength": 12}, ok={"type": "boolean"}),
    "array": {"json_schema": '{"type": "array", "items": {"type": "integer"}, "maxItems": 5}'},
    "one of two": {"json_schema": '{"anyOf": [{"type": "integer"}, {"type": "null"}]}'},
    "pattern": schema(id={"type": "string", "pattern": "^[a-f]{3}-[0-9]{2,4}$"}),
    "any object": {"json_schema": '{"type": "object"}'},
    "inner": schema(a=json.loads(schema(b={"enum": ["p", "q"]})["json_schema"])),
    "penalty": {"regex": "[a-z ]{20,40}", "repetition_penalty": 1.3},
    "bias": {"regex": "([0-9a-c]{3},){4,9}", "logit_bias": {"20": 3.0, "21": -9.0}},
    "tag": {
        "structural_tag": json.dumps(
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}],
                "triggers": ["<f"],
            }
        )
    },
}
KINDS = ("regex", "ebnf", "json_schema", "structural_tag")
LONG = {"max_new_tokens": 72}
tokenizer = load_tokenizer(DEMO / "target")
xgrammar = XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
llguidance = GuidanceBackend(
    tokenizer, n_vocab=len(tokenizer), eos_token_ids=[tokenizer.eos_token_id]
)


MORE = pytest.mark.nightly("tests/e2e/test_grammars.py::test_output_equals_the_plain_servers")
JOBS = [(name, place) for place in range(len(PROMPTS)) for name in GRAMMARS]


class Answers:
    """What the plain server answers: (grammar, prompt) -> its answer."""

    def __init__(self, client: Client, **options: dict) -> None:
        self._client, self._options = client, options
        self._known: dict[tuple[str, int], dict] = {}

    def to(self, jobs: list[tuple[str, int]]) -> list[dict]:
        new = [job for job in jobs if job not in self._known]
        with ThreadPoolExecutor(8) as pool:
            self._known |= zip(new, pool.map(self._ask, new), strict=True)
        return [self._known[job] for job in jobs]

    def _ask(self, job: tuple[str, int]) -> dict:
        return ask(self._client, job, **self._options)


def ask(client: Client, job: tuple[str, int], **options: dict) -> dict:
    name, place = job
    return client.generate(PROMPTS[place], **options, **LONG, **GRAMMARS[name])


@pytest.fixture(scope="module")
def expected(plain: Client) -> Answers:
    return Answers(plain)


@pytest.mark.parametrize(
    ("server", "concurrency", "count"),
    [
        *(("token", 8, 22), ("overlap", 8, 26), ("blocks", 8, 26)),
        *(
            pytest.param(*case, marks=MORE)
            for case in (
                *(("token", 1, 3), ("token", 8, 44)),
                *(("semantic", 8, 26), ("overlap", 1, 3)),
            )
        ),
    ],
)
def test_output_equals_the_plain_servers(
    request: pytest.FixtureRequest,
    plain: Client,
    expected: Answers,
    server: str,
    concurrency: int,
    count: int,
):
    """Beside unconstrained requests; prompts come again, from the prefix cache."""
    client: Client = request.getfixturevalue(server)
    options = {} if server == "token" else {"parse": EXACT}
    if server == "blocks":  # llguidance refuses some tokens that xgrammar allows
        expected = Answers(client, parse={"enabled": False})
    jobs = JOBS[:count]
    with ThreadPoolExecutor(concurrency) as pool:
        ours = [pool.submit(ask, client, job, **options) for job in jobs]
        free = [pool.submit(client.generate, prompt, **options, **FREE) for prompt in PROMPTS[:4]]
    for (name, _), job, theirs in zip(jobs, ours, expected.to(jobs), strict=True):
        assert_same(job.result(), theirs)
        info = parse_info(job.result())
        assert (info["mode"], name) == ("parse", name)
        assert info["drafted_tokens"] > 0 or len(job.result()["output_ids"]) < 5
    assert count < 26 or max(job.result()["meta_info"]["cached_tokens"] for job in ours) > 16
    theirs = plain.generate_all(PROMPTS[:4], 4, **FREE)
    assert ids_of([job.result() for job in free]) == ids_of(theirs)
    client.assert_nothing_lost()


def begins_validly(name: str, answer: dict, backend: Any) -> bool:
    """Whether a matcher accepts the answer as a beginning."""
    kind = next(kind for kind in KINDS if kind in GRAMMARS[name])
    key = kind.removesuffix("_schema"), GRAMMARS[name][kind]
    matcher = backend._init_value_dispatch(key, require_reasoning=False)
    try:
        for token in answer["output_ids"]:
            matcher.accept_token(token)
    except ValueError:
        return False
    return True


def is_valid(name: str, answer: dict, backend: Any = xgrammar) -> bool:
    """Whether the text is one of the grammar's; its beginning, if the length limit cut it."""
    grammar, text = GRAMMARS[name], answer["text"]
    if answer["meta_info"]["finish_reason"]["type"] == "length":
        return begins_validly(name, answer, backend)
    if "json_schema" in grammar:
        # xgrammar allows control characters in strings.
        wanted, found = json.loads(grammar["json_schema"]), json.loads(text, strict=False)
        return {*wanted.get("required", ())} <= {*found} if isinstance(found, dict) else True
    if "regex" not in grammar or "stop" in grammar:
        return True
    return bool(re.fullmatch(grammar["regex"], text))


@pytest.mark.parametrize("server", ["overlap", "blocks", pytest.param("semantic", marks=MORE)])
def test_accepted_drafts_are_valid(request: pytest.FixtureRequest, server: str):
    client: Client = request.getfixturevalue(server)
    jobs = JOBS[: len(GRAMMARS)]
    answers = Answers(client, parse={"threshold": 0.0}).to(jobs)
    for (name, _), answer in zip(jobs, answers, strict=True):
        backend = llguidance if server == "blocks" else xgrammar
        assert is_valid(name, answer, backend), (name, answer["text"])
    assert sum(parse_info(answer)["accepted_tokens"] for answer in answers) > len(jobs)


def test_sampled_output_is_valid(overlap: Client):
    """Drafts and bonus tokens are drawn under the mask, each by its request's parameters."""
    drawn = {"temperature": 1.3, "top_p": 0.95, "regex": GRAMMARS["lines"]["regex"]}
    answers = overlap.generate_all(PROMPTS[:4], 4, parse={"threshold": 0.5}, **LONG, **drawn)
    assert all(is_valid("lines", answer) for answer in answers)
    assert len({answer["text"] for answer in answers}) == len(answers)


@pytest.mark.parametrize(("server", "options"), [("token", {}), ("overlap", EXACT)])
def test_log_probabilities(
    request: pytest.FixtureRequest, plain: Client, server: str, options: dict
):
    """Those under the grammar, as SGLang's."""
    client: Client = request.getfixturevalue(server)
    for name in ("lines", "numbers", "choice"):
        wish = {**LONG, **GRAMMARS[name], "top": {"return_logprob": True, "top_logprobs_num": 2}}
        ours = client.generate(PROMPTS[0], parse=options, **wish)
        theirs = plain.generate(PROMPTS[0], **wish)
        assert_same(ours, theirs)
        assert parse_info(ours)["drafted_tokens"] > 0
        for key in ("output_token_logprobs", "output_top_logprobs"):
            left, right = (numbers(answer["meta_info"][key]) for answer in (ours, theirs))
            assert left == pytest.approx(right, abs=1e-4)


def numbers(nested: Any) -> list[float]:
    if isinstance(nested, list):
        return [number for item in nested for number in numbers(item)]
    return [nested] if isinstance(nested, (int, float)) else []


@pytest.mark.parametrize("server", ["token", "overlap"])
def test_aborts(request: pytest.FixtureRequest, plain: Client, server: str):
    client: Client = request.getfixturevalue(server)
    long = {"regex": "[a-z ]{2000}", "max_new_tokens": 100}
    theirs = ids_of(plain.generate_all(PROMPTS[:4], 4, **long))
    client.generate(PROMPTS[0], **{**long, "max_new_tokens": 1})  # its grammar is compiled now

    def constrained(number: int) -> dict:
        top = {"rid": f"constrained-{server}-{number}"}
        return client.generate(PROMPTS[number % 4], parse=EXACT, top=top, **long)

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(constrained, number) for number in range(8)]
        for number in range(0, 8, 2):
            time.sleep(0.1)
            client.abort(f"constrained-{server}-{number}")
        answers = [job.result() for job in jobs]
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert kinds[1::2] == ["length"] * 4
    assert "abort" in kinds[0::2]
    for number, ids in enumerate(ids_of(answers)):
        assert ids == theirs[number % 4][: len(ids)]
    client.assert_nothing_lost()


THOUGHTS_END = tokenizer.encode("</think>", add_special_tokens=False)
"""Several tokens: a draft may end in the middle."""
SERVERS = [("token", {}), ("overlap", EXACT), ("overlap", {"threshold": 0.0})]


def ends_thoughts() -> dict[str, str]:
    """Request fields: output from the 10th token on is ``ids``. The random pair thinks forever."""

    class EndsThoughts(CustomLogitProcessor):
        is_pure = True

        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for row, params in enumerate(custom_param_list):
                place = len(params["__req__"].output_ids) - 9
                if 0 <= place < len(params["ids"]):
                    logits[row, params["ids"][place]] = 1e4
            return logits

    return by_value(EndsThoughts)


@pytest.mark.parametrize(("server", "options"), SERVERS)
def test_a_grammar_begins_where_thoughts_end(
    request: pytest.FixtureRequest, plain: Client, server: str, options: dict
):
    client: Client = request.getfixturevalue(server)
    top = {**ends_thoughts(), "require_reasoning": True}

    def ask(client: Client, name: str, **more: dict) -> dict:
        params = {"ids": THOUGHTS_END, **more}
        wish = {"max_new_tokens": 60, "top": top, "custom_params": params, **GRAMMARS[name]}
        return client.generate(PROMPTS[0], **wish)

    names = ("lines", "object", "list")
    with ThreadPoolExecutor(2 * len(names)) as pool:
        jobs = [
            (pool.submit(ask, client, name, parse=options), pool.submit(ask, plain, name))
            for name in names
        ]
    for name, both in zip(names, jobs, strict=True):
        ours, theirs = (job.result() for job in both)
        before, _, after = ours["text"].partition("</think>")
        assert len(tokenizer.encode(before)) >= 9
        begun = 9 + len(THOUGHTS_END)  # see ``ends_thoughts``
        assert is_valid(name, {**ours, "text": after, "output_ids": ours["output_ids"][begun:]})
        assert parse_info(ours)["drafted_tokens"] > 0
        if options != {"threshold": 0.0}:
            assert_same(ours, theirs)


@pytest.mark.parametrize(("server", "options"), [("token", {}), ("overlap", EXACT)])
def test_a_prediction_is_cut_where_it_is_refused(
    request: pytest.FixtureRequest, plain: Client, server: str, options: dict
):
    client: Client = request.getfixturevalue(server)
    grammar = {"regex": "[ab]{12}( [cd]{12})+", "max_new_tokens": 72}
    expected = plain.generate(PROMPTS[0], **grammar)
    options = {**options, "draft": expected["text"].replace("c", "xc", 1), "trace": True}
    answer = client.generate(PROMPTS[0], parse=options, **grammar)
    assert_same(answer, expected)
    records = [r for r in parse_info(answer)["trace"] if r["source"] == "prediction"]
    assert records
    assert "x" not in tokenizer.decode([t for r in records for t in r["draft_token_ids"]])


ADD = {
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}, "ok": {"type": "boolean"}},
        "required": ["a", "ok"],
        "additionalProperties": False,
    },
}
BLANKS = [t for t in range(3, len(tokenizer)) if not tokenizer.decode([t]).strip()]
NO_BLANKS = {str(token): -50.0 for token in BLANKS}
"""JSON allows them nearly everywhere, and the random pair writes them forever."""
CHOICES = ("auto", "required", {"type": "function", "function": {"name": "add"}})


def chat(client: Client, choice: Any, thinks: bool, options: dict | None) -> dict[str, Any]:
    """An answer of the OpenAI API."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Start with 12"}],
        "tools": [{"type": "function", "function": ADD}],
        "tool_choice": choice,
        "max_tokens": 40 if choice == "auto" else 150,
        "temperature": 0,
        "logit_bias": NO_BLANKS,
        "return_meta_info": True,
        "chat_template_kwargs": {"enable_thinking": thinks},
        "custom_params": {"ids": THOUGHTS_END if thinks else []},
        **ends_thoughts(),
    }
    if options is not None:
        body["custom_params"]["parse"] = client.options_of(options)
    response = client.post("/v1/chat/completions", body)
    response.raise_for_status()
    (found,) = response.json()["choices"]
    return found


@pytest.mark.parametrize(("server", "options"), SERVERS)
@pytest.mark.parametrize("thinks", [pytest.param(False, marks=MORE), True])
def test_tool_calls(
    request: pytest.FixtureRequest, plain: Client, server: str, options: dict, thinks: bool
):
    """The arguments are valid, and those of plain decoding in exact modes."""
    client: Client = request.getfixturevalue(server)
    with ThreadPoolExecutor(2 * len(CHOICES)) as pool:
        jobs = [
            [pool.submit(chat, one, choice, thinks, asked) for choice in CHOICES]
            for one, asked in ((client, options), (plain, None))
        ]
    for choice, *both in zip(CHOICES, *jobs, strict=True):
        ours, theirs = (job.result() for job in both)
        (info,) = ours.pop("meta_info")["parse"]
        assert info["mode"] == "parse"
        assert info["drafted_tokens"] > 0
        message, expected = ours["message"], theirs["message"]
        assert bool(message.get("reasoning_content")) == thinks
        if choice != "auto":  # the random pair writes text then
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "add"
            arguments = json.loads(call["function"]["arguments"])
            assert (arguments["a"] in (1, 22), arguments["ok"] in (True, False)) == (True, True)
        if options == {"threshold": 0.0}:
            continue
        for made in (message, expected):
            for call in made.get("tool_calls", ()):
                del call["id"]
        assert message == expected
        assert ours["finish_reason"] == theirs["finish_reason"]


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.5])
def test_no_draft_is_cut_or_resumed_in_a_tool_prelude(overlap: Client, threshold: float):
    prelude = '<call>\n{"name": "add", "arguments": '
    content = {"type": "json_schema", "json_schema": ADD["parameters"]}
    tag = {"begin": prelude, "content": content, "end": "}</call>"}
    called = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    called |= {"at_least_one": True, "stop_after_first": True}
    answer = overlap.generate(
        PROMPTS[0],
        parse={"threshold": threshold, "trace": True},
        structural_tag=json.dumps({"type": "structural_tag", "format": called}),
        max_new_tokens=120,
    )
    assert answer["text"].startswith(prelude)

    def assert_outside(ids: list[int]) -> None:
        text = tokenizer.decode(ids)
        assert not prelude.startswith(text) or text == prelude

    first, *others = parse_info(answer)["trace"]
    assert others
    for record in (first, *others):
        before = answer["output_ids"][: record["output_start"]]
        if record is not first:
            assert_outside(before)
        for end in record["prefix_ends"]:
            assert_outside([*before, *record["draft_token_ids"][:end]])
