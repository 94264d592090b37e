"""What the command line of ``sglang-parse bench`` can ask for, and the servers that follow."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_parse.client.flags import Flags, at_least, numbers, option, share, split_words
from sglang_parse.client.kv_log import KV_LOG
from sglang_parse.client.records import DRAFT, PARSE, PLAIN, BenchError
from sglang_parse.client.servers import MODEL_NAME, ServerSpec
from sglang_parse.client.targets import Models, parse_settings, server_specs
from sglang_parse.core.config import ConfigError, ParseConfig
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.shape import QUESTION, Shape, shape_names, tokenizer_folder

PRICE = "price"
"""PARSE that always drafts and keeps all of every draft."""
BACKENDS = {"cuda": "flashinfer", "cpu": "torch_native"}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COMPILED = (("TORCHDYNAMO_DISABLE", "0"),)
"""On a GPU SGLang's compiled parts are part of its speed."""
ROOM = 1.15
"""A server's memory over its weights' and its KV's."""
_NAMES = ", ".join(shape_names())


def _sorted(values: Sequence[Any]) -> tuple:
    return tuple(sorted(set(values)))


@dataclass(frozen=True)
class LimitSettings(Flags):
    """What was asked for.

    Attributes:
        fractions: of every draft that are kept, one PARSE server each.
        output_len: tokens behind the first one, which belongs to the prefill.
        baselines: attention backends of the plain target, whose fastest counts.
        draft_len: tokens of a draft at most.
        prefixes: of every draft, all of one length.
        staggered: requests begin apart from one another, as many behind each other as in WAVES.
        output: folder of results.json, the plot, models and logs.
    """

    target: Shape = option(
        "qwen3_32b", f"{_NAMES}, or a folder (default %(default)s)", read=Shape.read
    )
    draft: Shape = option("qwen3_1_7b", "likewise (default %(default)s)", read=Shape.read)
    device: str = option("cuda", "default %(default)s", choices=sorted(BACKENDS))
    attention_backend: str = option(None, f"default: {BACKENDS}")
    baselines: tuple[str, ...] = option(
        None,
        "attention backends of the plain target, whose fastest counts (default: "
        "--attention-backend, and fa3 on a Hopper GPU that has it)",
        metavar="BACKEND,...",
        read=lambda text: tuple(text.split(",")) if text else (),
    )
    dtype: str = option(None, f"default: {DTYPES}", choices=sorted(ITEM_BYTES))
    concurrencies: tuple[int, ...] = option(
        (1, 8, 64),
        "requests at a time (default 1,8,64)",
        name="--concurrency",
        metavar="CONCURRENCY",
        type=numbers(at_least(1)),
        read=_sorted,
    )
    fractions: tuple[float, ...] = option(
        (0, 0.25, 0.5, 0.75, 1),
        "shares of every draft that are kept (default 0,0.25,0.5,0.75,1)",
        name="--acceptance",
        metavar="ACCEPTANCE",
        type=numbers(share),
        read=_sorted,
    )
    input_len: int = option(128, "tokens (default %(default)s)", type=at_least(1))
    output_len: int = option(
        512, "tokens behind the first one; one draft (default %(default)s)", type=at_least(1)
    )
    draft_len: int = option(
        None, "tokens of a draft (default: --output-len, one draft an answer)", type=at_least(1)
    )
    staggered: bool = option(
        False,
        "requests begin apart from one another and follow each other, so that prefills, bursts, "
        "passes and steps share iterations",
        action="store_true",
    )
    prefixes: int = option(16, "per draft (default %(default)s)", type=at_least(1))
    runs: int = option(3, "medians are reported (default %(default)s)", type=at_least(1))
    drafting: str = option(
        "auto",
        "--parse-drafting of the servers that are timed (default %(default)s)",
        choices=("auto", "always"),
    )
    flags: tuple[str, ...] = option("", "more flags of SGLang, for every server", read=split_words)
    parse_flags: tuple[str, ...] = option("", "more, for servers with PARSE", read=split_words)
    limit: bool = option(
        False, "measure the device too: what bounds each stage", action="store_true"
    )
    output: Path = option(Path("build/bench-gpu"), "folder", type=Path)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> LimitSettings:
        """Raises: BenchError, when settings do not fit together, or with this machine."""
        found = super().read(arguments)
        settings = replace(
            found,
            attention_backend=found.attention_backend or BACKENDS[found.device],
            dtype=found.dtype or DTYPES[found.device],
            draft_len=found.draft_len or found.output_len,
        )
        settings = replace(settings, baselines=settings.baselines or settings._own_and_best())
        settings._check()
        return settings

    def _check(self) -> None:
        if self.target.vocab != self.draft.vocab:
            raise BenchError(
                f"--draft {self.draft.name} has {self.draft.vocab} words, --target "
                f"{self.target.name} {self.target.vocab}; use two shapes of one vocabulary"
            )
        if self.draft_len % self.prefixes:
            setting = "--draft-len" if self.has_rounds else "--output-len"
            raise BenchError(
                f"{setting} is {self.draft_len}, which --prefixes {self.prefixes} does not "
                "divide; use a multiple of it, so that all prefixes have one length"
            )
        try:
            self.parse_config()
        except ConfigError as error:
            raise BenchError(f"--output-len or --prefixes: {error}") from error

    def _own_and_best(self) -> tuple[str, ...]:
        """PARSE's attention backend, and what stock SGLang is fastest with on this GPU."""
        own = (self.attention_backend,)
        return (*own, "fa3") if self.device == "cuda" and "fa3" not in own and has_fa3() else own

    @property
    def has_rounds(self) -> bool:
        """Whether an answer takes several drafts."""
        return self.draft_len < self.output_len

    def parse_config(self) -> ParseConfig:
        """PARSE's settings: drafts cut into prefixes of one length. Where one draft is an answer,
        the target writes behind its cut; where it is not, drafting resumes."""
        return ParseConfig(
            draft_tokens=self.draft_len,
            max_prefixes=self.prefixes,
            segment=f"tokens:{self.draft_len // self.prefixes}",
            on_reject="redraft" if self.has_rounds else "decode",
            question=str(QUESTION),
        )

    def check_memory(self, available: int) -> None:
        """Raises: BenchError, when the models do not fit into that many bytes."""
        needed = self.bytes_needed
        if needed > available:
            raise BenchError(
                f"{self.target.name} and {self.draft.name} need about {needed / 2**30:.1f} GiB "
                f"with KV, the {self.device} has {available / 2**30:.1f}; use smaller shapes "
                "(--target tiny_target --draft tiny_draft), or a smaller --concurrency"
            )

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes_needed(self) -> float:
        """What a PARSE server takes: both models' weights and KV."""
        shapes = (self.target, self.draft)
        weights = sum(shape.all_bytes(self.item_bytes) for shape in shapes)
        kv = self.kv_slots * sum(shape.kv_per_token for shape in shapes)
        return ROOM * (weights + self.item_bytes * kv)

    @property
    def max_new_tokens(self) -> int:
        return 1 + self.output_len

    @property
    def kv_slots(self) -> int:
        """For the longest pass of all requests at once, and pages that are not full."""
        per_request = self.input_len + 1 + self.max_new_tokens + 64
        per_request += self.prefixes * self.question_len
        return self.concurrencies[-1] * per_request

    @cached_property
    def question_len(self) -> int:
        """Tokens of the question about a prefix. Raises: BenchError, without a tokenizer."""
        folder = tokenizer_folder()
        from transformers import AutoTokenizer

        from sglang_parse.core.question import QuestionWording, render_question

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return render_question(tokenizer, QuestionWording.read(str(QUESTION))).max_len

    def layout(self) -> RequestLayout:
        """One request's rows of a verification pass: the anchor, the draft, the questions."""
        length = self.draft_len // self.prefixes
        return RequestLayout(
            prefix_len=self.input_len,
            num_draft_rows=1 + self.draft_len,
            visible_lens=tuple(1 + length * k for k in range(1, self.prefixes + 1)),
            question_lens=(self.question_len,) * self.prefixes,
        )

    # -- servers ----------------------------------------------------------------

    @property
    def price(self) -> str:
        """The server that shows what a pass takes: it always drafts."""
        return PRICE if self.drafting == "auto" else server_at(self.fractions[-1])

    @property
    def plain_names(self) -> tuple[str, ...]:
        """The servers of the plain target, PARSE's attention backend first."""
        return tuple(
            PLAIN if backend == self.attention_backend else f"{PLAIN}-{backend}"
            for backend in self.baselines
        )

    def specs(self) -> list[ServerSpec]:
        """The plain target on each baseline's backend, the draft alone, PARSE that always drafts,
        PARSE at every fraction."""
        folder = self.output / "models"
        target, draft = (str(shape.write_model(folder)) for shape in (self.target, self.draft))
        config, more = self.parse_config(), () if self.device == "cpu" else COMPILED
        shape = parse_settings(
            draft_tokens=config.draft_tokens,
            max_prefixes=config.max_prefixes,
            segment=config.segment,
            on_reject=config.on_reject,
        )
        models = Models(target, draft, question=config.question, common=self._common())

        def with_parse(name: str, fraction: float, drafting: str) -> ServerSpec:
            flags = (*shape, *parse_settings(drafting=drafting), *self.parse_flags)
            (spec,) = server_specs(replace(models, parse_flags=flags), (PARSE,))
            log = ((KV_LOG, str(self.kv_log())),) if name == self.price else ()
            environment = ((SIMULATE, f"{fraction:g}"), *log, *more)
            return replace(spec, name=name, environment=environment)

        specs = []
        for name, backend in zip(self.plain_names, self.baselines, strict=True):
            (spec,) = server_specs(replace(models, common=self._common(backend)), (PLAIN,))
            specs.append(replace(spec, name=name, environment=more))
        specs += [replace(spec, environment=more) for spec in server_specs(models, (DRAFT,))]
        if self.price == PRICE:
            specs.append(with_parse(PRICE, 1.0, "always"))
        return specs + [with_parse(server_at(f), f, self.drafting) for f in self.fractions]

    def kv_log(self) -> Path:
        """Where the server ``price`` writes what its requests hold."""
        return (self.output / "kv.jsonl").resolve()

    def _common(self, backend: str = "") -> tuple[str, ...]:
        """SGLang's flags for every server; ``backend``: instead of PARSE's."""
        # Else SGLang captures graphs of batches that never come, minutes a server.
        graphs = ("--cuda-graph-max-bs-decode", str(self.concurrencies[-1]))
        return (
            *("--device", self.device, "--attention-backend", backend or self.attention_backend),
            *(graphs if self.device == "cuda" else ()),
            *("--dtype", self.dtype, "--load-format", "dummy"),
            *("--host", "127.0.0.1", "--served-model-name", MODEL_NAME),
            *("--max-total-tokens", str(self.kv_slots)),
            *("--max-running-requests", str(max(2, self.concurrencies[-1])), "--enable-metrics"),
            *self.flags,
        )


def has_fa3() -> bool:
    """Whether SGLang runs FlashAttention 3 here: on a Hopper GPU, by a library of sglang-kernel's
    that smaller builds leave out."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    spec = importlib.util.find_spec("sgl_kernel")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any(any(Path(folder).glob("flash_ops*.so")) for folder in folders)


def server_at(fraction: float) -> str:
    """Name of the PARSE server that keeps this fraction of every draft."""
    return f"parse-{fraction:g}"


def fraction_of(name: str) -> float | None:
    """What a server of that name simulates; None without PARSE."""
    if name == DRAFT or name.split("-")[0] == PLAIN:
        return None
    return 1.0 if name == PRICE else float(name.removeprefix("parse-"))


add_arguments = LimitSettings.add_arguments
