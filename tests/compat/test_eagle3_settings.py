"""What SGLang's EAGLE-3 worker finds of the settings, and what it takes memory for by them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.compat


def test_the_head_takes_memory_for_what_it_proposes(monkeypatch: pytest.MonkeyPatch):
    """Not for a draft and its questions: as rows of logits those would fill a GPU."""
    from sglang.srt import runtime_context
    from sglang.srt.runtime_context import _ConfigBag
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.engine import eagle_head

    spec = _ConfigBag("spec")
    longest_pass = 1200
    for name, value in (
        ("speculative_algorithm", "PARSE"),
        ("speculative_draft_model_path", "draft"),
        ("speculative_draft_model_revision", None),
        ("speculative_num_steps", 3),
        ("speculative_num_draft_tokens", longest_pass),
        ("max_speculative_num_draft_tokens", longest_pass),
    ):
        spec._set(name, value)
    for module in (runtime_context, eagle_head):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    head = object.__new__(eagle_head.EagleHead)
    head._path, head.algorithm = "head", SpeculativeAlgorithm.EAGLE3
    with head.as_stock():
        assert (spec.speculative_algorithm, spec.speculative_draft_model_path) == ("EAGLE3", "head")
        assert runtime_context.max_speculative_num_draft_tokens() == 4
    assert spec.speculative_algorithm == "PARSE"
    assert runtime_context.max_speculative_num_draft_tokens() == longest_pass
