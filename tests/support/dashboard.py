"""The queries of the Grafana dashboard in examples/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = json.loads(
    (Path(__file__).resolve().parents[2] / "examples/grafana/dashboard.json").read_text("utf-8")
)
SELECTOR = re.compile(
    r"(?:(?P<function>\w+)\()?(?P<series>sglang:\w+)\{(?P<matchers>[^}]*)\}(?:\[(?P<range>[^]]*)\])?"
)
OF_PROMETHEUS = {"instance", "le"}
"""Labels that do not come from the server, or only from a histogram."""


@dataclass(frozen=True)
class Selector:
    """A series of a query.

    Attributes:
        function: the function directly around it; None for none.
        labels: those that the query selects, groups or names its result by.
    """

    panel: dict[str, Any]
    target: dict[str, Any]
    series: str
    function: str | None
    matchers: str
    range: str | None

    @property
    def labels(self) -> set[str]:
        grouped = re.findall(r" by \(([^)]*)\)", self.target["expr"])
        found = {name for names in grouped for name in names.split(", ")}
        found |= set(re.findall(r"\{\{(\w+)\}\}", self.target.get("legendFormat", "")))
        return (found | set(re.findall(r"(\w+)=", self.matchers))) - OF_PROMETHEUS

    @property
    def metric(self) -> str:
        return self.series.removesuffix("_bucket")


def selectors() -> Iterator[Selector]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            found = list(SELECTOR.finditer(target["expr"]))
            assert len(found) == target["expr"].count("sglang:") > 0, target["expr"]
            for match in found:
                yield Selector(panel, target, **match.groupdict())
