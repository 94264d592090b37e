"""Request options in SGLang's processes: a 400 before the scheduler, or an abort in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.algorithm import NAME
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.engine import admission, prefill, worker
from sglang_parse.patches.parse import request_options
from sglang_parse.startup.certificates import Certified

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]

VOCAB = 300
STATES = {"trace": True, "hidden_states": True, "threshold": 0}
BAD: dict[str, dict[str, Any]] = {
    "unknown keys": {"x": 1},
    "--parse-request-options safe": {"trace": True},
    "draft_token_ids has 300 at place 1": {**STATES, "draft_token_ids": [1, 300]},
}
"""What the error says -> options."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's algorithm, address and part in PD disaggregation."""
    served = SimpleNamespace(speculative_algorithm=NAME, host="0.0.0.0", disaggregation_mode="null")
    monkeypatch.setattr(request_options, "get_spec", lambda: served)
    for module in (request_options, admission):
        monkeypatch.setattr(module, "get_serving", lambda: served)
        monkeypatch.setattr(module, "get_disagg", lambda: served)
    ParseConfig(hidden_layers="1").to_env()
    return served


def permit_all(served: SimpleNamespace) -> None:
    served.host = "127.0.0.1"


# -- in the tokenizer's process ----------------------------------------------------------


def tokenize(options: Any, **fields: Any) -> None:
    """Runs the check of SGLang's tokenizer manager."""
    params = SamplingParams(custom_params={"parse": options})
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
    request_options._check_options(SimpleNamespace(sampling_params=params, **fields), manager)


@pytest.mark.parametrize("text", BAD)
def test_a_bad_option_is_a_value_error(text: str, served: SimpleNamespace):
    if "safe" not in text:
        permit_all(served)
    with pytest.raises(ValueError, match=text):
        tokenize(BAD[text])
    served.speculative_algorithm = None  # another algorithm's server reads none of them
    tokenize(BAD[text])


def test_draft_token_ids_with_log_probabilities(served: SimpleNamespace):
    permit_all(served)
    options = {**STATES, "draft_token_ids": [1, 2]}
    tokenize(options, return_logprob=False)
    with pytest.raises(ValueError, match="draft_token_ids is given beside log probabilities"):
        tokenize(options, return_logprob=True)


def test_draft_token_ids_on_a_decode_server(
    served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    """Their first one would have to be what another server's prefill chose."""
    permit_all(served)
    served.disaggregation_mode = "decode"
    options = {**STATES, "draft_token_ids": [1, 2]}
    with pytest.raises(ValueError, match="draft_token_ids is given to a server that does not pre"):
        tokenize(options)
    assert "without --disaggregation-mode" in admitted(options, monkeypatch).to_finish.message


# -- in the scheduler --------------------------------------------------------------------


def admitted(options: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A request that bypassed the tokenizer manager, as those of SGLang's gRPC servers do."""
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    params = SamplingParams(temperature=0, custom_params={"parse": options})
    params.normalize(None)
    req = schedule_batch.Req("0", "", array("q", [1, 2]), params, vocab_size=VOCAB)
    received = []
    engine = SimpleNamespace(
        config=ParseConfig.from_env(),
        certified=Certified(None, None),
        sources=SimpleNamespace(receive=lambda _, options: received.append(options.draft)),
        eagle=None,
    )
    admission.admit(engine, req)
    assert received == [options.get("draft", "") if req.to_finish is None else ""]
    return req


@pytest.mark.parametrize("text", BAD)
def test_a_bad_option_ends_its_request_alone(
    text: str, served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    if "safe" not in text:
        permit_all(served)
    req = admitted(BAD[text], monkeypatch)
    assert "PARSE: custom_params.parse" in req.to_finish.message
    assert text in req.to_finish.message
    assert (int(req.to_finish.status_code), len(req.origin_input_ids)) == (400, 1)
    assert req.parse_policy.is_plain


@pytest.mark.usefixtures("served")
def test_good_options_are_admitted(monkeypatch: pytest.MonkeyPatch):
    req = admitted({"threshold": 0.9, "draft": "a text"}, monkeypatch)
    assert (req.to_finish, req.parse_policy.threshold, req.parse_policy.is_plain) == (
        *(None, 0.9, False),
    )


# -- requests with one rid ---------------------------------------------------------------


class Same:
    """A request; all have one rid, as clients of several tokenizer workers may give it."""

    rid, output_ids, return_logprob, grammar = "same", (), False, None

    def __init__(self, given: Sequence[int] = ()) -> None:
        self.parse_state = RequestState(RequestPolicy(0.0, draft_token_ids=tuple(given)))
        self.has_finished = False

    def finished(self) -> bool:
        return self.has_finished


def test_first_tokens_belong_to_their_request():
    batch = SimpleNamespace(reqs=[Same([7, 8]), Same([9, 8]), Same()], chunked_req=None)
    result = SimpleNamespace(next_token_ids=torch.tensor([1, 2, 3]))
    assert prefill._give_first_tokens(batch, result) == {0: 7, 1: 9}
    assert result.next_token_ids.tolist() == [7, 9, 3]


def test_the_request_that_finished_is_the_one_that_is_settled(monkeypatch: pytest.MonkeyPatch):
    settled: list[Same] = []
    monkeypatch.setattr(worker.admission, "finish", lambda _, req: settled.append(req))
    reqs = [Same(), Same(), Same()]
    own = SimpleNamespace(
        _running={id(req): req for req in reqs},
        engine=SimpleNamespace(drafter=None, verifier=SimpleNamespace(states=None)),
    )
    for req in (reqs[1], reqs[0]):
        req.has_finished = True
        worker.ParseWorker.note_request_finished(own, rid="same", natural_stop=True)
    assert settled == [reqs[1], reqs[0]]
    assert [*own._running.values()] == [reqs[2]]
    worker.ParseWorker.note_request_finished(own, rid="same", natural_stop=True)
    assert len(settled) == 2
