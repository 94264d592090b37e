"""PARSE's settings: one frozen record, its command-line flags and its way into every process.

SGLang's own ``ServerArgs`` accepts no foreign fields, and ``sgl.Engine`` no foreign keywords, so
the settings travel as one JSON environment variable, which spawned processes inherit.
"""

from __future__ import annotations

import argparse
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sglang_parse.core.question import BUILT_IN, built_in_questions
from sglang_parse.core.segment import SegmentRule
from sglang_parse.core.selection import SELECTIONS

ENV_VAR = "SGLANG_PARSE_CONFIG"
_FLAG_PREFIX = "parse_"
_CHOICES = {
    "selection": tuple(SELECTIONS),
    "verification": ("semantic", "token"),
    "after_cut": ("target", "redraft"),
    "continuation": ("target", "eagle3"),
    "drafting": ("auto", "always", "never"),
    "layout": ("auto", "mask", "alias"),
    "overlap": ("auto", "on", "off"),
    "default": ("on", "off"),
}
MAX_OPTIONS = 16
"""Longest ``custom_params["parse"]`` that is looked at; every value in it is a number or a bool."""
_INT_RANGES = {"draft_tokens": (1, 8192), "burst_tokens": (1, 1024), "max_prefixes": (1, 256)}
_METAVARS = {"question": "FILE", "eagle3_path": "PATH"}
_HELP = {
    "draft_tokens": "Draft tokens per round: the draft model writes at most this many, then the "
    "target judges them.",
    "burst_tokens": "Draft tokens per scheduler iteration: larger is faster for one request, "
    "smaller lets others in sooner.",
    "max_prefixes": "Prefixes judged in one verification pass; more segments are merged.",
    "segment": "Where a draft may be cut: 'line', 'sentence' or 'tokens:N'.",
    "question": "JSON file with the verification question, or the name of a built-in one: "
    f"{', '.join(built_in_questions())}.",
    "threshold": "Smallest verdict that accepts a prefix, 0 to 1; above 1 nothing is accepted "
    "and greedy output is the plain target's.",
    "selection": "Which prefix is kept: the longest one before the first rejected one, or the "
    "longest accepted one.",
    "verification": "'semantic' asks the target a question per prefix; 'token' keeps the tokens "
    "the target would have chosen itself (exact).",
    "after_cut": "After a cut the target writes to the end, or drafting resumes once the target "
    "has finished its segment.",
    "continuation": "What writes after a cut and for requests served plainly: the target alone, or "
    "with an EAGLE-3 head ahead of it (by --speculative-num-steps tokens, 3 by default).",
    "eagle3_path": "The EAGLE-3 head for the target; needed by --parse-continuation eagle3.",
    "drafting": "Whether drafts are begun: 'auto' while they pay, by what drafts, passes and plain "
    "steps took lately and how much of the drafts was kept; or 'always', or 'never'.",
    "layout": "How a verification pass is run: under a 'mask', or as pseudo-sequences that 'alias' "
    "their request's KV slots; 'auto' knows what the attention backend does best.",
    "overlap": "Whether the scheduler works on an iteration's results while the next one runs: "
    "'auto' does on a GPU, unless --disable-overlap-schedule says no.",
    "default": "Whether requests use PARSE unless they say otherwise.",
}


class ConfigError(ValueError):
    """A setting is out of range or unknown; the text names it, its value and the fix."""


