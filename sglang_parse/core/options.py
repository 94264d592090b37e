"""Options of one request, in ``custom_params["parse"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from sglang_parse.core.config import MAX_DRAFT, ParseConfig, flag
from sglang_parse.core.setting import (
    STRICT,
    ConfigError,
    Threshold,
    problems_of,
    shown,
    unknown_names,
)
from sglang_parse.core.strict import parse_classes

MAX_OPTIONS = 16
"""Maximum number of keys in ``custom_params["parse"]``."""
MAX_TEXT = 1 << 22
"""Maximum characters of a text: about a million tokens. All of it is copied between processes."""
RESERVED = "__parse"
"""Names of ``custom_params`` that begin with it are no client's."""


class RequestOptions(BaseModel):
    """Options of one request in ``sampling_params.custom_params["parse"]``."""

    model_config = STRICT

    enabled: bool
    """Use PARSE for this request."""
    threshold: Threshold
    """Minimum verdict that accepts a prefix."""
    strict: tuple[str, ...] = ()
    """Classes of tokens that must be the target's own choice, as of --parse-strict, instead of the
    server's."""
    trace: bool = False
    """Return one record per round in ``meta_info``."""
    hidden_states: bool = False
    """With trace: each record also has the target's hidden states of --parse-hidden-layers."""
    draft_token_ids: list[int] = Field(default_factory=list, max_length=MAX_DRAFT)
    """With hidden_states: the first draft, verified as it is. At threshold 0 it becomes the
    output; the first token replaces the target's first."""
    draft: str = ""
    """A text that the answer may equal, or equal in parts: a draft to be verified, instead of the
    draft model's. The OpenAI API's ``prediction`` is the same."""
    prompt_drafts: Literal["on", "off"] = "on"
    """Whether drafts copy from the prompt and the output so far, as --parse-prompt-drafts says."""
    drafting: Literal["auto", "always"] = "auto"
    """When to draft. 'auto': as --parse-drafting says. 'always': also while drafting is suspended,
    then up to 16 tokens at a time unless --parse-draft-tokens is set; texts whatever that costs."""

    @field_validator("strict", mode="before")
    @classmethod
    def _parse_strict(cls, value: object) -> tuple[str, ...]:
        return parse_classes(value)

    def looser_than(self, config: ParseConfig) -> dict[str, bool]:
        """Option -> whether it accepts what the server's does not."""
        return {
            "threshold": self.threshold < config.accept_threshold,
            "strict": not {*config.strict_classes} <= {*self.strict},
        }

    @classmethod
    def read(cls, custom_params: object, config: ParseConfig) -> RequestOptions:
        """Reads a request's options; server settings are the defaults.

        Raises:
            ConfigError: an unknown key, or a value of the wrong type or range.
        """
        params = _object(custom_params, "custom_params")
        if reserved := [name for name in map(str, params) if name.startswith(RESERVED)]:
            raise ConfigError(
                f"custom_params has {shown(reserved)}; names that begin with {RESERVED} are "
                "reserved: leave them out"
            )
        parse = params.get("parse")
        options = _object(parse, "custom_params.parse")
        if len(options) > MAX_OPTIONS:
            raise ConfigError(
                f"custom_params.parse has {len(options)} keys; use at most {MAX_OPTIONS}"
            )
        server = {
            "enabled": config.default == "on",
            "threshold": config.accept_threshold,
            "strict": config.strict_classes,
            "prompt_drafts": config.prompt_drafts,
        }
        try:
            read = cls.model_validate({**server, **options})
        except ValidationError as error:
            if unknown := unknown_names(error):
                raise ConfigError(
                    f"custom_params.parse has unknown keys {shown(unknown)}; "
                    f"known: {sorted(cls.model_fields)}"
                ) from None
            problem, *_ = problems_of(error, cls, "custom_params.parse.{}".format)
            raise ConfigError(problem) from None
        read.model_fields_set.intersection_update(options)
        read._check_hidden_states(config)
        read._check_draft()
        return read

    @classmethod
    def of_request(
        cls,
        custom_params: object,
        config: ParseConfig,
        *,
        host: str,
        vocab_size: int,
        returns_logprobs: bool,
        prefills: bool = True,
    ) -> RequestOptions:
        """Reads the options of a request that a server is to serve.

        Args:
            host: the address that the server listens on.
            vocab_size: the target's.
            returns_logprobs: the request asks for log probabilities.
            prefills: the server prefills its prompts itself.

        Raises:
            ConfigError: as ``read``, or the server or its model does not take an option.
        """
        options = cls.read(custom_params, config)
        options._check_permitted(config, host)
        options._check_draft_token_ids(vocab_size, returns_logprobs=returns_logprobs)
        if options.draft_token_ids and not prefills:
            raise ConfigError(
                "custom_params.parse.draft_token_ids is given to a server that does not prefill; "
                "send it to one without --disaggregation-mode"
            )
        return options

    def _check_permitted(self, config: ParseConfig, host: str) -> None:
        permitted = config.permitted_options(host)
        refused = {
            **self.looser_than(config),
            "trace": self.trace,
            "hidden_states": self.hidden_states,
            "draft_token_ids": bool(self.draft_token_ids),
            "drafting": self.drafting == "always",
        }
        for name in sorted(self.model_fields_set):
            if permitted == "none" or (permitted == "safe" and refused.get(name)):
                raise ConfigError(
                    f"custom_params.parse.{name} is {shown(getattr(self, name))}, which "
                    f"{flag('request_options')} {permitted} of this server refuses; "
                    + self._allowed_instead(name, permitted, config)
                )

    def _allowed_instead(self, name: str, permitted: str, config: ParseConfig) -> str:
        if name == "threshold" and permitted == "safe":
            return f"use {config.accept_threshold:g} or more, or leave it out"
        if name == "strict" and permitted == "safe":
            return f"use {','.join(config.strict_classes)} or more, or leave it out"
        return "leave it out (also prediction)" if name == "draft" else "leave it out"

    def _check_draft_token_ids(self, vocab_size: int, *, returns_logprobs: bool) -> None:
        name, ids = "custom_params.parse.draft_token_ids", self.draft_token_ids
        if ids and returns_logprobs:
            raise ConfigError(f"{name} is given beside log probabilities; leave one of them out")
        for found in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= found < vocab_size:
                raise ConfigError(
                    f"{name} has {found} at place {ids.index(found)}; this model's token ids are "
                    f"0..{vocab_size - 1}"
                )

    def _check_draft(self) -> None:
        name = "custom_params.parse.draft"
        if self.draft and self.draft_token_ids:
            raise ConfigError(f"{name} is given beside draft_token_ids; leave one of them out")
        if len(self.draft) > MAX_TEXT:
            raise ConfigError(
                f"{name} (or prediction) has {len(self.draft)} characters; send at most {MAX_TEXT}"
            )
        try:
            self.draft.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name} has half a character (a lone surrogate) at place {error.start}; send "
                "valid Unicode"
            ) from None

    def _check_hidden_states(self, config: ParseConfig) -> None:
        name, layers = "custom_params.parse.hidden_states", flag("hidden_layers")
        if self.hidden_states and not (self.trace and config.captured_layers):
            raise ConfigError(f"{name} is true; it needs trace true, and a server with {layers}")
        count, limit = len(self.draft_token_ids), 1 + config.draft_tokens
        if count and not (self.hidden_states and not self.threshold and 2 <= count <= limit):
            raise ConfigError(
                f"custom_params.parse.draft_token_ids has {count} tokens; it needs 2 to {limit}, "
                "hidden_states true and threshold 0"
            )


def _object(value: object, name: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {shown(value)}; use an object")
    return value
