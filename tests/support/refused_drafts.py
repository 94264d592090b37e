"""A server whose judge refuses what its target would have written: three commands say so."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sglang_parse import cli
from sglang_parse.core.config import ENV_VAR
from support.client import Client

CAUSE = "the question does not work for this model"
REFUSED = f"the target would have written what the judge refuses, so {CAUSE}"
MINUTES = 10


def assert_the_cause_is_named(
    client: Client, folder: Path, capsys: pytest.CaptureFixture[str], *prompts: str
) -> None:
    """Runs the commands of docs/troubleshooting.md, "All drafts rejected", as a user would.

    Args:
        prompts: flags that choose the prompts of doctor and explain.
    """
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "end_on_sigterm", lambda: None)
        patch.setenv(ENV_VAR, "")  # where the doctor reads flags to, as a launcher does
        assert cli.main(["doctor", "--url", client.url, "--json", *prompts]) == 0
        found = {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
        explain = ["explain", "--url", client.url, "--output", str(folder), *prompts]
        assert cli.main(explain) == 0
    said = capsys.readouterr().out

    log = Path(client.probe.folder).with_suffix(".log").read_text(errors="replace")
    assert log.count(f"PARSE: {CAUSE}") == 1

    line = found["matched prefixes"]
    assert (line["status"], line["found"].partition(": ")[2]) == ("warning", REFUSED)
    assert "another --parse-question" in line["fix"]
    assert "a better draft model" not in json.dumps(found)  # the draft is the target's own text
    if found["acceptance"]["status"] == "warning":
        assert found["acceptance"]["fix"] == line["fix"]

    assert f"of them: {CAUSE}" in said
    page = (folder / "explain.html").read_text(encoding="utf-8")
    marked = "The target itself would have written this prefix; the verdict refused it."
    assert marked in page
    assert "(the target's own)" in said
    assert time.monotonic() - started < 60 * MINUTES