@dataclass(frozen=True, slots=True)
class ParseConfig:
    """Server-wide settings. Token counts are per request and round."""

    draft_tokens: int = 128
    burst_tokens: int = 16
    max_prefixes: int = 16
    segment: str = "line"
    question: str = ""
    threshold: float = 0.5
    selection: str = "first-reject"
    verification: str = "semantic"
    after_cut: str = "redraft"
    continuation: str = "target"
    eagle3_path: str = ""
    drafting: str = "auto"
    layout: str = "auto"
    overlap: str = "auto"
    default: str = "on"

    def __post_init__(self) -> None:
        for name, (low, high) in _INT_RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{flag(name)} is {value!r}; use a whole number {low}..{high}")
        for name in ("segment", "question", "eagle3_path"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{flag(name)} is {getattr(self, name)!r}; use a text")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{flag(name)} is {getattr(self, name)!r}; use one of {', '.join(choices)}"
                )
        _check_threshold(self.threshold, flag("threshold"))
        try:
            SegmentRule.parse(self.segment)
        except ValueError as error:
            raise ConfigError(f"{flag('segment')}: {error}") from error
        self._check_continuation()

    def _check_continuation(self) -> None:
        setting, path = flag("continuation"), flag("eagle3_path")
        if self.uses_eagle3 and not self.eagle3_path:
            raise ConfigError(f"{path} is not set; {setting} eagle3 needs the folder of the head")
        if self.eagle3_path and not self.uses_eagle3:
            raise ConfigError(
                f"{path} is {self.eagle3_path!r} while {setting} is {self.continuation!r}, which "
                f"uses no head; use {setting} eagle3, or leave {path} out"
            )

    @property
    def segment_rule(self) -> SegmentRule:
        return SegmentRule.parse(self.segment)

    @property
    def question_path(self) -> str:
        name = self.question or "default"
        return str(BUILT_IN / f"{name}.json") if name in built_in_questions() else name

    @property
    def is_semantic(self) -> bool:
        return self.verification == "semantic"

    @property
    def uses_eagle3(self) -> bool:
        return self.continuation == "eagle3"

    def to_env(self, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
        """Publish to this process and the ones it will start."""
        environ[ENV_VAR] = json.dumps(asdict(self))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> ParseConfig:
        """The published settings, or the defaults when nothing was published."""
        text = environ.get(ENV_VAR, "")
        if not text:
            return cls()
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{ENV_VAR} is not JSON: {error}") from error
        return cls.from_mapping(content)

    @classmethod
    def from_mapping(cls, content: Any) -> ParseConfig:
        if not isinstance(content, dict):
            raise ConfigError(f"{ENV_VAR} must hold one JSON object, got {content!r}")
        unknown = sorted(set(content) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown PARSE settings {unknown}; known: {sorted(_HELP)}")
        return cls(**content)


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return f"--{_FLAG_PREFIX}{name}".replace("_", "-")


def _shown(value: object) -> str:
    """A value for an error text: a request may hold anything of any length."""
    return reprlib.repr(value)


def _object(value: object, name: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {_shown(value)}; use an object")
    return value


def _check_threshold(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2:
        raise ConfigError(
            f"{name} is {_shown(value)}; use a number from 0 (accept everything) to 1, or up to 2 "
            "(above 1 accepts nothing)"
        )


def configure(**settings: Any) -> ParseConfig:
    """Settings for ``sgl.Engine(...)``: call it before the engine is made.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    config = ParseConfig.from_mapping(settings)
    config.to_env()
    return config


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add PARSE's flags to SGLang's parser (once; SGLang may build it several times)."""
    group = parser.add_argument_group("PARSE (sglang_parse)")
    defaults = ParseConfig()
    for setting in fields(ParseConfig):
        default = getattr(defaults, setting.name)
        group.add_argument(
            flag(setting.name),
            type=type(default),
            default=default,
            choices=_CHOICES.get(setting.name),
            metavar=_METAVARS.get(setting.name),
            help=_HELP[setting.name],
        )


def config_from_namespace(namespace: argparse.Namespace) -> ParseConfig | None:
    """The settings on a parsed command line, or None where the parser had no PARSE flags."""
    values = {
        f.name: getattr(namespace, _FLAG_PREFIX + f.name)
        for f in fields(ParseConfig)
        if hasattr(namespace, _FLAG_PREFIX + f.name)
    }
    return ParseConfig(**values) if values else None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What one request asked for in ``sampling_params.custom_params["parse"]``."""

    enabled: bool
    threshold: float
    trace: bool

    @classmethod
    def read(cls, custom_params: object, config: ParseConfig) -> RequestOptions:
        """Read a request's options; the server's settings fill the gaps.

        Raises:
            ConfigError: an unknown key, or a value of the wrong type or range.
        """
        parse = _object(custom_params, "custom_params").get("parse")
        options = _object(parse, "custom_params.parse")
        if len(options) > MAX_OPTIONS:
            raise ConfigError(
                f"custom_params.parse has {len(options)} keys; use {MAX_OPTIONS} at most"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(key) for key in set(options) - known)
        if unknown:
            raise ConfigError(
                f"custom_params.parse has unknown keys {_shown(unknown)}; known: {sorted(known)}"
            )
        for name in ("enabled", "trace"):
            if not isinstance(options.get(name, False), bool):
                raise ConfigError(
                    f"custom_params.parse.{name} is {_shown(options[name])}; use true or false"
                )
        threshold = options.get("threshold", config.threshold)
        _check_threshold(threshold, "custom_params.parse.threshold")
        return cls(
            enabled=options.get("enabled", config.default == "on"),
            threshold=float(threshold),
            trace=options.get("trace", False),
        )
