"""Whether an EAGLE-3 head runs for a new request. It processes every token, for the sake of those
that it drafts, which are few where others' drafts are good."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_parse.core.policy.constants import PolicyConfig


@dataclass(slots=True)
class EaglePrefills:
    """The head's prefills, decayed: a few tokens take as long as many."""

    num_tokens: float = 0.0
    ms: float = 0.0

    def see(self, num_tokens: int, ms: float, config: PolicyConfig) -> None:
        if num_tokens:
            keep = 1 - config.mean_weight
            self.num_tokens, self.ms = keep * self.num_tokens + num_tokens, keep * self.ms + ms

    @property
    def token_ms(self) -> float:
        """Per token; 0 before the first prefill."""
        return self.ms / max(1.0, self.num_tokens)


@dataclass(slots=True)
class EagleGate:
    """Of one key: mean tokens of an answer, prompt included, and those of its decode steps."""

    num_answers: int = 0
    answer_tokens: float = 0.0
    decoded_tokens: float = 0.0
    num_bypassed: int = 0

    def observe(self, num_tokens: int, num_decoded: int, config: PolicyConfig) -> None:
        """Records a finished answer."""
        self.num_answers += 1
        weight = max(1 / config.memory, 1 / self.num_answers)
        self.answer_tokens += weight * (num_tokens - self.answer_tokens)
        self.decoded_tokens += weight * (num_decoded - self.decoded_tokens)

    def opens(self, cost: float, config: PolicyConfig) -> bool:
        """Whether the head pays for a request, or is tried again; ``cost`` of a token that it
        processes, in tokens that the running requests decode in that time."""
        if self.num_answers < config.window or not cost:
            return True
        saved = config.eagle_saving * self.decoded_tokens  # the head's part of their time left out
        cost *= self.answer_tokens - self.decoded_tokens
        pays = saved >= cost * (config.resume_above if self.num_bypassed else 1.0)
        self.num_bypassed = 0 if pays else (self.num_bypassed + 1) % config.retry_every
        return not self.num_bypassed
