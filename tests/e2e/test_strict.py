"""Numbers that must be the target's own choice, on the question pair's server."""

from __future__ import annotations

from typing import Any

import pytest

from support.client import Client, parse_info

EVERYTHING = {"threshold": 0.0, "trace": True}


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_number_but_the_targets_own_is_accepted(
    demo: Client, problems: list, tokenizer: Any, temperature: float
):
    """At threshold 0, where every verdict accepts; under sampling, against the drawn token."""
    prompts, params = [problem.prompt for problem in problems[:8]], {"max_new_tokens": 120}
    params |= {"temperature": temperature, "ignore_eos": True}
    others = {}
    for strict in ("none", "numbers"):
        others[strict] = num_refused = 0
        for answer in demo.generate_all(
            prompts, 8, parse={**EVERYTHING, "strict": strict}, **params
        ):
            info = parse_info(answer)
            for record in info["trace"]:
                accepted = record["draft_token_ids"][: record["accepted_len"]]
                pairs = zip(accepted, record["target_token_ids"], strict=False)
                wrong = [pair for pair in pairs if pair[0] != pair[1]]
                texts = [tokenizer.decode(pair) for pair in wrong]
                others[strict] += sum(any(map(str.isdigit, text)) for text in texts)
                if record["strict"]:
                    place = record["strict"]["place"]
                    assert record["accepted_len"] <= place
                    assert record["draft_token_ids"][place] != record["target_token_ids"][place]
            num_refused += info.get("strict_refusals", {}).get("numbers", 0)
        assert (num_refused > 0) == (strict == "numbers")
    assert others["none"] > others["numbers"] == 0
