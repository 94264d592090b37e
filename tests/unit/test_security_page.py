"""SECURITY.md names the test of each promise."""

import re
from pathlib import Path

import pytest

from sglang_parse.core.options import RequestOptions
from sglang_parse.core.setting import settings_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
PROMISES = [line.split("|")[1:3] for line in PAGE.splitlines() if "::" in line]


@pytest.mark.parametrize(("promise", "tests"), PROMISES, ids=[row[0] for row in PROMISES])
def test_each_promise_has_tests(promise: str, tests: str):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("::") > 0, promise
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)


def test_every_row_is_a_promise_with_tests():
    table = PAGE.partition("| promise | tests |")[2].partition("\n\n")[0]
    assert len(PROMISES) == len(table.strip().splitlines()) - 1  # its line of dashes


def test_every_request_option_is_in_the_table():
    table = PAGE.partition("| option |")[2].partition("\n\n")[0]
    for option in settings_of(RequestOptions):
        assert f"`{option.name}" in table
