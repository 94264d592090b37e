"""The command line of ``sglang-parse bench``, and its servers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_parse.client.flags import Flags, at_least, numbers, option, split_names, split_words
from sglang_parse.client.records import (
    PARSE_HEAD,
    PARSE_QUESTION,
    PARSE_TOKEN,
    TITLES,
    BenchError,
    kind_of,
)
from sglang_parse.client.servers import MODEL_NAME, ServerSpec
from sglang_parse.client.targets import check_server, parse_settings, server_specs
from sglang_parse.compare.settings import CompareSettings
from sglang_parse.core.block import USUAL_BLOCK, BlockKind, Masks
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.judge import LIKELIHOOD
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.setting import ConfigError
from sglang_parse.core.simulation import BLOCK_ENV_VAR, block_tokens
from sglang_parse.shapes.shape import Shape, shape_names

KINDS = tuple(kind for kind in TITLES if kind not in (PARSE_QUESTION, PARSE_TOKEN))
SETTINGS = (
    *("device", "attention_backend", "dtype", "input_len", "output_len"),
    *("draft_len", "block_tokens", "drafting", "waves"),
)
STEPS = 3
"""Draft tokens per verification of the stock servers."""
BACKENDS = {"cuda": "flashinfer", "cpu": "torch_native"}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COMPILED = {"TORCHDYNAMO_DISABLE": "0"}
"""On a GPU SGLang's compiled parts are part of its speed."""
OVERHEAD = 1.15
"""Memory of a server / memory of its weights and KV."""
PASSES = (1, 2, 4, 8, 12, 16, 24, 32)
"""Requests of a pass that graphs are captured for; larger ones run eagerly, where rows decide."""


