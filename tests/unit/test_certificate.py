"""Serving with a certificate: reading it, differences, drift of the verdicts."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from sglang_parse.core.certificate import NUM_QUANTILES, spread_out
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.setting import ConfigError
from support.calibration import CERTIFICATE, FINGERPRINT, write_certificate

pytestmark = pytest.mark.unit


def test_a_server_serves_with_the_file(tmp_path: Path):
    config = ParseConfig(threshold=str(write_certificate(tmp_path)))
    assert config.certificate == CERTIFICATE
    assert config.accept_threshold == 0.9
    assert RequestOptions.read(None, config).threshold == 0.9
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
        ({"threshold": float("nan")}, "wrong threshold"),
        ({"alpha": "much"}, "wrong alpha"),
        ({"fingerprint": {}}, "wrong fingerprint.target"),
    ],
)
def test_an_invalid_certificate_is_refused(tmp_path: Path, changes: dict, message: str):
    path = str(write_certificate(tmp_path, **changes))
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
    other = FINGERPRINT.model_copy(update={"draft": "cc", "selection": "answer-first"})
    assert FINGERPRINT.differences(other) == {
        "draft": (FINGERPRINT.draft, "cc"),
        "selection": ("first-reject", "answer-first"),
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
    drifted = [watch.add([1.0, numbers.betavariate(8, 2)]) for _ in range(20 * WINDOW)]
    assert not any(drifted)
    assert 0 < watch.distance < 0.15


def test_other_verdicts_drift(certified: list[float], caplog: pytest.LogCaptureFixture):
    from sglang_parse.telemetry.drift import WINDOW, DriftWatch

    watch, numbers = DriftWatch(certified), random.Random(6)
    with caplog.at_level(logging.WARNING):
        drifted = [watch.add([0.99, numbers.betavariate(6, 3)]) for _ in range(WINDOW)]
    assert drifted == [False] * (WINDOW - 1) + [True]
    assert watch.distance > 0.2
    assert "are not those of the certificate" in caplog.text
    assert not watch.add([])  # token mode has no verdicts
