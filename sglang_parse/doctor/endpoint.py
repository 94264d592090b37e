"""Checks the server that writes drafts (``--parse-draft-url``)."""

from __future__ import annotations

import time
from typing import Any

import httpx

from sglang_parse.core.config import flag
from sglang_parse.doctor.finding import Problem, warn_if

SAMPLE = "Count from one to twenty, in words."
MAX_TOKENS = 32
LIMIT_S = 30


def sample_draft(url: str, timeout_s: float, tokenizer: Any) -> str:
    base = f"{url.rstrip('/').removesuffix('/v1')}/v1"
    try:
        models = httpx.get(f"{base}/models", timeout=LIMIT_S).raise_for_status().json()
        model = models["data"][0]["id"]
        body = {
            "model": model,
            "messages": [
                {"role": "user", "content": SAMPLE},
                {"role": "assistant", "content": "One"},
            ],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        started = time.perf_counter()
        reply = httpx.post(f"{base}/chat/completions", json=body, timeout=LIMIT_S)
        text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        took_ms = 1e3 * (time.perf_counter() - started)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        fix = f"start the server, or give its address to {flag('draft_url')}"
        raise Problem(f"{base} does not draft: {error!r}", fix) from error
    if not isinstance(text, str) or not text:
        fix = "use a model with a chat template, on a server that continues an assistant's turn"
        raise Problem(f"{base} drafts nothing after 'One'", fix)
    count = len(tokenizer.encode(text, add_special_tokens=False))
    found = f"{model} drafts {text[:40]!r}: {count} of the target's tokens in {took_ms:.0f} ms"
    fix = f"a faster server, or a longer {flag('draft_timeout')} than {timeout_s:g}"
    return warn_if(took_ms > 1e3 * timeout_s * max(1.0, count / 16), found, fix)
