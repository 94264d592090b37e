"""Flags of programs that measure a server's first drafts of graded problems."""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from sglang_parse.client.demo_pair import check_there, short_path
from sglang_parse.client.flags import Flags, at_least, option, split_words
from sglang_parse.client.records import PARSE, BenchError
from sglang_parse.client.servers import COMMON_FLAGS, MODEL_NAME, Remote, ServerSpec
from sglang_parse.client.targets import Models, server_specs

_models = partial(option, group="models and server")
_task = partial(option, group="task")
_load = partial(option, group="load")


def _remote(url: str) -> Remote | None:
    if url and not url.startswith(("http://", "https://")):
        raise BenchError(f"--url is {url!r}; use http://host:port")
    return Remote(PARSE, url.rstrip("/").removesuffix("/v1")) if url else None


@dataclass(frozen=True)
class GradedSettings(Flags):
    """The server, the problems and the output folder; each field is the flag of its name."""

    target: str = _models(partial(short_path, "target"), "path or name")
    draft: str = _models(partial(short_path, "draft"), "path or name")
    question: str = _models(partial(short_path, "question.json"), "'' for the built-in one")
    tokenizer: str = _models(None, "decodes drafts (default: the target's)")
    model_name: str = _models(MODEL_NAME, "served model name (default %(default)s)")
    flags: tuple[str, ...] = _models(shlex.join(COMMON_FLAGS), "of SGLang", read=split_words)
    parse_flags: tuple[str, ...] = _models("", "of PARSE, as in use", read=split_words)
    remote: Remote | None = _models("", "a running server", name="--url", read=_remote)
    task_file: Path | None = _task(
        None, "JSONL file of prompts (default: the demo pair's problems)", type=Path
    )
    grader: str = _task("", "command that grades the answers to --task-file; see the docs")
    max_tokens: int | None = _task(None, "per answer (default: the task's)", type=at_least(1))
    concurrency: int = _load(16, "requests at a time (default %(default)s)", type=at_least(1))
    output: Path = _load(Path("build/calibrate"), "folder of results, page and logs", type=Path)

    @classmethod
    def read(cls, arguments: Namespace) -> Self:
        """Raises: BenchError, when settings do not fit together."""
        settings = super().read(arguments)
        model = settings.target
        if settings.remote is not None:
            model = settings.remote.model_path()
        else:
            names = ("target", "draft", "question")
            check_there({f"--{name}": getattr(settings, name) for name in names})
            settings.server_specs()
        if not (settings.tokenizer or model):
            raise BenchError("the server does not report its model; fix: give --tokenizer")
        return replace(settings, tokenizer=settings.tokenizer or model)

    def server_specs(self) -> list[ServerSpec]:
        """The server to start; none where ``--url`` names one. Raises: BenchError, as ``read``."""
        if self.remote:
            return []
        models = Models(
            *(self.target, self.draft),
            question=self.question or None,
            common=self.flags,
            parse_flags=self.parse_flags,
        )
        models.check_local()
        return server_specs(models, (PARSE,))
