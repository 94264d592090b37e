"""Flags of programs that measure servers with graded problems."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from sglang_parse.client.conditions import of_now
from sglang_parse.client.demo_pair import short_path
from sglang_parse.client.flags import Flags, at_least, option, split_words
from sglang_parse.client.records import PARSE, BenchError
from sglang_parse.client.servers import COMMON_FLAGS, MODEL_NAME, Remote, ServerSpec
from sglang_parse.client.targets import Models, command_of, parse_settings, server_specs
from sglang_parse.core.config import ParseConfig

model = partial(option, group="models and servers")
task = partial(option, group="task")
load = partial(option, group="load")
FIXED_LENGTH = parse_settings(draft_tokens=ParseConfig().draft_tokens)
"""Flags: set, because the server shortens drafts that it expects no speedup from."""


@dataclass(frozen=True)
class TaskSettings(Models, Flags):
    """The models, how they are served, and the problems; each field is the flag of its name."""

    target: str = model(partial(short_path, "target"), "path or name")
    draft: str = model(partial(short_path, "draft"), "path or name")
    question: str = model(partial(short_path, "question.json"), "'' for the built-in one")
    tokenizer: str = model(None, "for token counts and texts (default: the target's)")
    model_name: str = model(MODEL_NAME, "as it is served")
    flags: tuple[str, ...] = model(
        shlex.join((*COMMON_FLAGS, "--enable-metrics")),
        "of SGLang, for every server",
        read=split_words,
    )
    parse_flags: tuple[str, ...] = model("", "more, for servers with PARSE", read=split_words)
    task_file: Path | None = task(
        None, "JSONL file of prompts (default: the demo pair's problems)", type=Path
    )
    grader: str = task("", "command that grades the answers to --task-file; see the docs")
    max_tokens: int | None = task(None, "per answer (default: the task's)", type=at_least(1))


@dataclass(frozen=True)
class GradedSettings(TaskSettings):
    """One server with PARSE, and the output folder."""

    remote: Remote | None = model(
        "",
        "a running server",
        name="--url",
        read=lambda url: Remote.read(PARSE, url) if url else None,
    )
    concurrency: int = load(16, "requests at a time", type=at_least(1))
    output: Path = load(Path("build/calibrate"), "folder of results, page and logs", type=Path)

    @classmethod
    def read(cls, arguments: Namespace) -> Self:
        settings = super().read(arguments)
        model = settings.target
        if settings.remote is not None:
            model = settings.remote.model_path()
        else:
            settings.server_specs()
        if not (settings.tokenizer or model):
            raise BenchError("the server does not report its model; fix: give --tokenizer")
        return replace(settings, tokenizer=settings.tokenizer or model)

    def conditions(self, package: str, seconds: float, names: Sequence[str]) -> dict[str, Any]:
        """Of a measurement: of this machine and the server, and some settings."""
        return {
            **of_now((package,)),
            "minutes": round(seconds / 60, 1),
            "server": self.remote.url if self.remote else command_of(*self.server_specs()),
            **{name: getattr(self, name) for name in names},
        }

    def server_specs(self) -> list[ServerSpec]:
        """The server to start; none where ``--url`` names one."""
        if self.remote:
            return []
        self.models.check_local()
        return server_specs(self.models, (PARSE,))

    @property
    def models(self) -> Models:
        """Of the server that is started."""
        return self
