"""The command line of ``sglang-parse calibrate``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from sglang_parse.client.demo_pair import judge_of
from sglang_parse.client.flags import at_least, fraction, numbers, option
from sglang_parse.client.targets import Models, parse_settings
from sglang_parse.core.certificate import Loss
from sglang_parse.core.judge import QUESTION
from sglang_parse.tasks.settings import FIXED_LENGTH, GradedSettings, model

_guarantee = partial(option, group="guarantee")


def _level(text: str) -> float:
    value = fraction(text)
    if value in (0, 1):
        raise ArgumentTypeError(f"{text} is no level; use a number between 0 and 1")
    return value


@dataclass(frozen=True)
class CalibrateSettings(GradedSettings):
    judge: str = model(
        "",
        "question, likelihood, or a verdict head's folder; with these two no question is asked "
        "(default: the demo pair's head for its target, else question)",
    )
    alpha: float = _guarantee(0.01, "bound of the error rate", type=_level)
    delta: float = _guarantee(0.05, "probability that the bound does not hold", type=_level)
    requests: int = _guarantee(2000, "size of the calibration set", type=at_least(1))
    pilot: int = _guarantee(200, "requests that place the thresholds", type=at_least(1))
    served: int = _guarantee(300, "further requests, answered whole; 0: none", type=at_least(0))
    grid: int = _guarantee(40, "number of thresholds to test", type=at_least(2))
    loss: Loss | None = _guarantee(
        None,
        "token: the first wrong token is accepted; answer: a wrong answer is accepted whole "
        "(default: token where the task can locate an error)",
        choices=get_args(Loss),
    )
    thresholds: tuple[float, ...] = _guarantee(
        (), "more thresholds to test and to answer with: 0.5,0.9", type=numbers(fraction)
    )

    @property
    def models(self) -> Models:
        judge = self.judge or judge_of(self.target) or QUESTION
        own = () if judge == QUESTION else parse_settings(judge=judge)
        flags = (*FIXED_LENGTH, *own, *self.parse_flags)
        return replace(self, judge="", question="" if own else self.question, parse_flags=flags)

    @property
    def levels(self) -> tuple[float, float]:
        return self.alpha, self.delta

    @property
    def total(self) -> int:
        """Number of problems: the three sets are disjoint."""
        return self.pilot + self.requests + self.served


add_arguments = CalibrateSettings.add_arguments
