"""Streams, stops and sessions where a step brings several tokens, or none: SGLang's own classes,
patched."""

from __future__ import annotations

import asyncio
import json
import random
import re
from array import array
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from support.demo_pair import DEMO
from support.models import load_tokenizer

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def parse_server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's plugins are loaded, and this process belongs to a server with PARSE."""
    from sglang.srt.plugins import load_plugins

    from sglang_parse.algorithm import NAME
    from sglang_parse.patches.parse import ollama_streams, tool_blocks

    load_plugins()
    spec = SimpleNamespace(speculative_algorithm=NAME)
    for module in (ollama_streams, tool_blocks):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    return spec


def steps(items: list, rng: random.Random) -> Iterator[list]:
    """``items`` as an answer's steps bring them."""
    start = 0
    while start < len(items):
        size = rng.choice((0, 1, 2, 3, 5, 17))
        yield items[start : start + size]
        start += size


# -- text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_each_character_is_sent_once(seed: int):
    """The demo pair's tokenizer writes one byte per token outside ASCII."""
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager

    rng = random.Random(seed)
    tokenizer = load_tokenizer(DEMO / "target")
    text = "".join(rng.choices("éß日本語😀𝄞 a\n", k=40))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    manager = object.__new__(DetokenizerManager)
    manager.decode_status, manager.vocab_size, manager.tokenizer = {}, len(tokenizer), tokenizer
    manager.disable_tokenizer_batch_decode = manager.is_tool_call_parser_gpt_oss = False
    manager.tool_close_token_ids = ()
    sent = ""
    for step in [*steps(ids, rng), None]:
        batch = SimpleNamespace(
            rids=["r"],
            decoded_texts=[""],
            decode_ids=[step or []],
            read_offsets=[0],
            finished_reasons=[None if step is not None else {"type": "length"}],
            no_stop_trim=[False],
            skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )
        sent += manager._decode_batch_token_id_output(batch)[0]
        assert text.startswith(sent)
    assert sent == text


# -- events -------------------------------------------------------------------------------


def make_req(**params: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=100, **params)
    sampling.normalize(_Characters())
    req = Req("r", "", array("q", [1]), sampling, vocab_size=128, eos_token_ids={0}, stream=True)
    req.tokenizer = _Characters()
    return req


