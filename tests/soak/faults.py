"""Checks of one answer: against what its request allows, and against the plain server's answer."""

from __future__ import annotations

from typing import Any

from soak.load import SoakRequest


def faults_of(
    request: SoakRequest, answer: dict[str, Any], expected: dict[str, Any] | None
) -> list[str]:
    """Lists what is wrong with a finished, aborted or disconnected answer.

    Args:
        answer: the server's last message: ``text``, ``output_ids`` and ``meta_info``.
        expected: the plain server's answer to an exact request, else None.
    """
    found = []
    reason = answer["meta_info"]["finish_reason"]
    is_partial = reason is None or reason["type"] == "abort"
    if is_partial and request.fate not in ("abort", "abort stream", "disconnect"):
        found.append(f"ended by itself with {reason}")
    # Aborted while its grammar compiles, SGLang gives a request another prompt, of one token, and
    # outputs what that samples (docs/upstream.md).
    is_dummy = is_partial and answer["meta_info"].get("prompt_tokens") == 1
    if expected is not None and not is_dummy:
        found += _wrong_bytes(answer, expected, is_partial=is_partial)
    if is_partial:
        return found
    num_tokens = len(answer["output_ids"])
    (info,) = answer["meta_info"]["parse"]
    served = (info["mode"], info.get("reason", ""))
    if request.reason and served != ("plain", request.reason):
        found.append(f"served as {served}, not plainly because of {request.reason!r}")
    # A request that PARSE serves has a reason if it drafted nothing.
    num_drafted = info["drafted_tokens"]
    if not request.reason and (info["mode"] != "parse" or bool(served[1]) == bool(num_drafted)):
        found.append(f"served as {served} with {num_drafted} draft tokens")
    if info["accepted_tokens"] + info["target_tokens"] != num_tokens:
        found.append(f"{info} does not add up to {num_tokens} tokens")
    if num_tokens > request.sampling["max_new_tokens"]:
        found.append(f"{num_tokens} tokens are more than max_new_tokens")
    stops = [stop for stop in request.sampling.get("stop", ()) if stop in answer["text"]]
    return found + [f"stop string {stop!r} is in the text" for stop in stops]


def _wrong_bytes(
    answer: dict[str, Any], expected: dict[str, Any], *, is_partial: bool
) -> list[str]:
    """The first difference from the plain server's tokens, finish reason, lengths or text."""
    ours, theirs = answer["output_ids"], expected["output_ids"]
    if is_partial:
        theirs = theirs[: len(ours)]
    if ours != theirs:
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        return [f"wrong bytes: token {place} of {len(theirs)} differs from the plain server's"]
    if is_partial:
        return []
    meta, wanted = answer["meta_info"], expected["meta_info"]
    keys = ("finish_reason", "completion_tokens", "prompt_tokens")
    values = [(key, meta[key], wanted[key]) for key in keys if meta[key] != wanted[key]]
    if not _same_text(answer["text"], expected["text"], meta["finish_reason"]):
        values.append(("text", answer["text"], expected["text"]))
    return [f"wrong bytes: {key} is {a!r}, the plain server's is {b!r}" for key, a, b in values][:1]


def _same_text(left: str, right: str, finish_reason: dict[str, Any]) -> bool:
    """Equal, except for a started stop string that SGLang had already streamed.

    Without streaming, too, the scheduler emits text every 50 tokens
    (``SGLANG_FORCE_STREAM_INTERVAL``) and cannot take it back.
    """
    short, long = sorted((left, right), key=len)
    matched = str(finish_reason.get("matched", ""))
    return long.startswith(short) and matched.startswith(long[len(short) :])
