"""A chat's messages, and its prediction, on their way from SGLang's APIs to the scheduler."""

from __future__ import annotations

import asyncio
import json
import pickle
from array import array
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.entrypoints.grpc_bridge import RuntimeHandle
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.managers import io_struct, tokenizer_manager
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.algorithm import NAME
from sglang_parse.core.config import ENV_VAR
from sglang_parse.patches.parse import chat_messages, predictions

pytestmark = pytest.mark.compat

MESSAGES = [
    {"role": "SYSTEM", "content": "be brief", "name": "secret"},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "what"},
            {"type": "image_url", "image_url": {"url": "http://inside/secret"}},
            {"type": "text", "text": "is it?"},
        ],
        "field": "secret",
    },
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "secret",
        "tool_calls": [{"id": "1", "function": {"name": "secret", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]
TEXTS = [("system", "be brief"), ("user", "what is it?"), ("assistant", ""), ("tool", "42")]


@pytest.fixture(autouse=True, scope="module")
def patched() -> None:
    load_plugins()


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_msgpack(value: Any) -> Any:
    return io_struct.msgpack_decode(io_struct.msgpack_encode(value))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> TokenizerManager:
    manager = object.__new__(TokenizerManager)
    times = SimpleNamespace(set_tokenize_finish_time=lambda: None)
    vars(manager).update(
        preferred_sampling_params=None,
        sampling_params_class=SamplingParams,
        tokenizer=None,
        model_config=SimpleNamespace(vocab_size=100),
        rid_to_state=defaultdict(lambda: SimpleNamespace(time_stats=times)),
    )
    disagg = SimpleNamespace(disaggregation_transfer_backend="", disaggregation_mode="null")
    monkeypatch.setattr(tokenizer_manager, "get_disagg", lambda: disagg)
    monkeypatch.setattr(tokenizer_manager, "_validate_watermark_request", lambda _: None)
    spec = SimpleNamespace(speculative_algorithm=NAME)
    bags = {"spec": spec, "serving": SimpleNamespace(host="127.0.0.1"), "disagg": disagg}
    monkeypatch.setattr(runtime_context._CONTEXT, "_config_bags", bags)
    return manager


def received(recv_req: Any) -> Any:
    """The scheduler's request."""
    scheduler = object.__new__(Scheduler)
    args = (recv_req.rid, "", recv_req.input_ids, recv_req.sampling_params)
    return scheduler._create_generation_req(recv_req, *args)


@pytest.mark.parametrize("url", ["http://host:1", ""])
def test_roles_and_texts_alone(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENV_VAR, json.dumps({"draft_url": url}))
    request = protocol.ChatCompletionRequest(model="m", messages=MESSAGES)
    assert chat_messages.chat_texts(request.messages) == TEXTS
    obj = GenerateReqInput(text="rendered")
    chat_messages._read((obj, request), None, request, None)
    assert getattr(obj, "parse_messages", []) == (TEXTS if url else [])


@pytest.mark.parametrize("send", [by_pickle, by_msgpack])
@pytest.mark.parametrize("n", [1, 2])
def test_they_reach_the_scheduler(manager: TokenizerManager, send: Callable, n: int):
    obj = GenerateReqInput(text="rendered", sampling_params={"n": n}, rid="rid")
    obj.parse_messages = TEXTS
    obj.normalize_batch_and_arguments()
    one = obj if n == 1 else obj[0]
    tokenized = manager._create_tokenized_object(one, "rendered", [1, 2])
    tokenized.time_stats = None
    assert [*map(tuple, received(send(tokenized)).parse_messages)] == TEXTS
    batch = manager.batch_tokenized_generate_req_type(batch=[tokenized])
    assert [*map(tuple, received(send(batch)[0]).parse_messages)] == TEXTS


@pytest.mark.parametrize("value", ["[" * 100_000, "[[1, 2]]", "{}", 5, ["system", "x"]])
def test_no_client_writes_them(manager: TokenizerManager, value: Any):
    params = {"custom_params": {"__parse_messages": value}}
    obj = GenerateReqInput(text="x", sampling_params=params, rid="rid")
    obj.normalize_batch_and_arguments()
    with pytest.raises(ValueError, match="custom_params has .*__parse_messages.* leave them out"):
        manager._create_tokenized_object(obj, "x", [1])
    with pytest.raises(TypeError, match="parse_messages"):
        GenerateReqInput(text="x", parse_messages=value)
    # One that bypasses SGLang's tokenizer manager.
    tokenized = io_struct.TokenizedGenerateReqInput(
        input_text="",
        input_ids=array("q", [1]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(**params),
        return_logprob=False,
        logprob_start_len=0,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    assert not received(tokenized).parse_messages


class Serving(OpenAIServingBase):
    """SGLang's handling of a request, up to its conversion."""

    def __init__(self) -> None:
        logger = SimpleNamespace(log_requests=False)
        self.tokenizer_manager = SimpleNamespace(request_logger=logger)

    def _request_id_prefix(self) -> str:
        return ""

    def _convert_to_internal_request(self, request: Any, _: Any = None) -> tuple:
        return None, request

    async def _handle_non_streaming_request(self, _: Any, request: Any, __: Any) -> Any:
        return {"custom_params": request.custom_params}


@pytest.mark.parametrize(
    ("api", "body"),
    [("chat", {"messages": [{"role": "user", "content": "x"}]}), ("completion", {"prompt": "x"})],
)
@pytest.mark.parametrize(
    ("prediction", "status", "answer"),
    [
        ({}, 200, {"custom_params": None}),
        (
            {"prediction": {"type": "content", "content": "draft"}},
            *(200, {"custom_params": {"parse": {"draft": "draft"}}}),
        ),
        ({"prediction": {"type": "x"}}, 400, {}),
    ],
)
def test_openai_requests_over_sglangs_native_grpc(
    monkeypatch: pytest.MonkeyPatch, api: str, body: dict, prediction: dict, status: int, answer
):
    spec = SimpleNamespace(speculative_algorithm=NAME)
    monkeypatch.setattr(predictions, "get_spec", lambda: spec)
    handle, sent = object.__new__(RuntimeHandle), []
    handle._openai_serving_classes = {api: Serving()}

    def callback(payload: bytes, **more: Any) -> None:
        sent.append((json.loads(payload), more))

    text = json.dumps({"model": "m"} | body | prediction).encode()
    asyncio.run(handle._run_openai_request(api, text, callback, streaming=False))
    ((payload, more),) = sent
    assert more["status_code"] == status
    assert answer.items() <= payload.items()
    assert ("prediction" in str(payload)) == (status == 400)


# -- OpenAI's shape -------------------------------------------------------------------------


def test_texts_of_predictions():
    assert predictions.prediction_text(None) is None
    assert predictions.prediction_text({"type": "content", "content": ""}) == ""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert predictions.prediction_text({"type": "content", "content": parts}) == "ab"


@pytest.mark.parametrize("shape", [5, [], {}, {"type": "content", "content": [{"type": "text"}]}])
def test_other_shapes_are_errors(shape: object):
    with pytest.raises(ValueError, match="prediction"):
        predictions.prediction_text(shape)
