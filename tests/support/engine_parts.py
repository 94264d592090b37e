"""The parts of an engine that decide about drafts, without models, wired as in ``engine.build``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.segment import Segmenter


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Named as in ``engine.parts.Engine``."""

    controller: Controller
    counters: Counters
    judge: Any
    sources: Any
    committer: Any


def engine_parts(
    config: ParseConfig,
    controller: Controller,
    *,
    question: Any = None,
    scorer: Any = None,
    tokenizer: Any = None,
    encoder: Any = None,
    **proposers: Any,
) -> EngineParts:
    """Builds them.

    Args:
        question, scorer, tokenizer: the judge's; without a question or a scorer there is none.
        encoder, proposers: see ``build_sources``.
    """
    from sglang_parse.engine.build import build_sources
    from sglang_parse.engine.commit import Committer
    from sglang_parse.engine.judge.judge import Judge

    counters, judge = Counters(), None
    if question is not None or scorer is not None:
        segments = Segmenter(tokenizer, config.segment_rule)
        judge = Judge(config, question, scorer, segments, counters)
    sources = build_sources(config, controller, judge, counters, encoder, **proposers)
    committer = Committer(config, judge, counters, sources)
    return EngineParts(controller, counters, judge, sources, committer)
