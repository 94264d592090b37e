"""What PARSE shows: the metrics' names and texts, and one request's ``meta_info["parse"]``.

``core.counters`` counts; ``prometheus`` publishes, ``patches.parse.decode_log`` prints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_parse.core.block import Masks
from sglang_parse.core.counters import request_counts


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus metric.

    Attributes:
        name: without the prefix ``sglang:parse_``; counters end in ``_total``.
        text: what it counts.
        label: its own label beside SGLang's; "" for none.
        label_values: the values known beforehand, shown as 0 until something happens.
        buckets: upper bounds, included; a metric with buckets is a histogram, else a counter.
        is_gauge: it is what it was last set to, and not there before.
    """

    name: str
    text: str
    label: str = ""
    label_values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    is_gauge: bool = False


PREFIX = "sglang:parse_"
TENTHS = tuple(i / 10 for i in range(1, 10))
METRICS = (
    Metric("requests_total", "Requests served with PARSE."),
    Metric("plain_requests_total", "Requests served by the plain target.", "reason", ()),
    Metric("faults_total", "Requests PARSE ended with an error."),
    Metric("drafted_tokens_total", "Tokens the draft model wrote."),
    Metric(
        "draft_forwards_total",
        "Forwards of the draft model, one for each request in them: drafted_tokens_total over this "
        "is tokens a forward.",
    ),
    Metric(
        "draft_forward_passes_total",
        "Forwards of the draft model, by the real rows that mask tokens stand behind: none (one "
        "token a forward), the last, every.",
        "masks",
        tuple(masks.value for masks in Masks),
    ),
    Metric("verified_tokens_total", "Drafted tokens that a verification pass judged."),
    Metric("accepted_tokens_total", "Drafted tokens that were kept: output."),
    Metric(
        "matched_tokens_total",
        "Drafted tokens behind a cut that the target would have written itself: output, some of "
        "target_tokens_total.",
    ),
    Metric(
        "target_tokens_total",
        "Output tokens the target wrote itself; with the accepted ones they are all of the output.",
        "mode",
        ("parse", "plain"),
    ),
    Metric("rounds_total", "Drafts that were judged."),
    Metric("verify_passes_total", "Verification passes: target forwards that judged drafts."),
    Metric("eagle3_steps_total", "Target forwards of one request with an EAGLE-3 head ahead."),
    Metric("eagle3_tokens_total", "Output tokens those wrote, some of target_tokens_total."),
    Metric(
        "eagle_bypassed_requests_total",
        "Requests that the EAGLE-3 head did not read: too few of their tokens were expected to be "
        "the target's steps.",
    ),
    Metric("kv_truncated_drafts_total", "Drafts ended or given up because KV slots were short."),
    Metric("skipped_drafts_total", "Drafts not begun because drafting did not pay."),
    Metric(
        "stage_seconds_total",
        "Wall time of each stage; draft: what the draft model reads before it writes included.",
        "stage",
        ("prefill", "draft", "verify", "decode"),
    ),
    Metric(
        "expected_speedup",
        "What drafting was last expected to bring over the plain target; below 1.05 drafting is suspended.",
        is_gauge=True,
    ),
    Metric("planned_draft_tokens", "Longest draft of the round planned last.", is_gauge=True),
    Metric("planned_prefixes", "Prefixes judged of it at most.", is_gauge=True),
    Metric("planned_draft_chunk", "Draft tokens of an iteration at most.", is_gauge=True),
    Metric(
        "simulated_acceptance",
        "Share of each draft that is kept where verdicts are ignored, for benchmarks.",
        is_gauge=True,
    ),
    Metric(
        "certificate_mismatch",
        "1 for everything the threshold's certificate was made for and that is another here.",
        "what",
        (),
        is_gauge=True,
    ),
    Metric(
        "verdict_drift",
        "Distance of the verdicts of the last 256 first drafts from the certificate's, 0 to 1.",
        is_gauge=True,
    ),
    Metric(
        "drifted_windows_total",
        "Times 256 first drafts' verdicts were not the certificate's (Kolmogorov-Smirnov).",
    ),
    Metric("verdict", "Verdicts, one per judged prefix.", buckets=(0.01, *TENTHS, 0.99, 1.0)),
    Metric(
        "accept_ratio",
        "Share of each judged draft that was kept.",
        buckets=(0.0, *TENTHS, 0.999, 1.0),
    ),
    Metric(
        "kv_slots_held",
        "KV slots held behind the committed tokens (drafts, questions, next tokens), all running "
        "requests together, once per decode iteration.",
        buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
    ),
    Metric(
        "decode_itl_seconds",
        "Time between the tokens of a request that continues or is served plainly, one per "
        "iteration; what others draft and have judged makes it longer.",
        buckets=(*(i / 200 for i in (1, 2, 4, 8, 12, 16, 24, 40, 60, 80)), 0.6, 0.8, 1.2, 2, 5),
    ),
)


META_INFO = {
    "mode": "`parse`, or `plain`: the target decoded by itself",
    "reason": 'why, if plain: "switched off", "log probabilities", "grammar", ...',
    "simulated": "only under simulated acceptance: the share of each draft that is kept; the "
    "answer means nothing",
    "decode_accelerator": "only with `--parse-decode-accelerator eagle3`: `eagle3`, or `target` for requests "
    "that step token by token, because the head cannot serve them or would read them for nothing",
    "target_tokens": "output tokens the target wrote itself; with `accepted_tokens` they are all "
    "of the output",
    "certified": "only with a certificate for the threshold: whether its promise is about this "
    "request; false where the request asks for a lower threshold, samples or is served plainly, "
    "and where the server is not as certified",
    "tokens_per_draft_forward": "`drafted_tokens` over `draft_forwards`; 0 without a draft",
    "plan": "how its last round was planned: `draft_tokens`, `max_prefixes` and `draft_chunk` at "
    "most, and the `speedup` expected of it, null where the round was to find out; not there "
    "without a draft",
    "trace": "only if asked for; one record per round",
    "fingerprint": "beside a trace: what its verdicts depend on, as in a certificate",
}
"""What ``response_info`` says beside the counters of ``core.request.Stats``: key -> meaning."""


def response_info(req: Any, simulated: float | None = None) -> dict[str, Any]:
    """The JSON object of one finished request: keys of ``META_INFO`` and ``core.request.Stats``.

    Requests that never reached the worker (aborted while waiting) have no counters and the
    reason "not started".

    Args:
        simulated: share of every draft that is kept in place of the verdicts, if one is.
    """
    state = getattr(req, "parse_state", None)
    note = {} if simulated is None else {"simulated": simulated}
    if state is None:
        return {"mode": "plain", "reason": "not started", **note}
    info: dict[str, Any] = {"mode": "plain" if state.policy.is_plain else "parse", **note}
    if state.policy.is_plain:
        info["reason"] = state.policy.plain_reason
    shown = request_counts(req)
    if state.policy.decode_accelerator:
        info["decode_accelerator"] = state.policy.decode_accelerator
    else:
        shown = {k: v for k, v in shown.items() if not k.startswith("eagle3_")}
    per_forward = shown["drafted_tokens"] / max(1, shown["draft_forwards"])
    shown["tokens_per_draft_forward"] = float(per_forward)
    info.update({k: round(v, 3) if isinstance(v, float) else v for k, v in shown.items()})
    if state.plan is not None:
        info["plan"] = asdict(state.plan)
    if state.policy.certified is not None:
        info["certified"] = state.policy.certified
    if state.policy.keep_trace:
        info["trace"] = state.trace
        info["fingerprint"] = state.policy.fingerprint
    return info
