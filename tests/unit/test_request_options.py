"""Which options a server takes from its clients (``--parse-request-options``)."""

from typing import Any

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.setting import ConfigError, settings_of

pytestmark = pytest.mark.unit

EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"
SERVER = {"threshold": 0.7, "hidden_layers": "1", "strict": "numbers"}
ALWAYS_SAFE: list[dict[str, Any]] = [
    *({}, {"enabled": False}, {"enabled": True}, {"draft": "a text"}, {"drafting": "auto"}),
    *({"threshold": 0.7}, {"threshold": 0.9}, {"threshold": 1.5}, {"trace": False}),
    *({"hidden_states": False, "draft_token_ids": []}, {"prompt_drafts": "off"}),
    *({"strict": ["numbers"]}, {"strict": "code,numbers"}),
]
STATES = {"trace": True, "hidden_states": True}
UNSAFE: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.69},
    "trace": {"trace": True},
    "hidden_states": STATES,
    "draft_token_ids": {**STATES, "threshold": 0, "draft_token_ids": [1, 2]},
    "drafting": {"drafting": "always"},
    "strict": {"strict": ["code"]},
}


def read(
    options: dict[str, Any],
    *,
    host: str = EVERYWHERE,
    vocab_size: int = 300,
    returns_logprobs: bool = False,
    prefills: bool = True,
    **settings: Any,
) -> RequestOptions:
    config = ParseConfig(**{**SERVER, **settings})
    asked = {"host": host, "vocab_size": vocab_size, "returns_logprobs": returns_logprobs}
    asked["prefills"] = prefills
    return RequestOptions.of_request({"parse": options}, config, **asked)


def test_every_option_is_either_safe_or_not():
    """A new option fails here until somebody has decided."""
    names = {name for options in (*ALWAYS_SAFE, *UNSAFE.values()) for name in options}
    assert names == {option.name for option in settings_of(RequestOptions)}


@pytest.mark.parametrize("permitted", ["auto", "safe"])
def test_a_public_server_takes_safe_options_only(permitted: str):
    for options in ALWAYS_SAFE:
        read(options, request_options=permitted)
    for name, options in UNSAFE.items():
        with pytest.raises(ConfigError, match=r"--parse-request-options safe .*leave it out") as e:
            read(options, request_options=permitted)
        assert any(f"custom_params.parse.{option} is" in str(e.value) for option in options), name
        read(options, request_options="all")
        read(options, host=HERE)


def test_the_threshold_of_a_refusal_is_the_servers():
    with pytest.raises(ConfigError, match=r"threshold is 0.5, .*; use 0.7 or more, or leave it"):
        read({"threshold": 0.5})


def test_strict_classes_can_only_be_added():
    with pytest.raises(ConfigError, match=r"strict is \('code',\), .*; use numbers or more, or"):
        read({"strict": "code"})
    with pytest.raises(ConfigError, match="custom_params.parse.strict: got 'x'; use none, or of"):
        read({"strict": "x"}, host=HERE)
    assert read({}).strict == read({"strict": "numbers"}).strict == ("numbers",)
    assert read({"strict": []}, host=HERE).strict == ()


@pytest.mark.parametrize("host", [HERE, EVERYWHERE])
def test_none_takes_no_option(host: str):
    read({}, host=host, request_options="none")
    for options in (*ALWAYS_SAFE[1:], *UNSAFE.values()):
        with pytest.raises(ConfigError, match="--parse-request-options none of this server"):
            read(options, host=host, request_options="none")
    with pytest.raises(ConfigError, match=r"draft is 'x', .*leave it out \(also prediction\)"):
        read({"draft": "x"}, request_options="none")


@pytest.mark.parametrize(
    ("host", "permitted"),
    [
        *((host, "all") for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost")),
        *((host, "safe") for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "", "::2")),
        *((host, "safe") for host in ("127.0.0.1.example.org", "localhost.example.org")),
    ],
)
def test_who_can_reach_a_server_decides_the_default(host: str, permitted: str):
    assert ParseConfig().permitted_options(host) == permitted
    assert ParseConfig(request_options="none").permitted_options(host) == "none"


def given_draft(ids: Any, **asked: Any) -> RequestOptions:
    return read({**STATES, "threshold": 0, "draft_token_ids": ids}, host=HERE, **asked)


def test_draft_token_ids_are_the_models():
    assert given_draft([0, 299]).draft_token_ids == [0, 299]
    for ids, place in (([0, 300], "300 at place 1"), ([-1, 5], "-1 at place 0")):
        words = f"draft_token_ids has {place}; this model's token ids are 0..299"
        with pytest.raises(ConfigError, match=words):
            given_draft(ids)
    with pytest.raises(ConfigError, match="beside log probabilities; leave one of them out"):
        given_draft([1, 2], returns_logprobs=True)
    read({}, host=HERE, returns_logprobs=True)
    with pytest.raises(ConfigError, match="draft_token_ids is given to a server that does not pre"):
        given_draft([1, 2], prefills=False)
    read({}, host=HERE, prefills=False)


@pytest.mark.parametrize("ids", ["text", [1.5, 2], [True, 2], 5, None, [1] * 9000])
def test_draft_token_ids_are_a_list_of_numbers(ids: Any):
    with pytest.raises(ConfigError, match=r"draft_token_ids is .*; use a list of whole numbers$"):
        given_draft(ids)
