"""What the command line of ``sglang-parse calibrate`` can ask for."""

from __future__ import annotations

import shlex
from argparse import ArgumentTypeError, Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sglang_parse.calibrate.losses import LOSSES, Loss
from sglang_parse.client.demo_pair import check_there, short_path
from sglang_parse.client.flags import Flags, at_least, numbers, option, share, split_words
from sglang_parse.client.records import PARSE, BenchError
from sglang_parse.client.servers import COMMON_FLAGS, MODEL_NAME, Remote
from sglang_parse.client.targets import Models
from sglang_parse.tasks import DEMO_TASK, Options, task_names

_models = partial(option, group="models and server")
_promise = partial(option, group="promise")
_load = partial(option, group="load")
_task = partial(option, group="task")


def _level(text: str) -> float:
    value = share(text)
    if value in (0, 1):
        raise ArgumentTypeError(f"{text} is no level; use a number between 0 and 1")
    return value


def _remote(url: str) -> Remote | None:
    if url and not url.startswith(("http://", "https://")):
        raise BenchError(f"--url is {url!r}; use http://host:port")
    return Remote(PARSE, url.rstrip("/").removesuffix("/v1")) if url else None


@dataclass(frozen=True)
class CalibrateSettings(Flags):
    """What was asked for, fixed before anything is.

    Attributes:
        requests: the calibration set; ``pilot`` more come before it and ``served`` behind it.
        thresholds: that are served too, certified or not.
        output: folder for calibration.json, report.html, what was asked, and the logs.
    """

    target: str = _models(partial(short_path, "target"), "path or name")
    draft: str = _models(partial(short_path, "draft"), "path or name")
    question: str = _models(partial(short_path, "question.json"), "'' for the built-in")
    tokenizer: str = _models(None, "to read drafts with (default: the target's)")
    model_name: str = _models(MODEL_NAME, "as it is served (default %(default)s)")
    flags: tuple[str, ...] = _models(shlex.join(COMMON_FLAGS), "of SGLang", read=split_words)
    parse_flags: tuple[str, ...] = _models("", "of PARSE, as in use", read=split_words)
    remote: Remote | None = _models(
        "", "a running server; one with --parse-drafting always", name="--url", read=_remote
    )
    alpha: float = _promise(0.01, "loss to stay below (default %(default)s)", type=_level)
    delta: float = _promise(0.05, "chance to be wrong (default %(default)s)", type=_level)
    requests: int = _promise(2000, "calibration set (default %(default)s)", type=at_least(1))
    pilot: int = _promise(200, "before it, to choose thresholds to test", type=at_least(1))
    served: int = _promise(300, "behind it, answered whole; 0 for none", type=at_least(0))
    grid: int = _promise(40, "thresholds to test", type=at_least(2))
    loss: Loss | None = _promise(
        None,
        "token: the first wrong token is kept; answer: a wrong answer is kept whole (default: "
        "token where the task says where a text goes wrong)",
        choices=LOSSES,
    )
    thresholds: tuple[float, ...] = _promise(
        (), "served too, certified or not: a list such as 0.5,0.9", type=numbers(share)
    )
    concurrency: int = _load(16, "requests at a time (default %(default)s)", type=at_least(1))
    output: Path = _load(Path("build/calibrate"), "folder", type=Path)
    task: str = _task(DEMO_TASK, ", ".join((DEMO_TASK, *task_names())))
    task_file: Path | None = _task(None, "the task's problems; nothing is downloaded", type=Path)
    grader: str = _task("", "command that grades, for --task prompts; see the documents")
    max_tokens: int | None = _task(None, "per answer (default: the task's)", type=at_least(1))
    allow_code: bool = _task(
        False, "run programs a model wrote, on this machine", action="store_true"
    )

    @classmethod
    def read(cls, arguments: Namespace) -> CalibrateSettings:
        """Raises: BenchError, when settings do not fit together."""
        settings = super().read(arguments)
        if settings.remote is None:
            names = ("target", "draft", "question")
            check_there({f"--{name}": getattr(settings, name) for name in names})
            settings.models.check_local()
        return replace(settings, tokenizer=settings.tokenizer or settings._served_model())

    def _served_model(self) -> str:
        path = self.target if self.remote is None else self.remote.model_path()
        if not path:
            raise BenchError("the server does not say its model; fix: give --tokenizer")
        return path

    @property
    def models(self) -> Models:
        """What is served here: whatever drafting brings, drafts are what is asked for."""
        always = ("--parse-drafting", "always")
        return Models(
            target=self.target,
            draft=self.draft,
            question=self.question or None,
            common=self.flags,
            parse_flags=(*self.parse_flags, *always),
        )

    @property
    def options(self) -> Options:
        """What graders may need."""
        return Options(allow_code=self.allow_code, grader=self.grader)

    @property
    def total(self) -> int:
        """Problems in all: the three sets share none."""
        return self.pilot + self.requests + self.served


add_arguments = CalibrateSettings.add_arguments