class _Characters:
    """Token ids are code points."""

    eos_token_id = 0
    additional_stop_token_ids = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [*map(ord, text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("is_parse", [True, False])
def test_an_event_brings_a_token_or_the_end(monkeypatch: pytest.MonkeyPatch, is_parse: bool):
    from sglang.srt.managers.scheduler_components import output_streamer
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.algorithm import ParseAlgorithm

    parse = object.__new__(ParseAlgorithm)
    monkeypatch.setattr(parse, "is_none", lambda: False, raising=False)
    req, events = make_req(), []
    for new in ("a", "", "", "bcd", "", "e", "", None):
        if new is None:
            req.to_finish = SimpleNamespace(to_json=lambda: {"type": "abort"})
            req.update_finish_state(0)
        else:
            req.output_ids.extend(map(ord, new))
        accumulator = output_streamer._GenerationStreamAccumulator(
            return_logprob=False,
            return_hidden_states=False,
            return_routed_experts=False,
            return_indexer_topk=False,
            spec_algorithm=parse if is_parse else SpeculativeAlgorithm.NONE,
            disaggregation_mode=None,
            default_stream_interval=1,
            default_force_stream_interval=50,
            get_cached_tokens_details=lambda _: None,
            is_request_level_customized_info_key=lambda _: False,
            current_weight_version=None,
        )
        accumulator.accept(req=req)
        events += [_Characters().decode(ids) for ids in accumulator.output_ids]
    assert events == (["a", "bcd", "e", ""] if is_parse else ["a", "", "", "bcd", "", "e", "", ""])


# -- Ollama's API -------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["PARSE", None])
@pytest.mark.parametrize("api", ["chat", "generate"])
def test_ollamas_last_block(parse_server: SimpleNamespace, api: str, algorithm: str | None):
    from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
    from sglang.srt.entrypoints.ollama.serving import OllamaServing

    parse_server.speculative_algorithm = algorithm

    async def generate(*_: Any) -> AsyncIterator[dict[str, Any]]:
        for text, reason in (("one", None), ("one two", None), ("one two three", "length")):
            yield {"text": text, "meta_info": {"finish_reason": reason}}

    async def lines() -> list[dict[str, Any]]:
        tokenizer = SimpleNamespace(apply_chat_template=lambda *_, **__: [1])
        manager = SimpleNamespace(
            served_model_name="m", tokenizer=tokenizer, generate_request=generate
        )
        serving = OllamaServing(manager)
        if api == "chat":
            messages = [{"role": "user", "content": "count"}]
            request = OllamaChatRequest(model="m", messages=messages)
            response = await serving.handle_chat(request, None)
        else:
            response = await serving.handle_generate(
                OllamaGenerateRequest(model="m", prompt="count"), None
            )
        return [json.loads(line) async for line in response.body_iterator]

    events = asyncio.run(lines())
    texts = [
        event["message"]["content"] if api == "chat" else event["response"] for event in events
    ]
    assert texts == ["one", " two", *([" three"] if algorithm else []), ""]
    assert [event["done"] for event in events] == [False] * (len(texts) - 1) + [True]


# -- tool calls ---------------------------------------------------------------------------

CALLS = {
    "qwen": 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "é日 y"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "mul", "arguments": {"x": 5}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 12, "b": "é日 y"}}',
    "deepseekv3": "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 12, "b": "é日 y"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
    '<｜tool▁sep｜>mul\n```json\n{"x": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm45": "Sure.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>é日 y</arg_value>\n</tool_call>"
    "<tool_call>mul\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "kimi_k2": "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 12, "b": "é日 y"}<|tool_call_end|><|tool_call_begin|>'
    'functions.mul:1<|tool_call_argument_begin|>{"x": 5}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
}
MARKER = re.compile(r"<[^<>\n]+>")
ADDED = sorted({marker for text in CALLS.values() for marker in MARKER.findall(text)})
TOKEN = re.compile(rf"{MARKER.pattern}|\w+|\W")


def tools() -> list[Any]:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    shapes = {"add": {"a": "integer", "b": "string"}, "mul": {"x": "integer"}}
    return [
        Tool(
            function=Function(
                name=name,
                parameters={
                    "type": "object",
                    "properties": {k: {"type": t} for k, t in of.items()},
                },
            )
        )
        for name, of in shapes.items()
    ]


def collect(parts: list[tuple[str, list]]) -> tuple[str, dict[int, list]]:
    calls: dict[int, list] = {}
    for call in (call for _, new in parts for call in new):
        name, arguments = calls.get(call.tool_index, ["", ""])
        calls[call.tool_index] = [name + (call.name or ""), arguments + (call.parameters or "")]
    named = {index: [name, json.loads(given)] for index, (name, given) in calls.items()}
    return "".join(text for text, _ in parts), named


@pytest.mark.parametrize("family", CALLS)
def test_a_tool_call_may_come_in_blocks(family: str):
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    text = CALLS[family]
    tokenizer = SimpleNamespace(get_added_vocab=lambda: dict.fromkeys(ADDED, 0))

    def streamed(blocks: list[list[str]]) -> tuple[str, dict[int, list]]:
        parser = FunctionCallParser(tools(), family, tokenizer=tokenizer)
        parts = [parser.parse_stream_chunk("".join(block)) for block in blocks]
        return collect([*parts, parser.parse_stream_end()])

    content, calls = FunctionCallParser(tools(), family, tokenizer=tokenizer).parse_non_stream(text)
    whole = (content, collect([("", calls)])[1])
    tokens = TOKEN.findall(text)
    for blocks in ([tokens], *([*steps(tokens, random.Random(seed))] for seed in range(6))):
        new_content, new_calls = streamed(blocks)
        assert (new_content.strip(), new_calls) == (whole[0].strip(), whole[1])


