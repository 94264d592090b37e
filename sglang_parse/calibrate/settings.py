"""The command line of ``sglang-parse calibrate``."""

from __future__ import annotations

import shlex
from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sglang_parse.calibrate.first_draft import LOSSES, Loss
from sglang_parse.client.demo_pair import check_there, short_path
from sglang_parse.client.flags import Flags, at_least, fraction, numbers, option, split_words
from sglang_parse.client.records import PARSE, BenchError
from sglang_parse.client.servers import COMMON_FLAGS, MODEL_NAME, Remote
from sglang_parse.client.targets import Models

_models = partial(option, group="models and server")
_guarantee = partial(option, group="guarantee")
_load = partial(option, group="load")
_task = partial(option, group="task")


def _level(text: str) -> float:
    value = fraction(text)
    if value in (0, 1):
        raise ArgumentTypeError(f"{text} is no level; use a number between 0 and 1")
    return value


def _remote(url: str) -> Remote | None:
    if url and not url.startswith(("http://", "https://")):
        raise BenchError(f"--url is {url!r}; use http://host:port")
    return Remote(PARSE, url.rstrip("/").removesuffix("/v1")) if url else None


@dataclass(frozen=True)
class CalibrateSettings(Flags):
    """Settings of a calibration, fixed before it starts; each is the flag of its name."""

    target: str = _models(partial(short_path, "target"), "path or name")
    draft: str = _models(partial(short_path, "draft"), "path or name")
    question: str = _models(partial(short_path, "question.json"), "'' for the built-in one")
    tokenizer: str = _models(None, "decodes drafts (default: the target's)")
    model_name: str = _models(MODEL_NAME, "served model name (default %(default)s)")
    flags: tuple[str, ...] = _models(shlex.join(COMMON_FLAGS), "of SGLang", read=split_words)
    parse_flags: tuple[str, ...] = _models("", "of PARSE, as in use", read=split_words)
    remote: Remote | None = _models(
        "", "a running server with --parse-drafting always", name="--url", read=_remote
    )
    alpha: float = _guarantee(0.01, "bound of the error rate (default %(default)s)", type=_level)
    delta: float = _guarantee(
        0.05, "probability that the bound does not hold (default %(default)s)", type=_level
    )
    requests: int = _guarantee(
        2000, "size of the calibration set (default %(default)s)", type=at_least(1)
    )
    pilot: int = _guarantee(200, "requests that place the thresholds", type=at_least(1))
    served: int = _guarantee(300, "further requests, answered whole; 0: none", type=at_least(0))
    grid: int = _guarantee(40, "number of thresholds to test", type=at_least(2))
    loss: Loss | None = _guarantee(
        None,
        "token: the first wrong token is accepted; answer: a wrong answer is accepted whole "
        "(default: token where the task can locate an error)",
        choices=LOSSES,
    )
    thresholds: tuple[float, ...] = _guarantee(
        (), "thresholds to serve, certified or not: 0.5,0.9", type=numbers(fraction)
    )
    concurrency: int = _load(16, "requests at a time (default %(default)s)", type=at_least(1))
    output: Path = _load(
        Path("build/calibrate"), "folder of calibration.json, report.html and logs", type=Path
    )
    task_file: Path | None = _task(
        None, "JSONL file of prompts (default: the demo pair's problems)", type=Path
    )
    grader: str = _task("", "command that grades the answers to --task-file; see the docs")
    max_tokens: int | None = _task(None, "per answer (default: the task's)", type=at_least(1))

    @classmethod
    def read(cls, arguments: Namespace) -> CalibrateSettings:
        """Raises: BenchError, when settings do not fit together."""
        settings = super().read(arguments)
        if settings.remote is None:
            names = ("target", "draft", "question")
            check_there({f"--{name}": getattr(settings, name) for name in names})
            settings.models.check_local()
        model = settings.remote.model_path() if settings.remote else settings.target
        if not (settings.tokenizer or model):
            raise BenchError("the server does not report its model; fix: give --tokenizer")
        return replace(settings, tokenizer=settings.tokenizer or model)

    @property
    def models(self) -> Models:
        """The pair to serve; it always drafts, at any gain."""
        return Models(
            target=self.target,
            draft=self.draft,
            question=self.question or None,
            common=self.flags,
            parse_flags=(*self.parse_flags, "--parse-drafting", "always"),
        )

    @property
    def levels(self) -> tuple[float, float]:
        return self.alpha, self.delta

    @property
    def total(self) -> int:
        """Number of problems: the three sets are disjoint."""
        return self.pilot + self.requests + self.served


add_arguments = CalibrateSettings.add_arguments
