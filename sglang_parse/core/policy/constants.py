"""The policy's constants."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Le
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

Count = Annotated[int, Gt(0), Le(1_000_000)]
Ratio = Annotated[float, Gt(0), Le(1000)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class PolicyConfig:
    """Counts and ratios, no times: the same for a small pair on a CPU and a 14B target on a GPU.

    ``--parse-policy-config FILE`` replaces some of them by name.
    """

    cold_forwards: Count = 2  # first forwards of a size compile and tune kernels: in no mean
    mean_weight: Ratio = 0.1  # of an observation in a mean: about ten forwards adapt it
    max_outlier: Ratio = 3.0  # times the mean: no load does that to a warm forward
    max_age: Count = 512  # forwards of a stage after which a size unseen is unknown again
    row_cost: Ratio = 1 / 32  # decode steps of a verified row before costs are known
    error_rate: Ratio = 1 / 32  # errors per token of a first draft
    memory: Count = 24  # drafts per request, and answers, that are averaged
    probe_tokens: Count = 16  # draft tokens before costs are known, and of a probe
    window: Count = 4  # drafts per judgement, at more requests one of each
    max_failed: Count = 2  # failed drafts in a row after which a request rests
    resume_above: Ratio = 1.1  # speedup of a probe, or of the EAGLE-3 head, that resumes
    first_loss: Ratio = 0.08  # part of the time that first probes may lose
    max_wait: Ratio = 0.5  # longest wait for a probe, of the time since drafting paid last
    probe_loss: Ratio = 0.005  # part of the time that probes may lose in the long run
    chunk_steps: Ratio = 2.5  # decode steps of a draft chunk while others decode
    retry_every: Count = 64  # chunks, requests or steps after which what lost is tried again
    max_keys: Count = 128  # clients may send any threshold: the least recently used goes
    text_tokens: Count = 16  # first draft from a text
    text_loss: Ratio = 0.75  # tokens that a text may lose at first
    text_loss_rate: Ratio = 0.01  # and per output token
    text_gain: Ratio = 8.0  # gained tokens that may be lost again
    text_min_gain: Ratio = 0.1  # expected gain in tokens from which a draft is worth it
    text_hit: Ratio = 0.5  # chance that a place found in a text continues the answer
    eagle_saving: Ratio = 0.5  # of decode time that an EAGLE-3 head saves


DEFAULTS = PolicyConfig()
