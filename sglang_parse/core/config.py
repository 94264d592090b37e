"""PARSE's settings: one frozen model, its command-line flags and its way into every process.

SGLang's own ``ServerArgs`` accepts no foreign fields, and ``sgl.Engine`` no foreign keywords, so
the settings travel as one JSON environment variable, which spawned processes inherit.
"""

from __future__ import annotations

import argparse
import json
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from sglang_parse.core.block import MAX_BLOCK
from sglang_parse.core.certificate import Certificate, CertificateError, read_certificate
from sglang_parse.core.question import built_in_questions
from sglang_parse.core.segment import SegmentRule

ENV_VAR = "SGLANG_PARSE_CONFIG"
_FLAG_PREFIX = "parse_"
MAX_OPTIONS = 16
"""Longest ``custom_params["parse"]`` that is looked at; every value in it is a number or a bool."""
_BLOCK_SIZES = ("auto", *map(str, range(1, MAX_BLOCK + 1)))
_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)
Threshold = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]


class ConfigError(ValueError):
    """A setting is out of range or unknown; the text names it, its value and the fix."""


class ParseConfig(BaseModel):
    """Server-wide settings. Token counts are per request and round.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """

    model_config = _STRICT

    draft_tokens: int = Field(128, ge=1, le=8192)
    """Draft tokens per round: the draft model writes at most this many, then the target judges
    them. Given: this many each time; else as many as pay at the load there is, up to the
    default."""
    draft_chunk: int = Field(16, ge=1, le=1024)
    """Draft tokens per scheduler iteration: larger is faster for one request, smaller lets others
    in sooner. Given: this many; else as many as pay."""
    draft_parallel_tokens: str = Field("auto", json_schema_extra={"metavar": "N"})
    """Tokens a forward of the draft model writes at most, 1 to 16, by mask tokens that it was
    trained to fill (PARD's drafts are); it verifies them itself. 1 is one token a forward; 'auto'
    goes by the draft's files, and by what is faster at the load there is."""
    max_prefixes: int = Field(16, ge=1, le=256)
    """Prefixes judged in one verification pass; more segments are merged. Given: this many; else
    as many as pay, up to the default."""
    segment: str = "line"
    """Where a draft may be cut: 'line', 'sentence' or 'tokens:N'."""
    question: str = Field(
        "",
        description="JSON file with the verification question, or the name of a built-in one: "
        f"{', '.join(built_in_questions())}. Without it, the built-in one that fits the target's "
        "chat template and tokenizer.",
        json_schema_extra={"metavar": "FILE"},
    )
    threshold: Threshold | str = Field(0.5, json_schema_extra={"metavar": "NUMBER_OR_FILE"})
    """Smallest verdict that accepts a prefix, 0 to 1; above 1 nothing is accepted and greedy
    output is the plain target's. Or a file that ``sglang-parse calibrate`` wrote: the threshold
    certified there."""
    selection: Literal["first-reject", "longest", "answer-first"] = "first-reject"
    """Which prefix is kept: the longest one before the first rejected one, or the longest
    accepted one; or 'answer-first': a finished draft as a whole where its last question accepts
    it, else as 'first-reject'."""
    verification: Literal["semantic", "token"] = "semantic"
    """'semantic' asks the target a question per prefix; 'token' keeps the tokens the target would
    have chosen itself (exact)."""
    on_reject: Literal["decode", "redraft"] = "redraft"
    """After a cut the target writes to the end, or drafting resumes once the target has finished
    its segment."""
    decode_accelerator: Literal["none", "eagle3"] = "none"
    """What writes after a cut and for requests served plainly: the target alone, or with an
    EAGLE-3 head ahead of it (by --speculative-num-steps tokens, 3 by default)."""
    eagle3_path: str = Field("", json_schema_extra={"metavar": "PATH"})
    """The EAGLE-3 head for the target; needed by --parse-decode-accelerator eagle3."""
    drafting: Literal["auto", "always", "never"] = "auto"
    """Whether drafts are begun: 'auto' while they pay, and as long and as finely judged as pays,
    by what drafts, passes and plain steps took lately and where drafts were cut; 'always', as the
    other settings say; or 'never'."""
    max_itl_ratio: float = Field(2.5, ge=0, le=1000)
    """How long a request that continues, or that switched PARSE off, may wait for its next token
    while others draft, in what a step takes at that load: bursts are shortened and drafts judged
    one after another. 0 for any time; nothing is bounded under --parse-drafting always."""
    max_slowdown: float = Field(1.2, ge=0, le=1000)
    """What a request that switched PARSE off, or that PARSE cannot serve, may take while others
    draft, in times of what it takes among its like: what an iteration takes longer than this the
    others wait for afterwards. 0 for any time; nothing is bounded under --parse-drafting always."""
    max_draft_latency: float = Field(0.0, ge=0, le=3600)
    """Seconds a request may draft and be judged before its client sees the next tokens: drafts are
    kept as short as it takes. 0 for any time; nothing is bounded under --parse-drafting always."""
    layout: Literal["auto", "mask", "alias"] = "auto"
    """How a verification pass is run: under a 'mask', or as pseudo-sequences that 'alias' their
    request's KV slots; 'auto' knows what the attention backend does best."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether the scheduler works on an iteration's results while the next one runs: 'auto' does
    on a GPU, unless --disable-overlap-schedule says no."""
    draft_graph_steps: int = Field(0, ge=0, le=64)
    """Draft tokens of greedy requests that one CUDA graph writes, on fa3 and triton with one GPU;
    0: a graph a token. No GPU has shown yet that it pays."""
    default: Literal["on", "off"] = "on"
    """Whether requests use PARSE unless they say otherwise."""

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            if unknown := _unknown(error):
                known = sorted(type(self).model_fields)
                raise ConfigError(f"unknown PARSE settings {unknown}; known: {known}") from None
            raise ConfigError(_first_problem(error, type(self), flag)) from None
        self._check_continuation()
        self._check_certificate()

    @field_validator("draft_parallel_tokens", mode="before")
    @classmethod
    def _check_draft_parallel_tokens(cls, value: Any) -> Any:
        if str(value) not in _BLOCK_SIZES:
            raise ValueError(f"got {_shown(value)}; use auto, or a whole number 1..{MAX_BLOCK}")
        return str(value)

    @field_validator("segment")
    @classmethod
    def _check_segment(cls, text: str) -> str:
        SegmentRule.parse(text)
        return text

    def _check_continuation(self) -> None:
        setting, path = flag("decode_accelerator"), flag("eagle3_path")
        if self.uses_eagle3 and not self.eagle3_path:
            raise ConfigError(f"{path} is not set; {setting} eagle3 needs the folder of the head")
        if self.eagle3_path and not self.uses_eagle3:
            raise ConfigError(
                f"{path} is {self.eagle3_path!r} while {setting} is {self.decode_accelerator!r}, which "
                f"uses no head; use {setting} eagle3, or leave {path} out"
            )

    def _check_certificate(self) -> None:
        setting = Setting("threshold", type(self).model_fields["threshold"])
        try:
            _ = self.certificate
        except CertificateError as error:
            name = flag(setting.name)
            raise ConfigError(
                f"{name} is {_shown(self.threshold)}: {error}; use {setting.wanted}"
            ) from error

    @property
    def certificate(self) -> Certificate | None:
        """What promises the threshold, if anything does."""
        return read_certificate(self.threshold) if isinstance(self.threshold, str) else None

    @property
    def accept_threshold(self) -> float:
        """The threshold itself."""
        certificate = self.certificate
        if certificate is None or certificate.threshold is None:
            return float(self.threshold)
        return certificate.threshold

    @property
    def segment_rule(self) -> SegmentRule:
        return SegmentRule.parse(self.segment)

    @property
    def block_size(self) -> int | None:
        """Tokens a draft forward; None where it goes by the draft's files."""
        return None if self.draft_parallel_tokens == "auto" else int(self.draft_parallel_tokens)

    @property
    def is_semantic(self) -> bool:
        return self.verification == "semantic"

    @property
    def uses_eagle3(self) -> bool:
        return self.decode_accelerator == "eagle3"

    def to_env(self, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
        """Publish to this process and the ones it will start."""
        # Those that were given: what was not may be chosen.
        environ[ENV_VAR] = json.dumps(self.model_dump(exclude_unset=True))

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
        return cls(**content)


class RequestOptions(BaseModel):
    """What one request asked for in ``sampling_params.custom_params["parse"]``."""

    model_config = _STRICT

    enabled: bool
    """Serve this request with PARSE."""
    threshold: Threshold
    """Smallest verdict that accepts, for this request."""
    trace: bool = False
    """Add one record per round to ``meta_info``."""

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
        server = {"enabled": config.default == "on", "threshold": config.accept_threshold}
        try:
            return cls.model_validate({**server, **options})
        except ValidationError as error:
            if unknown := _unknown(error):
                raise ConfigError(
                    f"custom_params.parse has unknown keys {_shown(unknown)}; "
                    f"known: {sorted(cls.model_fields)}"
                ) from None
            raise ConfigError(_first_problem(error, cls, "custom_params.parse.{}".format)) from None


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as the command line, errors and documents show it."""

    name: str
    field: FieldInfo

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def description(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def metavar(self) -> str | None:
        extra = self.field.json_schema_extra
        return str(extra["metavar"]) if isinstance(extra, dict) else None

    @property
    def choices(self) -> tuple[str, ...]:
        """What it may be, one of these; () for texts and numbers."""
        kind = self.field.annotation
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def read(self) -> Callable[[str], Any]:
        """What makes the setting of a word of the command line."""
        return _number_or_text if self.is_number_or_file else type(self.default)

    @property
    def is_number_or_file(self) -> bool:
        return str in get_args(self.field.annotation)

    @property
    def wanted(self) -> str:
        """What it may be, in words."""
        kind = self.field.annotation
        if kind is bool:
            return "true or false"
        if self.name == "threshold":
            number = (
                "a number from 0 (accept everything) to 1, or up to 2 (above 1 accepts nothing)"
            )
            return f"{number}, or calibrate's file" if self.is_number_or_file else number
        if kind in (int, float):
            limits = {key: n for limit in self.field.metadata for key, n in asdict(limit).items()}
            number = "a whole number" if kind is int else "a number"
            return f"{number} {limits['ge']}..{limits['le']}"
        return f"one of {', '.join(self.choices)}" if self.choices else "a text"


def settings_of(model: Any) -> list[Setting]:
    """What ``ParseConfig``, ``RequestOptions`` or ``QuestionWording`` may set, in their order."""
    return [Setting(name, field) for name, field in model.__pydantic_fields__.items()]


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return f"--{_FLAG_PREFIX}{name}".replace("_", "-")


def _first_problem(
    error: ValidationError, model: type[BaseModel], shown_as: Callable[[str], str]
) -> str:
    """Setting, value found and fix."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    if problem["type"] == "value_error":  # raised by a validator of ours
        return f"{shown_as(name)}: {problem['ctx']['error']}"
    wanted = Setting(name, model.model_fields[name]).wanted
    return f"{shown_as(name)} is {_shown(problem['input'])}; use {wanted}"


def _unknown(error: ValidationError) -> list[str]:
    problems = error.errors(include_url=False)
    kinds = ("extra_forbidden", "invalid_key")
    return sorted(str(problem["loc"][0]) for problem in problems if problem["type"] in kinds)


def _shown(value: object) -> str:
    """A value for an error text: a request may hold anything of any length."""
    return reprlib.repr(value)


def _number_or_text(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _object(value: object, name: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {_shown(value)}; use an object")
    return value


def configure(**settings: Any) -> ParseConfig:
    """Settings for ``sgl.Engine(...)``: call it before the engine is made.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    config = ParseConfig(**settings)
    config.to_env()
    return config


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add PARSE's flags to SGLang's parser (once; SGLang may build it several times)."""
    group = parser.add_argument_group("PARSE (sglang_parse)")
    for setting in settings_of(ParseConfig):
        group.add_argument(
            flag(setting.name),
            type=setting.read,
            default=None,  # so that what was given can be told
            choices=setting.choices or None,
            metavar=setting.metavar,
            help=setting.description,
        )


def config_from_namespace(namespace: argparse.Namespace) -> ParseConfig | None:
    """The settings on a parsed command line, or None where the parser had no PARSE flags."""
    flags = {name: _FLAG_PREFIX + name for name in ParseConfig.model_fields}
    values = {name: getattr(namespace, key) for name, key in flags.items() if key in namespace}
    given = {name: value for name, value in values.items() if value is not None}
    return ParseConfig(**given) if values else None
