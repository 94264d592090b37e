"""Every place where SGLang asks which algorithm speculates, and what PARSE does about it.

SGLang resolves, sizes and refuses for its own algorithms, by name or by kind; a plugin's gets none
of it, or what was meant for others. The record, tests/data/algorithm_places.json, names the
functions, in groups; code that PARSE never runs by file.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import sglang.srt

pytestmark = pytest.mark.compat
ROOT = Path(sglang.srt.__path__[0])
RECORD = Path(__file__).resolve().parents[1] / "data" / "algorithm_places.json"
NAMES = re.compile(r"speculative_algorithm|spec_algo(rithm)?|has_spec_dec")
KINDS = re.compile(
    r"is_(eagle3?|uno|dflash(_family)?|dspark|ngram|standalone|frozen_kv_mtp|some|speculative)"
    r"|supports_(mixed_chunk|target_verify_for_draft|prefill_shared_read_done|ragged_verify)"
    r"|supports_grammar_overlap|has_draft_kv|carries_draft_hidden_states|need_topk"
    r"|get_num_tokens_per_req_for_target_verify"
)
LENGTH = re.compile("kv_allocated_len")


class _Finder(ast.NodeVisitor):
    """Collects the functions and classes that use a name; "" is a module's own code."""

    def __init__(self, attributes: re.Pattern[str], names: re.Pattern[str] | None) -> None:
        self.attributes, self.names = attributes, names
        self._stack: list[str] = []
        self.found: set[str] = set()

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._stack.append(node.name)
        self.generic_visit(node)
        self._stack.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _enter  # noqa: N815 - ast's names

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802
        if self.attributes.fullmatch(node.attr):
            self.found.add(".".join(self._stack))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        if self.names and self.names.fullmatch(node.id):
            self.found.add(".".join(self._stack))


@cache
def _source(path: Path) -> str:
    return path.read_text()


def places(
    attributes: re.Pattern[str], names: re.Pattern[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (file, function) of the installed SGLang."""
    for path in sorted(ROOT.rglob("*.py")):
        source = _source(path)
        if not attributes.search(source):
            continue
        finder = _Finder(attributes, names)
        finder.visit(ast.parse(source))
        yield from ((path.relative_to(ROOT).as_posix(), name) for name in sorted(finder.found))


def test_every_place_is_recorded():
    """A place that is new or gone: read it, and change PARSE or the record."""
    groups = json.loads(RECORD.read_text())
    files = [pattern for group in groups for pattern in group.get("files", ())]
    recorded = {
        (file, name)
        for group in groups
        for file, names in group.get("places", {}).items()
        for name in names.split(" ")
    }
    either = re.compile(f"{NAMES.pattern}|{KINDS.pattern}")
    asked = {
        (file, name)
        for file, name in places(either, NAMES)
        if not any(fnmatch(file, pattern) for pattern in files)
    }
    assert sorted(asked - recorded) == [], "new places"
    assert sorted(recorded - asked) == [], "gone places"
    assert all(group["parse"] for group in groups)


READERS = {
    # PARSE cannot use them: pools, stores and devices that it refuses
    "beam_search/": "SGLang refuses beams with any algorithm",
    "disaggregation/decode_kvcache_offload_manager.py": "refused (startup.disaggregation)",
    "dllm/": "refused (startup.checks)",
    "hardware_backend/": "refused (startup.checks)",
    "managers/hisparse_coordinator.py": "of sparse attention, which is read only",
    # it means slots
    "managers/schedule_batch.py": "bookkeeping, and what other algorithms reserve",
    "managers/scheduler_components/": "accounts of slots in use",
    "mem_cache/allocation": "allocates behind it",
    "mem_cache/memory_pool.py": "an assertion that a reused row has slots",
    "disaggregation/decode.py": "sets it to the prompt that came",
    "speculative/": "of other algorithms' workers",
    # it means tokens with KV, or the end of the row: trimmed by the patch kv_by_phase
    "mem_cache/common.py": "release_kv_cache",
    "session/streaming_session.py": "behind release_kv_cache",
}
"""Files that read ``kv_allocated_len`` -> what it means there."""


def test_readers_of_allocated_lengths():
    files = {file for file, _ in places(LENGTH)}
    unknown = {file for file in files if not any(map(file.startswith, READERS))}
    gone = {known for known in READERS if not any(file.startswith(known) for file in files)}
    assert (unknown, gone) == (set(), set())
