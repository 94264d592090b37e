"""The command line of ``sglang-parse train-judge``."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Self, get_args

from sglang_parse.client.flags import at_least, numbers, option
from sglang_parse.client.records import Assignment, BenchError
from sglang_parse.client.targets import Models, parse_settings
from sglang_parse.core.judge import MAX_LAYERS
from sglang_parse.tasks.settings import FIXED_LENGTH, GradedSettings, load

MAX_PREFIXES = 64
"""Of the server that is started: nearly every segment end gets a label."""
Labels = Literal["grader", "answers"]
Drafts = Literal["first", "all"]
_labels = partial(option, group="labels")
_head = partial(option, group="verdict head")


@dataclass(frozen=True)
class TrainJudgeSettings(GradedSettings):
    """Settings of a training."""

    output: Path = load(Path("build/judge"), "folder of the head, the page and logs", type=Path)
    data: Path | None = _labels(
        None, "JSONL file of labeled drafts, in place of --task-file; see the docs", type=Path
    )
    labels: Labels = _labels(
        "grader",
        "grader: what the grader, or --data, says about prefixes; answers: what it says about "
        "complete drafts only",
        choices=get_args(Labels),
    )
    requests: int = _labels(
        1000, "problems, one first draft each; not with --data", type=at_least(1)
    )
    drafts: Drafts = _labels(
        "all",
        "all: the head is served, and the drafts that follow the first ones in whole answers train "
        "it again, too; first: first drafts alone",
        choices=get_args(Drafts),
    )
    layers: tuple[int, ...] = _head(
        (),
        "layers to read, such as 8,12,14; the best or all of them are used (default: half, "
        "three quarters, and the last but one)",
        type=numbers(at_least(0)),
    )
    max_rows: int = _head(32, "most tokens of a draft to train on; bounds memory", type=at_least(1))

    @classmethod
    def read(cls, arguments: Namespace) -> Self:
        settings = super().read(arguments)
        if settings.data and settings.task_file:
            raise BenchError("--data has labels already; fix: leave out --task-file, or --data")
        if len(settings.layers) > MAX_LAYERS:
            raise BenchError(f"--layers names {len(settings.layers)}; use at most {MAX_LAYERS}")
        if settings.layers or settings.remote:
            return settings
        return replace(settings, layers=default_layers(settings.target))

    @property
    def models(self) -> Models:
        """The models, whose server sends hidden states; ``--parse-flags`` come last."""
        layers = ",".join(map(str, self.layers))
        own = parse_settings(hidden_layers=layers, max_prefixes=MAX_PREFIXES, segment="line")
        return replace(self, parse_flags=(*own, *FIXED_LENGTH, *self.parse_flags))

    def why_first_drafts_alone(self, task: Assignment) -> str:
        """Why no later drafts train the head; empty if they do."""
        if self.drafts == "first":
            return "--drafts first"
        if self.data:
            return "--data has no answers"
        if task.locate is None:
            return "errors of later drafts are not located"
        if self.remote:
            return "the server of --url was not started here, and cannot be started with the head"
        return ""

    def with_judge(self, segment: str | None) -> Self:
        """The settings of a server with the head in ``output``; ``segment``: the head's, if it is
        another than that of the drafts that trained it."""
        own = parse_settings(segment=segment) if segment else ()
        flags = (*own, *self.parse_flags, *parse_settings(judge=self.output))
        return replace(self, question="", parse_flags=flags)


def default_layers(target: str) -> tuple[int, ...]:
    """About half and three quarters of a model's layers, and the last one that SGLang captures."""
    from transformers import AutoConfig  # slow to import, and every --help reads these flags

    try:
        count = AutoConfig.from_pretrained(target).get_text_config().num_hidden_layers
    except (OSError, ValueError, AttributeError) as error:
        raise BenchError(f"--target {target!r} names no layers ({error}); fix: --layers") from error
    if count < 2:
        raise BenchError(f"--target {target!r} has {count} layer; a verdict head needs 2 or more")
    last = count - 2
    return tuple(sorted({min(layer, last) for layer in (count // 2, 3 * count // 4, last)}))


add_arguments = TrainJudgeSettings.add_arguments
