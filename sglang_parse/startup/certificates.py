"""Checks the server against the certificate of its threshold."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from sglang_parse.core.certificate import Certificate, Fingerprint
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.judge import QUESTION, WEIGHTS
from sglang_parse.core.question import Question
from sglang_parse.core.simulation import SimulatedAcceptance

logger = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_NUM_SLICES, _SLICE_BYTES = 64, 16_384
"""Evenly spaced slices of a weight file that are hashed: a megabyte distinguishes trainings, and
hashing 100 GB would delay the start."""


@dataclass(frozen=True, slots=True)
class Certified:
    """A server's fingerprint and the certificate of its threshold.

    Attributes:
        fingerprint: the server's.
        certificate: None where the threshold is a number.
        mismatch: differences of the fingerprints: name -> (certified, found).
    """

    fingerprint: Fingerprint
    certificate: Certificate | None = None
    mismatch: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def covers(self, threshold: float, *, greedy: bool, plain: bool) -> bool | None:
        """Whether the certificate covers a request; None without a certificate.

        Args:
            threshold: the request's; stricter ones than the certificate's are covered.
            greedy: the request does not sample.
            plain: the request is served by plain decoding, without verification.
        """
        if self.certificate is None or self.certificate.threshold is None:
            return None
        is_strict = threshold >= self.certificate.threshold
        return is_strict and greedy and not plain and not self.mismatch


def certified_server(
    args: Any, config: ParseConfig, question: Question | None, dtype: str
) -> Certified:
    """Compares the server with its certificate and logs the differences."""
    fingerprint = fingerprint_of(args, config, question, dtype)
    certificate = config.certificate
    if certificate is None:
        return Certified(fingerprint)
    mismatch = certificate.fingerprint.differences(fingerprint)
    simulated = SimulatedAcceptance.from_env(config)
    if simulated is not None:
        mismatch["acceptance"] = ("verdicts", f"simulated {simulated.fraction:g}")
    setting = flag("threshold")
    for name, (wanted, found) in mismatch.items():
        logger.warning(
            "PARSE: %s %s was certified for another %s: %s, this server has %s. The certificate "
            "does not hold here; fix: run sglang-parse calibrate for this server.",
            setting,
            config.threshold,
            name,
            wanted,
            found,
        )
    logger.info(
        "PARSE: threshold %g, certified by %s: with confidence %g at most %g of first drafts have "
        "an error accepted, for requests like those of: %s",
        certificate.threshold,
        config.threshold,
        1 - certificate.delta,
        certificate.alpha,
        certificate.data_set,
    )
    return Certified(fingerprint, certificate, mismatch)


def fingerprint_of(
    args: Any, config: ParseConfig, question: Question | None, dtype: str
) -> Fingerprint:
    """Returns a server's fingerprint; ``dtype`` is the target's."""
    target, draft = pair_digests(args)
    if config.proposer and config.scores_tokens:  # beside a question they are exact
        path = config.eagle3_path or config.mtp_path
        draft += model_digest(path, None, args.download_dir) if path else target
    return Fingerprint(
        target=target,
        draft=draft,
        question=_question_ids(question),
        judge=judge_digest(config),
        segment=str(config.segment_rule),
        draft_tokens=config.draft_tokens,
        max_prefixes=config.max_prefixes,
        selection=config.selection,
        dtype=dtype,
    )


def pair_digests(args: Any) -> tuple[str, str]:
    """Returns ``model_digest`` of a server's target and draft model, "" without one."""
    draft, cache = args.speculative_draft_model_path, args.download_dir
    return (
        model_digest(args.model_path, args.revision, cache),
        model_digest(draft, args.speculative_draft_model_revision, cache) if draft else "",
    )


def _question_ids(question: Question | None) -> dict[str, list[int]]:
    """Returns no ids in token mode, which asks no question."""
    if question is None:
        return {}
    thinking = question.thinking
    ids = {
        "partial": question.partial_ids,
        "complete": question.complete_ids,
        "thinking": thinking.suffix_ids if thinking else (),
        "line_end": thinking.line_end_ids if thinking else (),
        "verdicts": (question.accept_id, question.reject_id),
    }
    return {name: list(found) for name, found in ids.items()}


def judge_digest(config: ParseConfig) -> str:
    """Returns the judge's name, or 16 hex digits of a verdict head; "" in token mode."""
    head = config.judge_file
    if head is None:
        return (config.judge_name or "").removesuffix(f"+{QUESTION}")
    digest = hashlib.sha256(f"{head.pooling} {head.layers}\n".encode())
    digest.update((Path(config.judge) / WEIGHTS).read_bytes())
    return digest.hexdigest()[:16]


def model_digest(path: str, revision: str | None = None, cache: str | None = None) -> str:
    """Returns 16 hex digits of config.json and a megabyte of every weight file.

    A name without a folder on this machine is returned with its revision instead.
    """
    folder = local_folder(path, revision, cache)
    if folder is None:
        return f"{path}@{revision or 'main'}"
    digest = hashlib.sha256()
    weights = sorted(path for kind in _WEIGHTS for path in folder.glob(kind))
    for file in (folder / "config.json", *weights):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for part in _slices(file):
            digest.update(part)
    return digest.hexdigest()[:16]


def local_folder(path: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Returns a model's folder, or its snapshot in the local Hugging Face cache; None if absent."""
    if os.path.isdir(path):
        return Path(path)
    try:
        found = snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, HFValidationError):  # not there, or no name of the hub's
        return None
    return Path(found)


def _slices(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _NUM_SLICES * _SLICE_BYTES:
            yield file.read()
            return
        for place in range(_NUM_SLICES):
            file.seek(place * (size - _SLICE_BYTES) // (_NUM_SLICES - 1))
            yield file.read(_SLICE_BYTES)