def test_required_tool_calls_may_come_in_blocks():
    """A JSON array, where the server has no parser for the model's own format."""
    from sglang.srt.function_call.json_array_parser import JsonArrayParser

    calls = [("add", {"a": 12, "b": "é日, y"}), ("mul", {"x": 5})]
    text = json.dumps(
        [{"name": name, "parameters": given} for name, given in calls], ensure_ascii=False
    )
    for blocks in ([text], TOKEN.findall(text), [text[:40], text[40:]]):
        parser = JsonArrayParser()
        parts = [parser.parse_streaming_increment(block, tools()) for block in blocks]
        # Nothing is left for the end, which drops the first of two calls' arguments.
        assert collect([(p.normal_text, p.calls) for p in parts]) == (
            "",
            dict(enumerate(map(list, calls))),
        )


# -- stops --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "end"), [({"stop": ["ef"]}, 6), ({"stop_token_ids": [ord("d")]}, 4)]
)
def test_nothing_behind_a_stop_counts_as_reasoning(params: dict[str, Any], end: int):
    req = make_req(**params)
    req.output_ids.extend(map(ord, "abcdefghi"))
    req.update_reasoning_tokens(req.output_ids.tolist(), [99_999])
    req.update_finish_state(9)
    assert (req.finished_len, req.reasoning_tokens) == (end, end)


def test_reasoning_that_ended_before_the_stop():
    req = make_req(stop=["ef"])
    req.output_ids.extend(map(ord, "abcdefghi"))
    req.update_reasoning_tokens(req.output_ids.tolist(), [ord("c")])
    req.update_finish_state(9)
    assert (req.finished_len, req.reasoning_tokens) == (6, 3)


@pytest.mark.parametrize("options", [{}, {"offset": 3}, {"drop_previous_output": True}])
def test_a_sessions_next_turn_begins_with_what_was_output(options: dict[str, Any]):
    from sglang.srt.managers.io_struct import SessionParams
    from sglang.srt.session.session_controller import Session

    def next_prompt(last: Any) -> list[int]:
        turn = SimpleNamespace(input_ids=array("q", [7, 8]))
        prompts = Session._concat_token_arrays(last, turn, SessionParams(**options))
        assert prompts[0] == prompts[1]
        return [*prompts[0]]

    in_one_step, token_by_token = make_req(stop=["ef"]), make_req(stop=["ef"])
    in_one_step.output_ids.extend(map(ord, "abcdefghi"))
    in_one_step.update_finish_state(9)
    for token in map(ord, "abcdef"):
        token_by_token.output_ids.append(token)
        token_by_token.update_finish_state()
    assert next_prompt(in_one_step) == next_prompt(token_by_token)
    assert len(in_one_step.output_ids) == 9  # an iteration in flight may still read them


def test_nothing_is_searched_in_an_iteration_without_a_token(monkeypatch: pytest.MonkeyPatch):
    req = make_req(stop=["ef"])
    req.output_ids.extend(map(ord, "abc"))
    with monkeypatch.context() as patch:
        patch.setattr(type(req), "_check_vocab_boundary_finish", lambda *_: pytest.fail("searched"))
        req.update_finish_state(0)
    req.to_finish = SimpleNamespace()
    req.update_finish_state(0)
    assert req.finished()


# -- stock SGLang's penalties -------------------------------------------------------------


def test_stock_overlap_counts_penalized_tokens_one_step_late():
    """docs/fidelity.md says so: while the first decode step is prepared, the token of the prefill
    is not there yet, and the prompt's last token is counted instead."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    counted = []
    orchestrator = SimpleNamespace(cumulate_output_tokens=lambda ids: counted.extend(ids.tolist()))
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(output_ids=[], origin_input_ids=[5, 6])],
        device="cpu",
        sampling_info=SimpleNamespace(penalizer_orchestrator=orchestrator),
    )
    ScheduleBatch.cumulate_penalty_output_tokens(batch)
    assert counted == [6]
