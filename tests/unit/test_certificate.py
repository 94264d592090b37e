"""Serving with a certificate: reading it, differences, drift of the verdicts."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest

from sglang_parse.core.certificate import (
    NUM_QUANTILES,
    Certificate,
    Fingerprint,
    spread_out,
)
from sglang_parse.core.config import ConfigError, ParseConfig, RequestOptions

pytestmark = pytest.mark.unit

FINGERPRINT = Fingerprint(
    target="aa",
    draft="bb",
    question={"partial": [1, 2], "complete": [1, 3], "verdicts": [8, 9]},
    segment="line",
    draft_tokens=128,
    max_prefixes=16,
    selection="first-reject",
    dtype="torch.float32",
)
CERTIFICATE = Certificate(
    threshold=0.9985,
    alpha=0.01,
    delta=0.05,
    loss="token",
    requests=2000,
    errors=9,
    data_set="problems",
    sampling="greedy",
    fingerprint=FINGERPRINT,
    first_verdicts=[0.1, 0.9],
)


def write(folder: Path, **changes: object) -> str:
    path = folder / "calibration.json"
    content = CERTIFICATE.model_dump() | {"guarantee": "in words", "results": {}} | changes
    path.write_text(json.dumps(content))
    return str(path)


def test_a_server_serves_with_the_file(tmp_path: Path):
    config = ParseConfig(threshold=write(tmp_path))
    assert config.certificate == CERTIFICATE
    assert config.accept_threshold == 0.9985
    assert RequestOptions.read(None, config).threshold == 0.9985
    assert RequestOptions.read({"parse": {"threshold": 0.1}}, config).threshold == 0.1
    environ: dict[str, str] = {}
    config.to_env(environ)
    assert ParseConfig.from_env(environ).certificate == CERTIFICATE


def test_a_number_is_no_certificate():
    config = ParseConfig(threshold=0.7)
    assert (config.certificate, config.accept_threshold) == (None, 0.7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": None}, "certifies nothing: no threshold bounds the error rate by 0.01"),
        ({"alpha": "much"}, "wrong alpha"),
        ({"fingerprint": {}}, "wrong fingerprint.target"),
    ],
)
def test_an_invalid_certificate_is_refused(tmp_path: Path, changes: dict, message: str):
    path = write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"--parse-threshold is .*{message}.*use a number from 0"):
        ParseConfig(threshold=path)


@pytest.mark.parametrize("text", ["", "[]", "no JSON", "\xff"])
def test_other_files_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="other.json.* is not a JSON object"):
        ParseConfig(threshold=str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        ParseConfig(threshold=str(tmp_path / "missing.json"))


def test_differences_of_fingerprints():
    other = FINGERPRINT.model_copy(update={"draft": "cc", "selection": "longest"})
    assert FINGERPRINT.differences(other) == {
        "draft": ("bb", "cc"),
        "selection": ("first-reject", "longest"),
    }
    assert FINGERPRINT.differences(FINGERPRINT) == {}


def test_evenly_spaced_order_statistics():
    numbers = random.Random(1)
    values = [numbers.random() for _ in range(5000)]
    found = spread_out(values)
    assert len(found) == NUM_QUANTILES
    assert (found[0], found[256], found[-1]) == (min(values), sorted(values)[2500], max(values))
    assert spread_out([3.0, 1.0]) == [1.0, 3.0]


# -- drift -------------------------------------------------------------------------------


@pytest.fixture
def certified() -> list[float]:
    numbers = random.Random(5)
    return spread_out([numbers.betavariate(8, 2) for _ in range(4000)])


def test_verdicts_like_the_certificates_do_not_drift(certified: list[float]):
    from sglang_parse.telemetry.drift import WINDOW, DriftWatch

    watch, numbers = DriftWatch(certified), random.Random(6)
    assert watch.distance is None
    drifted = [watch.observe([1.0, numbers.betavariate(8, 2)]) for _ in range(20 * WINDOW)]
    assert not any(drifted)
    assert 0 < watch.distance < 0.15


def test_other_verdicts_drift(certified: list[float], caplog: pytest.LogCaptureFixture):
    from sglang_parse.telemetry.drift import WINDOW, DriftWatch

    watch, numbers = DriftWatch(certified), random.Random(6)
    with caplog.at_level(logging.WARNING):
        drifted = [watch.observe([0.99, numbers.betavariate(6, 3)]) for _ in range(WINDOW)]
    assert drifted == [False] * (WINDOW - 1) + [True]
    assert watch.distance > 0.2
    assert "are not those of the certificate" in caplog.text
    assert not watch.observe([])  # token mode has no verdicts
