"""The policy's constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyConfig:
    """Counts and ratios, no times: the same for a small pair on a CPU and a 14B target on a GPU.

    In brackets the least and the greatest change of tokens/s in %, replayed over eight loads, with
    the value halved and doubled; [-] was not measured.
    """

    cold_forwards: int = 2  # first forwards of a size compile and tune kernels [-8 +6; -5 +1]
    mean_weight: float = 0.1  # of an observation: about ten forwards adapt a mean [-3 +3; -1 +6]
    max_outlier: float = 3.0  # times the mean: no load does that to a warm forward [-8 0; 0 +10]
    max_age: int = 512  # forwards of a stage after which a size is unknown again [0 +1; -1 0]
    row_cost: float = 1 / 32  # decode steps of a verified row before costs are known [-]
    error_rate: float = 1 / 32  # errors per token of a new key's drafts [-2 +4; -7 +1]
    memory: int = 24  # drafts per request, and answers, that are averaged [-3 +6; -2 +2]
    probe_tokens: int = 16  # of a probe, before costs are known, first of a text [-3 +1; -13 +4]
    window: int = 4  # least drafts per judgement [0 +1; -1 +1]
    window_share: float = 0.75  # of the requests; the last are late; halved, or 1: [-6 0; -8 0]
    max_failed: int = 3  # failed drafts until a request rests; 1 and 4, of 2: [-15 +2; -4 +12]
    resume_above: float = 1.1  # speedup of a probe that resumes drafting; 1.0 or 1.3: [0; -11 0]
    first_loss: float = 0.08  # part of the time that first probes may lose [-3 +2; 0 +1]
    max_wait: float = 0.5  # longest wait for a probe, of the time since drafting paid [0 +1; -1 +5]
    probe_loss: float = 0.005  # part of the time that probes lose in the long run [-6 0; 0 +4]
    chunk_steps: float = 2.5  # decode steps of a draft chunk beside decoding [-13 +5; -9 0]
    retry_every: int = 64  # chunks, or requests, until what lost is tried again [-8 +4; -2 +4]
    max_keys: int = 128  # clients may send any threshold: the least recently used goes [-]
    text_loss: float = 0.75  # tokens that a text may lose at first: 1 % of 75 [-]
    text_loss_rate: float = 0.01  # and per output token: a text that never fits costs 1 % [-]
    text_gain: float = 8.0  # gained tokens that may be lost again: a fit that ends ends soon [-]
    text_min_gain: float = 0.1  # expected gain in tokens from which a draft is worth it [-]
    eagle_saving: float = 0.5  # of decode time: on the demo pair EAGLE3 is 1.9 to 2 times as fast


DEFAULTS = PolicyConfig()
