"""The command line of ``sglang-parse bench``, and its servers."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_parse.client.flags import Flags, at_least, numbers, option, share, split_words
from sglang_parse.client.records import DRAFT, PARSE, PLAIN, BenchError
from sglang_parse.client.servers import MODEL_NAME, ServerSpec
from sglang_parse.client.targets import Models, parse_settings, server_specs
from sglang_parse.core.config import ConfigError, ParseConfig
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.shape import QUESTION, Shape, shape_names, tokenizer_folder

ALWAYS = "parse-always"
"""Server that always drafts and accepts all of every draft: it measures the stage costs."""
BACKENDS = {"cuda": "flashinfer", "cpu": "torch_native"}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
COMPILED = (("TORCHDYNAMO_DISABLE", "0"),)
"""On a GPU SGLang's compiled parts are part of its speed."""
OVERHEAD = 1.15
"""Memory of a server / memory of its weights and KV."""
_NAMES = ", ".join(shape_names())


def _sorted(values: Sequence[Any]) -> tuple:
    return tuple(sorted(set(values)))


@dataclass(frozen=True)
class LimitSettings(Flags):
    """Settings of the benchmark; each is the flag of its name.

    Attributes:
        output_len: tokens after the first one, which belongs to the prefill.
        prefixes: of every draft, all of the same length.
    """

    target: Shape = option(
        "qwen3_32b", f"{_NAMES}, or a folder (default %(default)s)", read=Shape.read
    )
    draft: Shape = option("qwen3_1_7b", "likewise (default %(default)s)", read=Shape.read)
    device: str = option("cuda", "default %(default)s", choices=sorted(BACKENDS))
    attention_backend: str = option(None, f"default: {BACKENDS}")
    baselines: tuple[str, ...] = option(
        None,
        "attention backends of the plain target, the fastest counts (default: "
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
        "simulated accepted fractions of every draft (default 0,0.25,0.5,0.75,1)",
        name="--acceptance",
        metavar="ACCEPTANCE",
        type=numbers(share),
        read=_sorted,
    )
    input_len: int = option(128, "tokens (default %(default)s)", type=at_least(1))
    output_len: int = option(
        512, "tokens after the first one (default %(default)s)", type=at_least(1)
    )
    draft_len: int = option(
        None, "tokens of a draft (default: --output-len, one draft per answer)", type=at_least(1)
    )
    staggered: bool = option(
        False,
        "stagger the requests, several in a row, so that prefills, draft chunks, verify passes "
        "and decode steps share iterations",
        action="store_true",
    )
    prefixes: int = option(16, "per draft (default %(default)s)", type=at_least(1))
    runs: int = option(3, "medians are reported (default %(default)s)", type=at_least(1))
    drafting: str = option(
        "auto",
        "--parse-drafting of the timed servers (default %(default)s)",
        choices=("auto", "always"),
    )
    flags: tuple[str, ...] = option("", "more flags of SGLang, for every server", read=split_words)
    parse_flags: tuple[str, ...] = option("", "more, for servers with PARSE", read=split_words)
    limit: bool = option(
        False, "measure the device too, and what bounds each stage", action="store_true"
    )
    output: Path = option(Path("build/bench-gpu"), "folder of the results and logs", type=Path)

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
        if not settings.baselines:
            backends = [settings.attention_backend]
            if settings.device == "cuda" and "fa3" not in backends and has_fa3():
                backends.append("fa3")  # where it runs, it is stock SGLang's fastest
            settings = replace(settings, baselines=tuple(backends))
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

    @property
    def has_rounds(self) -> bool:
        """Whether an answer takes several drafts."""
        return self.draft_len < self.output_len

    def parse_config(self) -> ParseConfig:
        """PARSE's settings: prefixes of one length. After a rejection the target decodes to the
        end where one draft is an answer, and drafting resumes where it is not."""
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
        """Memory of a PARSE server: both models' weights and KV."""
        shapes = (self.target, self.draft)
        weights = sum(shape.all_bytes(self.item_bytes) for shape in shapes)
        kv = self.kv_slots * sum(shape.kv_per_token for shape in shapes)
        return OVERHEAD * (weights + self.item_bytes * kv)

    @property
    def max_new_tokens(self) -> int:
        return 1 + self.output_len

    @property
    def kv_slots(self) -> int:
        """Slots for one verify pass of all requests, 64 per request for partly filled pages."""
        questions = self.prefixes * self.question_len
        return self.concurrencies[-1] * (self.input_len + 1 + self.max_new_tokens + 64 + questions)

    @cached_property
    def question_len(self) -> int:
        """Tokens of a question. Raises: BenchError, without a tokenizer."""
        folder = tokenizer_folder()
        from transformers import AutoTokenizer

        from sglang_parse.core.question import QuestionWording, render_question

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return render_question(tokenizer, QuestionWording.read(str(QUESTION))).max_len

    def layout(self) -> RequestLayout:
        """One request's rows of a verify pass: the last token, the draft, the questions."""
        length = self.draft_len // self.prefixes
        return RequestLayout(
            prefix_len=self.input_len,
            num_draft_rows=1 + self.draft_len,
            visible_lens=tuple(1 + length * k for k in range(1, self.prefixes + 1)),
            question_lens=(self.question_len,) * self.prefixes,
        )

    # -- servers ----------------------------------------------------------------

    @property
    def cost_server(self) -> str:
        """Name of the server that measures the stage costs: it always drafts."""
        return ALWAYS if self.drafting == "auto" else server_at(self.fractions[-1])

    @property
    def plain_names(self) -> tuple[str, ...]:
        """Names of the plain target's servers, one per baseline."""
        return tuple(
            PLAIN if backend == self.attention_backend else f"{PLAIN}-{backend}"
            for backend in self.baselines
        )

    def specs(self) -> list[ServerSpec]:
        """Returns all servers: the plain target on each baseline's backend, the draft alone, PARSE
        that always drafts, PARSE at every simulated acceptance."""
        folder = self.output / "models"
        target, draft = (str(shape.write_model(folder)) for shape in (self.target, self.draft))
        config, compiled = self.parse_config(), () if self.device == "cpu" else COMPILED
        flags = parse_settings(
            draft_tokens=config.draft_tokens,
            max_prefixes=config.max_prefixes,
            segment=config.segment,
            on_reject=config.on_reject,
        )
        models = Models(target, draft, question=config.question, common=self._common())

        def spec(models: Models, kind: str, name: str, simulate: str = "") -> ServerSpec:
            environment = (*(((SIMULATE, simulate),) if simulate else ()), *compiled)
            (found,) = server_specs(models, (kind,))
            return replace(found, name=name, environment=environment)

        specs = [
            spec(replace(models, common=self._common(backend)), PLAIN, name)
            for name, backend in zip(self.plain_names, self.baselines, strict=True)
        ]
        specs.append(spec(models, DRAFT, DRAFT))
        simulated = [(server_at(fraction), self.drafting, fraction) for fraction in self.fractions]
        if self.cost_server == ALWAYS:
            simulated.insert(0, (ALWAYS, "always", 1.0))
        for name, drafting, fraction in simulated:
            parse_flags = (*flags, *parse_settings(drafting=drafting), *self.parse_flags)
            parse = replace(models, parse_flags=parse_flags)
            specs.append(spec(parse, PARSE, name, f"{fraction:g}"))
        return specs

    def _common(self, backend: str = "") -> tuple[str, ...]:
        """SGLang's flags for every server; ``backend`` instead of PARSE's."""
        # Else SGLang captures graphs of batch sizes that never occur: minutes per server.
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
    """Returns the name of the PARSE server with this simulated acceptance."""
    return f"parse-{fraction:g}"


add_arguments = LimitSettings.add_arguments
