"""PARSE's settings and command-line flags.

SGLang's ``ServerArgs`` and ``sgl.Engine`` accept no additional fields, so settings are passed to
spawned processes as JSON in one environment variable.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from sglang_parse.core.block import MAX_BLOCK
from sglang_parse.core.certificate import Certificate, CertificateError, read_certificate
from sglang_parse.core.judge import (
    LIKELIHOOD,
    LIKELIHOOD_STRICT,
    MAX_LAYERS,
    QUESTION,
    JudgeError,
    JudgeFile,
    read_judge,
)
from sglang_parse.core.phases import EAGLE3, MTP
from sglang_parse.core.question import built_in_questions
from sglang_parse.core.segment import SegmentRule
from sglang_parse.core.setting import (
    STRICT,
    ConfigError,
    Setting,
    Threshold,
    problems_of,
    settings_of,
    shown,
    unknown_names,
)
from sglang_parse.core.strict import CLASSES, parse_classes

ENV_VAR = "SGLANG_PARSE_CONFIG"
_FLAG_PREFIX = "parse_"
MAX_DRAFT, MAX_PREFIXES, MAX_ANSWERS = 8192, 256, 1_000_000
AUTO, OWN = "auto", "own"
_BLOCK_SIZES = ("auto", *map(str, range(1, MAX_BLOCK + 1)))


class ParseConfig(BaseModel):
    """Server-wide settings.

    Raises:
        ConfigError: settings are unknown or out of range; a line for each.
    """

    model_config = STRICT

    draft_tokens: int = Field(128, ge=1, le=MAX_DRAFT)
    """Maximum draft tokens per request and round. If not set, the length adapts to the load, up to
    the default; if set, it is fixed."""
    draft_chunk: int = Field(16, ge=1, le=1024)
    """Draft tokens per request and scheduler iteration. Larger chunks are faster for one request;
    smaller ones let other requests decode sooner. If not set, adapts to the load."""
    draft_parallel_tokens: str = Field("auto", json_schema_extra={"metavar": "N"})
    """Maximum tokens per draft model forward, 1 to 16. Above 1, the draft model fills mask tokens,
    as PARD draft models are trained to, or its EAGLE-3 head proposes, and verifies them itself.
    'auto' uses what the draft model's files say and what is faster at the current load."""
    draft_eagle3_path: str = Field("", json_schema_extra={"metavar": "PATH"})
    """Path of an EAGLE-3 head of the draft model. It proposes tokens that the draft model's next
    forward verifies: up to --parse-draft-parallel-tokens per forward, 4 by default, and the same
    text."""
    max_prefixes: int = Field(16, ge=1, le=MAX_PREFIXES)
    """Maximum prefixes verified per round; further segments are merged. If not set, adaptive
    drafting asks about one, the whole draft."""
    segment: str = "line"
    """Segments of a draft, at whose ends it is verified: 'line', 'sentence' or 'tokens:N'. If not
    set, the likelihood verifies at every token, and a trained verdict head has its own."""
    question: str = Field(
        "",
        description="JSON file with the verification question, or the name of a built-in one: "
        f"{', '.join(built_in_questions())}. If not set, --parse-judge question chooses a "
        "built-in one by the target's chat template and tokenizer.",
        json_schema_extra={"metavar": "FILE"},
    )
    threshold: Threshold | str = Field(0.5, json_schema_extra={"metavar": "NUMBER_OR_FILE"})
    """Minimum verdict that accepts a prefix, 0 to 1. Above 1 nothing is accepted, and greedy output
    equals the plain target's. Or the output file of ``sglang-parse calibrate``, for the threshold
    certified there. If not set, a trained verdict head has its own."""
    strict: str = Field(
        AUTO,
        description="Classes of tokens that must be the target's own choice, whatever their "
        f"verdict: {', '.join(CLASSES)} or both, with a comma between them. A draft is accepted "
        "at most up to the first token that differs from the target's choice where either has a "
        "digit or numeral of any script ('numbers'), or is in a fenced block of code ('code'). A "
        "request that samples draws the target's choice. 'none': the verdict decides alone. "
        "'auto': numbers and code beside the likelihood, else none.",
        json_schema_extra={"metavar": "CLASSES"},
    )
    judge: str = Field(AUTO, json_schema_extra={"metavar": "JUDGE"})
    """Where verdicts come from: 'question' asks the target, 'likelihood' compares each draft token
    with what the target would have written, or the folder of a verdict head by ``sglang-parse
    train-judge``; with either of these, --parse-question is asked about complete answers only.
    'auto': the question if --parse-question is set, else the likelihood."""
    hidden_layers: str = Field("", json_schema_extra={"metavar": "LAYERS"})
    """Decoder layers of the target whose outputs traces may contain, such as '8,12', for
    ``sglang-parse train-judge``. At most 3."""
    selection: Literal["first-reject", "answer-first"] = "first-reject"
    """Which prefix is accepted. 'first-reject': the longest before the first rejected one.
    'answer-first': all of a finished draft if its last verdict accepts, else as 'first-reject'."""
    verification: Literal["semantic", "token"] = "semantic"
    """'semantic' asks the target a question per prefix; 'token' accepts draft tokens that equal the
    target's choices (exact)."""
    eagle3_path: str = Field("", json_schema_extra={"metavar": "PATH"})
    """Path of the target's EAGLE-3 head. Where no other source drafts, it proposes up to
    --speculative-num-steps tokens (by default 3 with CUDA graphs, without them as many as pay, up
    to 7). They are judged as every draft; with --parse-judge question token by token."""
    mtp: str = Field("", json_schema_extra={"metavar": "PATH"})
    """The layer for multi-token prediction (MTP) that some checkpoints have, in the place of an
    EAGLE-3 head: 'own' for the target's checkpoint, or the path of one that has the layer."""
    drafting: Literal["auto", "always", "never"] = "auto"
    """When to draft. 'auto': while it is measured to be faster than plain decoding, with adaptive
    draft length and chunks. 'always': with the configured values. 'never': plain decoding."""
    max_itl_ratio: float = Field(2.5, ge=0, le=1000)
    """Maximum inter-token latency of decoding requests while others draft, relative to a decode
    step at the same load; shortens draft chunks and verifies fewer drafts per iteration. 0: no
    bound. Not applied with --parse-drafting always."""
    max_slowdown: float = Field(1.2, ge=0, le=1000)
    """Maximum slowdown of plain requests while others draft, relative to plain decoding at the same
    load: drafting pauses until time above it is compensated. 0: no bound. Not applied with
    --parse-drafting always."""
    layout: Literal["auto", "mask", "alias"] = "auto"
    """Attention layout of passes with questions, or of drafts in blocks: a custom 'mask', or
    pseudo-sequences that 'alias' the request's KV slots. 'auto' chooses by attention backend; other
    passes are causal on any."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Overlap schedule: process an iteration's results while the next one runs. 'auto' enables it
    on a GPU unless --disable-overlap-schedule is set."""
    prompt_drafts: Literal["on", "off"] = "on"
    """Whether drafts copy from the prompt and the output so far, where the newest tokens stand in
    them. They are compared with the target's choices token by token, whatever the judge is."""
    draft_url: str = Field("", json_schema_extra={"metavar": "URL"})
    """Another server that writes drafts, with any model: its OpenAI API, http://host:port. It gets
    the requests' prompts and answers."""
    draft_timeout: float = Field(1.0, ge=0.01, le=60)
    """Most seconds that a request waits for text of --parse-draft-url; then the target writes."""
    reuse_answers: str = Field("0", json_schema_extra={"metavar": "N"})
    """Number of earlier answers to keep, in 1 GiB at most, as drafts for similar requests with the
    same extra_key and cache_salt, 0 to 1000000. Requests without either share nothing, unless
    ':shared' follows the number: then they share among themselves."""
    default: Literal["on", "off"] = "on"
    """Whether requests use PARSE unless they set ``custom_params["parse"]["enabled"]``."""
    request_options: Literal["auto", "all", "safe", "none"] = "auto"
    """Which options of ``custom_params["parse"]`` requests may set: 'all'; 'safe': enabled, draft,
    a threshold that is not below the server's, and strict with the server's classes or more; or
    'none'. 'auto': 'all' if --host is a loopback address, else 'safe'."""

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            if unknown := unknown_names(error):
                known = sorted(type(self).model_fields)
                raise ConfigError(f"unknown PARSE settings {unknown}; known: {known}") from None
            raise ConfigError("\n".join(problems_of(error, type(self), flag))) from None
        self._check_verification()
        self._check_files()
        self._check_mtp()

    @field_validator("draft_parallel_tokens", mode="before")
    @classmethod
    def _check_draft_parallel_tokens(cls, value: Any) -> Any:
        if str(value) not in _BLOCK_SIZES:
            raise ValueError(f"got {shown(value)}; use auto, or a whole number 1..{MAX_BLOCK}")
        return str(value)

    @field_validator("segment", "strict", "hidden_layers")
    @classmethod
    def _check_parsed(cls, text: str, info: ValidationInfo) -> str:
        parsers: dict[str | None, Callable[[str], object]] = {
            "segment": SegmentRule.parse,
            "strict": lambda text: text == AUTO or parse_classes(text),
            "hidden_layers": parse_layers,
        }
        parsers[info.field_name](text)
        return text

    @field_validator("draft_url")
    @classmethod
    def _check_draft_url(cls, text: str) -> str:
        if text and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text):
            raise ValueError("got no such address; use http://host:port")
        return text

    @field_validator("reuse_answers", mode="before")
    @classmethod
    def _check_reuse_answers(cls, value: Any) -> str:
        match = re.fullmatch(r"([0-9]{1,7})(:shared)?", str(value))
        if match is None or int(match[1]) > MAX_ANSWERS:
            raise ValueError(
                f"got {shown(value)}; use a whole number 0..{MAX_ANSWERS}, such as "
                "1000, or 1000:shared"
            )
        return str(value)

    def _check_verification(self) -> None:
        """Raises ConfigError beside what only verdicts need."""
        mode = flag("verification")
        for name in ("judge", "hidden_layers", "strict"):
            value = getattr(self, name)
            is_given = value != type(self).model_fields[name].default
            if is_given and not self.is_semantic:
                raise ConfigError(
                    f"{flag(name)} is {value!r}, but {mode} {self.verification} needs no verdicts; "
                    f"use {mode} semantic, or leave {flag(name)} out"
                )

    def _check_files(self) -> None:
        """Raises ConfigError if the judge's file, or the certificate, is of no use."""
        usable = {
            "judge": f"{QUESTION}, {LIKELIHOOD} or a folder of sglang-parse train-judge",
            "threshold": Setting("threshold", type(self).model_fields["threshold"]).expected,
        }
        try:
            _ = self.judge_file, self.certificate
        except (JudgeError, CertificateError) as error:
            name = "judge" if isinstance(error, JudgeError) else "threshold"
            value = shown(getattr(self, name))
            raise ConfigError(f"{flag(name)} is {value}: {error}; use {usable[name]}") from error

    def _check_mtp(self) -> None:
        """Raises ConfigError beside an EAGLE-3 head."""
        if self.mtp and self.eagle3_path:
            found = f"{flag('eagle3_path')} is {shown(self.eagle3_path)}"
            other = f"{flag('mtp')} {self.mtp}"
            raise ConfigError(f"{found} with {other}: they propose both; leave one out")

    @property
    def certificate(self) -> Certificate | None:
        """The threshold's certificate, if it was given as a file."""
        return read_certificate(self.threshold) if isinstance(self.threshold, str) else None

    @property
    def accept_threshold(self) -> float:
        """Minimum verdict that accepts a prefix."""
        certificate = self.certificate
        if certificate is not None and certificate.threshold is not None:
            return certificate.threshold
        if (
            "threshold" not in self.model_fields_set
            and self.judge_file
            and self.judge_file.threshold
        ):
            return self.judge_file.threshold
        return float(self.threshold)

    @property
    def strict_classes(self) -> tuple[str, ...]:
        """What 'auto' stands for instead of 'auto'."""
        if self.strict != AUTO:
            return parse_classes(self.strict)
        is_likelihood = self.is_semantic and self.resolved_judge == LIKELIHOOD
        return LIKELIHOOD_STRICT if is_likelihood else ()

    def permitted_options(self, host: str) -> str:
        """Returns 'all', 'safe' or 'none' for a server that listens on ``host``."""
        if self.request_options != AUTO:
            return self.request_options
        return "all" if _is_loopback(host) else "safe"

    @property
    def max_reused_answers(self) -> int:
        return int(self.reuse_answers.partition(":")[0])

    @property
    def shares_unscoped(self) -> bool:
        """Whether requests without a scope share answers among themselves."""
        return self.reuse_answers.endswith(":shared")

    @property
    def segment_rule(self) -> SegmentRule:
        """Where drafts are verified: by default at every token if verdicts come from their rows,
        which costs nothing, unless a trained head has a rule of its own."""
        if "segment" in self.model_fields_set or not self.scores_tokens:
            return SegmentRule.parse(self.segment)
        return self.judge_file.segment_rule if self.judge_file else SegmentRule("tokens", 1)

    @property
    def block_size(self) -> int | None:
        """Tokens per draft forward; None for "auto"."""
        return None if self.draft_parallel_tokens == "auto" else int(self.draft_parallel_tokens)

    @property
    def is_semantic(self) -> bool:
        return self.verification == "semantic"

    @property
    def scores_tokens(self) -> bool:
        """Whether verdicts come from the draft's rows, by a trained head or the likelihood."""
        return self.is_semantic and self.resolved_judge != QUESTION

    @property
    def verifies_tokens(self) -> bool:
        """Whether every draft token is accepted or refused by itself."""
        is_every = self.segment_rule == SegmentRule("tokens", 1)
        return not self.is_semantic or (self.scores_tokens and is_every)

    @property
    def resolved_judge(self) -> str:
        """The judge, in semantic mode; what 'auto' stands for instead of 'auto'."""
        automatic = QUESTION if self.question else LIKELIHOOD
        return automatic if self.judge == AUTO else self.judge

    @property
    def judge_file(self) -> JudgeFile | None:
        """The trained head, if there is one."""
        trained = self.scores_tokens and self.resolved_judge != LIKELIHOOD
        return read_judge(self.judge) if trained else None

    @property
    def max_questions(self) -> int:
        """Maximum questions about one draft."""
        if not self.is_semantic:
            return 0
        return int(bool(self.question)) if self.scores_tokens else self.max_prefixes

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers whose outputs verify passes capture, ascending."""
        layers = self.judge_file.layers if self.judge_file else ()
        return tuple(sorted({*parse_layers(self.hidden_layers), *layers}))

    @property
    def judge_name(self) -> str | None:
        """'question', 'likelihood', 'head', the latter two '+question' with one; None in token
        mode."""
        if not self.is_semantic:
            return None
        if not self.scores_tokens:
            return QUESTION
        name = "head" if self.judge_file else LIKELIHOOD
        return f"{name}+{QUESTION}" if self.max_questions else name

    @property
    def proposer(self) -> str:
        """What proposes drafts from the target's hidden states: "eagle3", "mtp", or "" without."""
        if self.eagle3_path:
            return EAGLE3
        return MTP if self.mtp else ""

    @property
    def mtp_path(self) -> str | None:
        """Where the MTP layer is, if not in the target's checkpoint."""
        return self.mtp if self.mtp not in ("", OWN) else None

    @property
    def captures_hidden_states(self) -> bool:
        """Whether forwards of the target return hidden states."""
        return bool(self.proposer or self.captured_layers)

    def to_env(self, environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
        """Publishes the given settings to this process and its children; others stay adaptive."""
        environ[ENV_VAR] = json.dumps(self.model_dump(exclude_unset=True))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> ParseConfig:
        """Returns the published settings, or the defaults."""
        text = environ.get(ENV_VAR, "")
        if not text:
            return cls()
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{ENV_VAR} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{ENV_VAR} must hold one JSON object, got {content!r}")
        return cls(**content)


def parse_layers(text: str) -> tuple[int, ...]:
    """Parses layer numbers such as '8,12', ascending.

    Raises:
        ValueError: the text is something else, or names too many.
    """
    parts = text.split(",") if text else ()
    if not all(part.strip().isdecimal() for part in parts) or len(parts) > MAX_LAYERS:
        raise ValueError(f"got {shown(text)}; use at most {MAX_LAYERS} layers, such as '8,12'")
    return tuple(sorted({int(part) for part in parts}))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def flag(name: str) -> str:
    return f"--{_FLAG_PREFIX}{name}".replace("_", "-")


def configure(**settings: Any) -> ParseConfig:
    """Configures ``sgl.Engine(...)``; call it before creating the engine.

    Raises:
        ConfigError: a setting is unknown or out of range.
    """
    config = ParseConfig(**settings)
    config.to_env()
    return config


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("PARSE (sglang_parse)")
    for setting in settings_of(ParseConfig):
        group.add_argument(
            flag(setting.name),
            type=setting.parse,
            default=None,  # distinguishes given settings from defaults
            choices=setting.choices or None,
            metavar=setting.metavar,
            help=setting.description,
        )


def config_from_namespace(namespace: argparse.Namespace) -> ParseConfig | None:
    """Returns the settings of a parsed command line; None if the parser had no PARSE flags."""
    flags = {name: _FLAG_PREFIX + name for name in ParseConfig.model_fields}
    values = {name: getattr(namespace, key) for name, key in flags.items() if key in namespace}
    given = {name: value for name, value in values.items() if value is not None}
    return ParseConfig(**given) if values else None
