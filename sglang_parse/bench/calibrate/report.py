"""``calibration.json``: the certificate a server reads, and what it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from sglang_parse.bench.calibrate.figures import Calibration
from sglang_parse.bench.calibrate.losses import FirstDraft
from sglang_parse.bench.calibrate.settings import CalibrateSettings
from sglang_parse.bench.harness.conditions import date, machine, versions
from sglang_parse.bench.harness.lineup import command_of
from sglang_parse.bench.harness.match import Assignment
from sglang_parse.bench.harness.servers import ServerSpec
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
    "conditions": "what was asked, when, where, of what, and how it was split",
    "results": "what the page shows",
}
"""Keys of ``content`` beside the certificate's own -> meaning."""


def content(
    figures: Calibration,
    drafts: Sequence[FirstDraft],
    fingerprint: Fingerprint,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Plain data."""
    own = figures.own
    certificate = Certificate(
        threshold=own.certified,
        alpha=figures.alpha,
        delta=figures.delta,
        loss=figures.loss,
        requests=figures.requests,
        errors=own.errors,
        data_set=facts["data_set"],
        sampling="greedy",
        fingerprint=fingerprint,
        first_verdicts=spread_out([min(draft.verdicts) for draft in drafts if draft.verdicts]),
    )
    return {
        **certificate.model_dump(),
        "promise": promise(figures),
        "conditions": facts,
        "results": figures.as_json(),
    }


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
    fingerprint: Fingerprint,
    seconds: float,
) -> dict[str, Any]:
    """What a reader of the figures must know."""
    texts = "\n".join(item.text for item in task.items[: settings.total])
    digest = hashlib.sha256(texts.encode()).hexdigest()[:16]
    servers = [command_of(spec) for spec in specs]
    if settings.remote:
        servers = [settings.remote.url]
    return {
        "date": date(),
        "minutes": round(seconds / 60, 1),
        "machine": machine(),
        "versions": versions(("mapie", "scipy")),
        "server": servers[0],
        "data_set": f"{task.title} ({settings.total} problems, {digest})",
        "max_tokens": task.max_tokens,
        "pilot": settings.pilot,
        "served": settings.served,
        "concurrency": settings.concurrency,
        "fingerprint": fingerprint.model_dump(),
    }
