"""Settings, and how a process receives them: environment, command line, call."""

import argparse
import json

import pytest

from sglang_parse.core.config import (
    ENV_VAR,
    ParseConfig,
    add_cli_args,
    config_from_namespace,
    configure,
    flag,
)
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.question import QuestionWording
from sglang_parse.core.selection import SELECTIONS
from sglang_parse.core.setting import ConfigError, settings_of

pytestmark = pytest.mark.unit

CHANGED = ParseConfig(
    draft_tokens=64,
    draft_chunk=8,
    draft_parallel_tokens="4",
    max_prefixes=4,
    segment="tokens:12",
    question="q.json",
    threshold=1.5,
    judge="question",
    hidden_layers="8,12",
    selection="answer-first",
    eagle3_path="head",
    draft_eagle3_path="draft-head",
    drafting="never",
    max_itl_ratio=0.0,
    max_slowdown=0.0,
    layout="alias",
    overlap="on",
    prompt_drafts="off",
    draft_url="http://localhost:30001",
    draft_timeout=2.0,
    reuse_answers="5:shared",
    default="off",
    request_options="safe",
    strict="numbers",
)


def test_changed_differs_in_every_setting():
    """But in those that exclude others."""
    defaults = ParseConfig()
    same = [name for name, value in CHANGED if value == getattr(defaults, name)]
    assert same == ["verification", "mtp"]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("draft_tokens", 1, 8192),
        ("draft_chunk", 1, 1024),
        ("max_prefixes", 1, 256),
    ],
)
def test_integer_ranges(name, low, high):
    for value in (low, high):
        assert getattr(ParseConfig(**{name: value}), name) == value
    for value in (low - 1, high + 1, True, 2.0, "2", None):
        with pytest.raises(
            ConfigError, match=f"{flag(name)} is .*use a whole number {low}..{high}"
        ):
            ParseConfig(**{name: value})


@pytest.mark.parametrize("name", ["selection", "verification", "default"])
def test_errors_list_the_choices(name):
    with pytest.raises(ConfigError, match=f"{flag(name)} is 'sideways'; use one of") as error:
        ParseConfig(**{name: "sideways"})
    assert getattr(ParseConfig(), name) in str(error.value)


@pytest.mark.parametrize("value", [-0.01, 2.01, float("nan"), float("inf"), True, "0.5", None])
def test_invalid_thresholds_are_refused(value):
    with pytest.raises(ConfigError, match="--parse-threshold is .*use a number from 0"):
        ParseConfig(threshold=value)


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, 1.01, 2])
def test_valid_thresholds_are_accepted(value):
    assert ParseConfig(threshold=value).threshold == value


@pytest.mark.parametrize("value", [0, 17, -1, True, 2.0, "", "four", "04", None])
def test_invalid_draft_parallel_tokens_are_refused(value):
    with pytest.raises(
        ConfigError, match="--parse-draft-parallel-tokens: got .*use auto, or a whole number"
    ):
        ParseConfig(draft_parallel_tokens=value)


def test_valid_draft_parallel_tokens_are_accepted():
    assert [ParseConfig(draft_parallel_tokens=n).block_size for n in (1, "16", "auto")] == [
        1,
        16,
        None,
    ]


def test_segment_is_validated():
    with pytest.raises(ConfigError, match="--parse-segment: expected .*'tokens:0'"):
        ParseConfig(segment="tokens:0")
    assert ParseConfig(segment="tokens:12").segment_rule.num_tokens == 12


def test_is_semantic():
    assert ParseConfig().is_semantic
    assert not ParseConfig(verification="token").is_semantic


def test_environment_round_trip():
    environ: dict[str, str] = {}
    assert ParseConfig.from_env(environ) == ParseConfig()
    CHANGED.to_env(environ)
    assert list(environ) == [ENV_VAR]
    assert ParseConfig.from_env(environ) == CHANGED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", f"{ENV_VAR} is not JSON"),
        ("[]", f"{ENV_VAR} must hold one JSON object"),
        ('{"treshold": 1}', r"unknown PARSE settings \['treshold'\]; known: .*'threshold'"),
        ('{"draft_chunk": 0}', "--parse-draft-chunk is 0"),
    ],
)
def test_invalid_environments_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        ParseConfig.from_env({ENV_VAR: text})


def test_configure_publishes_or_refuses(monkeypatch):
    monkeypatch.delenv(ENV_VAR, raising=False)
    with pytest.raises(ConfigError, match=r"unknown PARSE settings \['draft'\]"):
        configure(draft=3)
    assert ParseConfig.from_env() == ParseConfig()
    # monkeypatch removes it again at the end, because it knows the variable.
    monkeypatch.setenv(ENV_VAR, "")
    assert configure(**CHANGED.model_dump()) == CHANGED
    assert ParseConfig.from_env() == CHANGED


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    add_cli_args(parser)
    return parser


def test_command_line_defaults():
    assert config_from_namespace(parser().parse_args([])) == ParseConfig()