@dataclass(frozen=True)
class BenchSettings(Flags):
    target: Shape = option("qwen3_32b", f"{', '.join(shape_names())}, or a folder", read=Shape.read)
    draft: Shape = option("qwen3_0_6b", "likewise", read=Shape.read)
    device: str = option("cuda", choices=sorted(BACKENDS))
    attention_backend: str = option(None, f"default: {BACKENDS}")
    dtype: str = option(None, f"default: {DTYPES}", choices=sorted(ITEM_BYTES))
    concurrencies: tuple[int, ...] = option(
        (1, 8, 16), "requests at a time", name="--concurrency", type=numbers(at_least(1))
    )
    servers: tuple[str, ...] = option(
        "plain,eagle3@3,parse@1,parse@every:32,standalone@3,parse@every:12,parse@every:90,"
        "parse-head@every:32,parse@0",
        f"of {','.join(KINDS)}; with @VALUE acceptance is simulated: an accept length of the stock "
        "servers; a fraction of every draft, every:N, a refusal every N tokens, or doubt:N, the "
        "same where the draft model is unsure, of those with PARSE, whose judge is the likelihood "
        "or a verdict head",
        metavar="SERVER,...",
        read=split_names,
    )
    input_len: int = option(128, "tokens", type=at_least(1))
    output_len: int = option(256, "tokens after the first one", type=at_least(1))
    draft_len: int = option(
        None, "--parse-draft-tokens (default: PARSE's; it adapts to refusals)", type=at_least(1)
    )
    block_tokens: float = option(
        None,
        "the draft writes blocks, each of which adds this many tokens, simulated (default: one "
        "token per forward)",
        type=float,
    )
    runs: int = option(3, "medians are reported", type=at_least(1))
    waves: int = option(
        4, "requests for each of several at a time: one begins when one ends", type=at_least(1)
    )
    drafting: str = option(
        "auto", "--parse-drafting of the timed servers", choices=("auto", "always")
    )
    flags: tuple[str, ...] = option("", "more flags of SGLang, for every server", read=split_words)
    parse_flags: tuple[str, ...] = option("", "more, for servers with PARSE", read=split_words)
    output: Path = option(Path("build/bench-gpu"), "folder of the results and logs", type=Path)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> BenchSettings:
        found = super().read(arguments)
        return replace(
            found,
            attention_backend=found.attention_backend or BACKENDS[found.device],
            dtype=found.dtype or DTYPES[found.device],
        )

    def __post_init__(self) -> None:
        if self.target.vocab_size != self.draft.vocab_size:
            raise BenchError(
                f"--draft {self.draft.name} has {self.draft.vocab_size} words, --target "
                f"{self.target.name} {self.target.vocab_size}; use two shapes of one vocabulary"
            )
        for name in self.servers:
            check_server(name, KINDS)
        self._config()

    def _config(self) -> ParseConfig:
        try:
            block_tokens({BLOCK_ENV_VAR: str(self.block_tokens or "")})
            return ParseConfig(**self.of_parse)
        except ConfigError as error:
            raise BenchError(f"--draft-len or --block-tokens: {error}") from error

    @property
    def of_parse(self) -> dict[str, Any]:
        """PARSE's settings: verdicts on every token."""
        draft = {"draft_tokens": self.draft_len} if self.draft_len else {}
        return {"segment": "tokens:1", "drafting": self.drafting, **draft}

    def servers_at_once(self, available: int) -> int:
        each = (ITEM_BYTES[self.dtype], self.kv_slots)
        needed = OVERHEAD * (self.target.num_bytes(*each) + self.draft.num_bytes(*each))
        if needed > available:
            raise BenchError(
                f"{self.target.name} and {self.draft.name} need about {needed / 2**30:.1f} GiB "
                f"with KV, the {self.device} has {available / 2**30:.1f}; use smaller shapes "
                "(--target tiny_target --draft tiny_draft), or a smaller --concurrency"
            )
        return int(available // needed)

    @property
    def facts(self) -> dict[str, Any]:
        """For a reader of the results."""
        shapes = {"target": self.target.name, "draft": self.draft.name}
        return shapes | {name: getattr(self, name) for name in SETTINGS}

    @property
    def max_new_tokens(self) -> int:
        return 1 + self.output_len

    @property
    def rows(self) -> int:
        """Rows of a request's verify pass: the last token and a whole draft."""
        return 1 + self._config().draft_tokens

    @property
    def kv_slots(self) -> int:
        """Slots for a verify pass and a block of all requests, 64 per request for partly filled
        pages."""
        block = BlockKind(USUAL_BLOCK, Masks.EVERY).lookahead_rows if self.block_tokens else 0
        length = self.input_len + self.max_new_tokens
        return self.concurrencies[-1] * (length + self.rows + block + 64)

    @cached_property
    def compared(self) -> CompareSettings:
        """The comparison of these servers, one by one; writes their models."""
        folder = self.output / "models"
        mask = {"pard_token": self.draft.vocab_size - 1} if self.block_tokens else {}
        target, draft = self.target.write_model(folder), self.draft.write_model(folder, **mask)
        return CompareSettings(
            target=str(target),
            draft=str(draft),
            eagle3=str(self.target.write_eagle3(folder)),
            judge=str(self.target.write_judge(folder, target, draft)),
            dflash=str(self.target.write_dflash(folder)),
            tokenizer=str(target),
            flags=self._common(),
            parse_flags=(*parse_settings(**self.of_parse), *self.parse_flags),
            standalone_steps=STEPS,
            eagle3_steps=STEPS,
            servers=self.servers,
            remotes={},
            concurrencies=self.concurrencies,
            thresholds=(),
            runs=self.runs,
            requests=2,
            waves=self.waves,
            # The adaptive policy decides after a window of drafts.
            warmup=1 + DEFAULTS.window if self.drafting == "auto" else 1,
            traced=1,
            problems=0,
            noise=False,
            output=self.output,
            has_text=False,
        )

    def specs(self) -> list[ServerSpec]:
        compiled = {} if self.device == "cpu" else COMPILED
        block = {BLOCK_ENV_VAR: f"{self.block_tokens:g}"} if self.block_tokens else {}
        found = []
        for name in self.servers:
            is_head = kind_of(name) == PARSE_HEAD
            models = self.compared if is_head else replace(self.compared, judge=LIKELIHOOD)
            (spec,) = server_specs(models, (name,))
            found.append(replace(spec, environment={**spec.environment, **compiled, **block}))
        return found

    def _common(self) -> tuple[str, ...]:
        most = self.concurrencies[-1]
        # Else SGLang captures graphs of batch sizes that never occur: minutes per server.
        graphs = ("--cuda-graph-max-bs-decode", str(most), "--cuda-graph-bs-prefill", *self.buckets)
        return (
            *("--device", self.device, "--attention-backend", self.attention_backend),
            *(graphs if self.device == "cuda" else ()),
            *("--dtype", self.dtype, "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--served-model-name", MODEL_NAME),
            *("--max-total-tokens", str(self.kv_slots)),
            *("--max-running-requests", str(max(2, most)), "--enable-metrics"),
            *self.flags,
        )

    @property
    def buckets(self) -> tuple[str, ...]:
        """Sizes of prefill graphs that whole passes of 1, 2, 4, 8, 12 ... requests fill."""
        counts = [count for count in PASSES if count <= self.concurrencies[-1]]
        return tuple(str(16 * -(-count * self.rows // 16)) for count in counts)


add_arguments = BenchSettings.add_arguments
