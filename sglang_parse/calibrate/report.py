"""``calibration.json``: the certificate a server reads, and what it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sglang_parse.calibrate.figures import Calibration
from sglang_parse.calibrate.losses import FirstDraft
from sglang_parse.calibrate.settings import CalibrateSettings
from sglang_parse.client.conditions import date, machine, versions
from sglang_parse.client.records import Assignment
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.targets import command_of
from sglang_parse.core.certificate import Certificate, Fingerprint, spread_out

PROMISE = (
    "With confidence {confidence:g}, over the draws of the calibration set: of the first drafts of "
    "requests exchangeable with these, a share of at most {alpha:g} {what}, at this threshold "
    "and at every stricter one. It says nothing of later rounds of an answer (the served check "
    "bounds whole answers), of other data, other models or other questions."
)
WHAT = {
    "token": "keeps its first wrong token",
    "answer": "is kept whole with a wrong answer",
}
KEYS = {
    "promise": "the certificate in words",
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("date", "minutes", "machine", "versions", "server")),
        "when, where, with what",
    ),
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("max_tokens", "pilot", "served", "concurrency")),
        "what was asked for",
    ),
}
"""Keys of ``content`` beside the certificate's own -> meaning."""


def certificate_of(
    figures: Calibration,
    drafts: Sequence[FirstDraft],
    fingerprint: Fingerprint,
    data_set: str,
) -> Certificate:
    """What a server reads. ``drafts``: the calibration set's."""
    own = figures.own
    return Certificate(
        threshold=own.certified,
        alpha=figures.alpha,
        delta=figures.delta,
        loss=figures.loss,
        requests=figures.requests,
        errors=own.errors,
        data_set=data_set,
        sampling="greedy",
        fingerprint=fingerprint,
        first_verdicts=spread_out([min(draft.verdicts) for draft in drafts if draft.verdicts]),
    )


def content(
    figures: Calibration, certificate: Certificate, facts: dict[str, Any]
) -> dict[str, Any]:
    """Plain data."""
    return {
        **certificate.model_dump(),
        "promise": promise(figures),
        "conditions": facts,
        "results": figures.as_json(),
    }


def data_set_of(task: Assignment, count: int) -> str:
    """A task's first problems, with a digest of their texts."""
    texts = "\n".join(item.text for item in task.items[:count])
    digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
    return f"{task.title} ({count} problems, {digest})"


def promise(figures: Calibration) -> str:
    """What is promised, or that nothing is."""
    if figures.own.certified is None:
        return "No threshold qualifies: nothing is promised."
    what = WHAT[figures.loss]
    return PROMISE.format(confidence=1 - figures.delta, alpha=figures.alpha, what=what)


def conditions(
    settings: CalibrateSettings,
    specs: Sequence[ServerSpec],
    task: Assignment,
    seconds: float,
) -> dict[str, Any]:
    """What a reader of the figures must know."""
    servers = [command_of(spec) for spec in specs]
    if settings.remote:
        servers = [settings.remote.url]
    return {
        "date": date(),
        "minutes": round(seconds / 60, 1),
        "machine": machine(),
        "versions": versions(("mapie", "scipy")),
        "server": servers[0],
        "max_tokens": task.max_tokens,
        "pilot": settings.pilot,
        "served": settings.served,
        "concurrency": settings.concurrency,
    }