def test_command_line_sets_every_setting():
    arguments = [
        word for name, value in CHANGED.model_dump().items() for word in (flag(name), str(value))
    ]
    assert config_from_namespace(parser().parse_args(arguments)) == CHANGED


def test_command_line_of_a_parser_without_parse_flags():
    assert config_from_namespace(argparse.Namespace(model_path="m")) is None


def test_invalid_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--parse-selection", "sideways"])
    assert "--parse-selection" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--parse-draft-tokens is 0"):
        config_from_namespace(parser().parse_args(["--parse-draft-tokens", "0"]))


def test_help_names_every_flag():
    text = parser().format_help()
    assert all(flag(name) in text for name in ParseConfig.model_fields)


@pytest.mark.parametrize("model", [ParseConfig, RequestOptions, QuestionWording])
def test_every_setting_has_a_description(model: type):
    for setting in settings_of(model):
        assert setting.description.endswith(".")
        assert "\n" not in setting.description
        assert setting.expected


def test_every_selection_can_be_chosen():
    (selection,) = [s for s in settings_of(ParseConfig) if s.name == "selection"]
    assert selection.choices == tuple(SELECTIONS)


@pytest.mark.parametrize("name", ["self", "cls"])
def test_python_argument_names_are_refused_as_settings(name: str):
    with pytest.raises(ConfigError, match="unknown PARSE settings"):
        ParseConfig.from_env({ENV_VAR: json.dumps({name: 1})})


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, {"parse": None}, {"parse": {}}])
def test_a_request_without_options_uses_the_servers(custom_params):
    config = ParseConfig(threshold=0.7, strict="numbers")
    expected = RequestOptions(enabled=True, threshold=0.7, strict=("numbers",), trace=False)
    assert RequestOptions.read(custom_params, config) == expected
    assert not RequestOptions.read(custom_params, ParseConfig(default="off")).enabled


def test_request_options_override_the_servers():
    given = {"threshold": 1, "strict": "none", "trace": True, "drafting": "always"}
    options = {"parse": {"enabled": True, **given}}
    read = RequestOptions.read(options, ParseConfig(default="off", threshold=0.2))
    assert read == RequestOptions(enabled=True, threshold=1.0, trace=True, drafting="always")
    assert isinstance(read.threshold, float)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "custom_params.parse is .*use an object"),
        (False, "custom_params.parse is False; use an object"),
        ({"treshold": 1}, r"unknown keys \['treshold'\]; known: .*'threshold'"),
        ({3: 1}, r"unknown keys \['3'\]"),
        ({"enabled": "no"}, "custom_params.parse.enabled is 'no'; use true or false"),
        ({"enabled": 0}, "custom_params.parse.enabled is 0"),
        ({"trace": None}, "custom_params.parse.trace is None"),
        ({"drafting": "never"}, "custom_params.parse.drafting is 'never'; use one of auto, always"),
        ({"drafting": True}, "custom_params.parse.drafting is True"),
        ({"threshold": "1"}, "custom_params.parse.threshold is '1'"),
        ({"threshold": True}, "custom_params.parse.threshold is True"),
        ({"threshold": 3}, "custom_params.parse.threshold is 3"),
        ({"threshold": float("nan")}, "custom_params.parse.threshold is nan"),
        ({"threshold": 10**400}, "custom_params.parse.threshold is 1000"),
        ({f"key {n}": n for n in range(100_000)}, "custom_params.parse has 100000 keys"),
    ],
)
def test_invalid_request_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        RequestOptions.read({"parse": options}, ParseConfig())


@pytest.mark.parametrize("custom_params", ["{}", [{"parse": {}}], 1])
def test_custom_params_must_be_an_object(custom_params):
    with pytest.raises(ConfigError, match="custom_params is .*; use an object"):
        RequestOptions.read(custom_params, ParseConfig())


@pytest.mark.parametrize("options", [{"trace": "x" * 10**6}, {"y" * 10**6: 1}, "z" * 10**6])
def test_errors_abbreviate_long_values(options):
    with pytest.raises(ConfigError) as error:
        RequestOptions.read({"parse": options}, ParseConfig())
    assert len(str(error.value)) < 300


def test_published_settings_are_plain_json():
    environ: dict[str, str] = {}
    CHANGED.to_env(environ)
    assert json.loads(environ[ENV_VAR]) == CHANGED.model_dump(exclude_unset=True)


def test_only_given_settings_are_published():
    """Others stay adaptive in the child process."""
    environ: dict[str, str] = {}
    ParseConfig(draft_tokens=128, threshold=0.5).to_env(environ)
    assert json.loads(environ[ENV_VAR]) == {"draft_tokens": 128, "threshold": 0.5}
    assert ParseConfig.from_env(environ).model_fields_set == {"draft_tokens", "threshold"}


def test_only_given_flags_are_set():
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    settings = config_from_namespace(parser.parse_args(["--parse-max-prefixes", "16"]))
    assert settings == ParseConfig()
    assert settings.model_fields_set == {"max_prefixes"}
