"""Compares tokens with the plain target's, up to ties by rounding."""

from __future__ import annotations

from collections.abc import Sequence

from support.client import Client


def gaps(
    plain: Client, prompt: Sequence[int], output: Sequence[int], top: dict | None = None
) -> list[float]:
    """[len(output)] by how much the best token beats each of these, in log probability.

    All zero for greedy tokens. Every token is compared given the tokens before it, so one
    difference does not hide the next.

    Args:
        plain: a server of the target, without PARSE.
        top: of the requests; their adapter, say.
    """
    start = len(prompt) - 1  # SGLang returns no log probability of the first token
    answer = plain.generate(
        [*prompt, *output],
        max_new_tokens=0,
        top={
            "return_logprob": True,
            "top_logprobs_num": 1,
            "logprob_start_len": start,
            **(top or {}),
        },
    )
    meta = answer["meta_info"]
    chosen, best = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
    for token, (_, token_id, _) in zip(output, chosen, strict=True):
        assert token_id in (token, 0)  # SGLang calls the vocabulary's last token 0 here
    return [top - mine for (mine, _, _), [(top, _, _)] in zip(chosen, best, strict=True)]
