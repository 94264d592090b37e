"""The command line of ``sglang-parse bench``, and its servers."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import demo_path
from sglang_parse.client.flags import (
    Flags,
    at_least,
    fraction,
    numbers,
    option,
    split_names,
    split_words,
)
from sglang_parse.client.records import DRAFT, PARSE, PLAIN, BenchError
from sglang_parse.client.servers import MODEL_NAME, ServerSpec
from sglang_parse.client.targets import Models, parse_settings, server_specs
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.setting import ConfigError
from sglang_parse.limit.shape import QUESTION, Shape, shape_names

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


@dataclass(frozen=True)
class LimitSettings(Flags):
    """Settings of the benchmark; each is the flag of its name.

    Attributes:
        output_len: tokens after the first one, which belongs to the prefill.
        prefixes: of every draft, all of the same length.
    """

    target: Shape = option(
        "qwen3_32b",
        f"{_NAMES}, or a folder (default %(default)s)",
        read=Shape.read,
    )
    draft: Shape = option("qwen3_1_7b", "likewise (default %(default)s)", read=Shape.read)
    device: str = option("cuda", "default %(default)s", choices=sorted(BACKENDS))
    attention_backend: str = option(None, f"default: {BACKENDS}")
    baselines: tuple[str, ...] = option(
        "",
        "attention backends of the plain target, the fastest counts (default: "
        "--attention-backend, and fa3 on a Hopper GPU that has it)",
        metavar="BACKEND,...",
        read=split_names,
    )
    dtype: str = option(None, f"default: {DTYPES}", choices=sorted(ITEM_BYTES))
    concurrencies: tuple[int, ...] = option(
        (1, 8, 64),
        "requests at a time (default 1,8,64)",
        name="--concurrency",
        metavar="CONCURRENCY",
        type=numbers(at_least(1)),
    )
    fractions: tuple[float, ...] = option(
        (0, 0.25, 0.5, 0.75, 1),
        "simulated accepted fractions of every draft (default 0,0.25,0.5,0.75,1)",
        name="--acceptance",
        metavar="ACCEPTANCE",
        type=numbers(fraction),
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
        "and decode steps run in the same iterations",
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
    output: Path = option(Path("build/bench-gpu"), "folder of the results and logs", type=Path)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> LimitSettings:
        """Raises: BenchError, when settings do not fit together, or with this machine."""
        found = super().read(arguments)
        backend = found.attention_backend or BACKENDS[found.device]
        # Where FlashAttention 3 runs, it is stock SGLang's fastest.
        fastest = ("fa3",) if found.device == "cuda" and backend != "fa3" and has_fa3() else ()
        settings = replace(
            found,
            attention_backend=backend,
            baselines=found.baselines or (backend, *fastest),
            dtype=found.dtype or DTYPES[found.device],
            draft_len=found.draft_len or found.output_len,
        )
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
            ParseConfig(**self.of_parse)
        except ConfigError as error:
            raise BenchError(f"--output-len or --prefixes: {error}") from error

    @property
    def has_rounds(self) -> bool:
        """Whether an answer takes several drafts."""
        return self.draft_len < self.output_len

    @property
    def of_parse(self) -> dict[str, Any]:
        """PARSE's settings: prefixes of one length. After a rejection the target decodes to the
        end where one draft is an answer, and drafting resumes where it is not."""
        return {
            "draft_tokens": self.draft_len,
            "max_prefixes": self.prefixes,
            "segment": f"tokens:{self.draft_len // self.prefixes}",
            "on_reject": "redraft" if self.has_rounds else "decode",
        }

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
    def bytes_needed(self) -> float:
        """Memory of a PARSE server: both models' weights and KV."""
        size, shapes = ITEM_BYTES[self.dtype], (self.target, self.draft)
        kv = size * self.kv_slots * sum(shape.kv_per_token for shape in shapes)
        return OVERHEAD * (kv + sum(shape.weights_bytes(size) for shape in shapes))

    @property
    def max_new_tokens(self) -> int:
        return 1 + self.output_len

    @property
    def kv_slots(self) -> int:
        """Slots for one verify pass of all requests, 64 per request for partly filled pages."""
        questions = self.num_rows - self.num_draft_rows
        return self.concurrencies[-1] * (self.input_len + 1 + self.max_new_tokens + 64 + questions)

    @cached_property
    def question_len(self) -> int:
        """Tokens of a question. Raises: BenchError, without a tokenizer."""
        from transformers import AutoTokenizer

        from sglang_parse.core.question import QuestionWording, render_question

        tokenizer = AutoTokenizer.from_pretrained(demo_path("target"))
        return render_question(tokenizer, QuestionWording.read(str(QUESTION))).max_len

    @property
    def num_draft_rows(self) -> int:
        """Rows of a request's verify pass for the last token and the draft."""
        return 1 + self.draft_len

    @property
    def num_rows(self) -> int:
        """All rows of it: these and the questions."""
        return self.num_draft_rows + self.prefixes * self.question_len

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
        that always drafts, PARSE at every simulated acceptance, the largest first."""
        folder = self.output / "models"
        target, draft = (str(shape.write_model(folder)) for shape in (self.target, self.draft))
        common = self._common(self.attention_backend)
        models = Models(target, draft, question=str(QUESTION), common=common)
        compiled = () if self.device == "cpu" else COMPILED

        def spec(name: str, kind: str, **changes: Any) -> ServerSpec:
            (found,) = server_specs(replace(models, **changes), (kind,))
            return replace(found, name=name, environment=(*found.environment, *compiled))

        def parse_spec(name: str, fraction: float, drafting: str) -> ServerSpec:
            flags = (*parse_settings(**self.of_parse, drafting=drafting), *self.parse_flags)
            return spec(name, server_at(fraction), parse_flags=flags)

        return [
            *(
                spec(name, PLAIN, common=self._common(backend))
                for name, backend in zip(self.plain_names, self.baselines, strict=True)
            ),
            spec(DRAFT, DRAFT),
            *([parse_spec(ALWAYS, 1, "always")] if self.cost_server == ALWAYS else ()),
            *(parse_spec(server_at(one), one, self.drafting) for one in self.fractions[::-1]),
        ]

    def _common(self, backend: str) -> tuple[str, ...]:
        """SGLang's flags for every server."""
        # Else SGLang captures graphs of batch sizes that never occur: minutes per server.
        graphs = ("--cuda-graph-max-bs-decode", str(self.concurrencies[-1]))
        return (
            *("--device", self.device, "--attention-backend", backend),
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
    return f"{PARSE}@{fraction:g}"


add_arguments = LimitSettings.add_arguments
