"""Checks the server that the given flags would start, without starting it."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_parse.algorithm import NAME
from sglang_parse.client import conditions
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.question import Question
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.doctor import memory
from sglang_parse.doctor.finding import (
    FAILS,
    NOT_CHECKED,
    OK,
    WARNING,
    Finding,
    Problem,
    failure,
    run_check,
)
from sglang_parse.startup import checks, compat, fallback, models
from sglang_parse.startup.certificates import certified_server
from sglang_parse.startup.questions import question_for

SMALL_RATIO = 4.0
"""Target / draft weights below which little speedup is possible: every token is drafted first,
and verification comes on top."""


def findings(flags: Sequence[str]) -> list[Finding]:
    """Checks the server of ``python -m sglang.launch_server`` with these flags."""
    load_plugins()
    try:
        args = read(flags)
    except Problem as problem:
        return [Finding("flags", FAILS, problem.found, problem.fix)]
    except ValueError as error:  # PARSE's own flags
        return [failure("flags", error)]
    started = check_start(args)
    return [*Start(resolving_view(args), args).findings(), started]


def read(flags: Sequence[str]) -> Any:
    """Parses the flags into SGLang's ``ServerArgs``, unresolved.

    Raises:
        Problem: SGLang with PARSE does not have such flags.
        ConfigError: a value of PARSE's is out of range.
    """
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return prepare_server_args(["--log-level", "error", *flags])
    except SystemExit:
        # argparse: usage, then "sglang serve: error: ...".
        found = stderr.getvalue().strip().rpartition("error: ")[2]
        raise Problem(found, "see python -m sglang.launch_server --help") from None


def check_start(args: Any) -> Finding:
    """Checks that the launcher would load the models; resolves ``args`` up to the first error."""
    try:
        args.resolve_once()
    except Exception as error:  # noqa: BLE001 - SGLang's checks raise any type
        return failure("start", error)
    return Finding("start", OK, "SGLang and PARSE accept these settings")


@dataclass
class Start:
    """The settings of one server.

    Attributes:
        args: resolved ``ServerArgs``, up to the first error; with PARSE's values without one.
        given: the same as given.
    """

    args: Any
    given: Any

    def findings(self) -> list[Finding]:
        found = [
            run_check("algorithm", self.algorithm),
            run_check("settings", self.settings),
            run_check("device", self.device),
            run_check("attention", self.attention),
            run_check("models", self.models),
        ]
        pair = self._or_none(partial(models.read_pair, self.args))
        found += self._of_pair(pair) if pair else _not_checked(PAIR_LINES, "models")
        tokenizer = self._or_none(self.tokenizer)
        if tokenizer is None:
            return [*found, *_not_checked(("question", "verify pass"), "the target's tokenizer")]
        found += [
            run_check("question", partial(self.question, tokenizer)),
            run_check("verify pass", partial(self.longest_pass, tokenizer)),
        ]
        config = self._or_none(ParseConfig.from_env)
        if pair and config and config.certificate:
            found.append(run_check("certificate", partial(self.certificate, tokenizer, pair[0])))
        return found

    def _of_pair(self, pair: tuple[Any, Any]) -> Iterator[Finding]:
        config, args = self._or_none(ParseConfig.from_env), self.args
        yield run_check("tokenizers", self.tokenizers)
        yield run_check("vocabularies", partial(self.vocabularies, *pair))
        yield run_check("context lengths", partial(self.contexts, *pair))
        yield run_check("draft forward", partial(self.block, pair[1]))
        yield run_check("default requests", partial(self.default_requests, pair[0]))
        if config and config.uses_eagle3:
            yield run_check("EAGLE-3 head", partial(self.head, config, pair[0]))
        paths = args.model_path, args.speculative_draft_model_path
        target, draft = (
            memory.weights_of(path, model.dtype) for path, model in zip(paths, pair, strict=True)
        )
        if target is None or draft is None or config is None:
            why = "no safetensors files of the models' weights on this machine"
            yield from (Finding(name, NOT_CHECKED, why) for name in ("size ratio", "memory"))
            return
        yield run_check("size ratio", partial(self.ratio, target, draft))
        fits = partial(memory.fits, args, config, pair, (target, draft))
        yield run_check("memory", fits)

    def algorithm(self) -> str:
        """Raises: Problem, for a server without PARSE."""
        setting, value = "--speculative-algorithm", self.args.speculative_algorithm
        if value != NAME:
            raise Problem(f"{setting} is {value!r}: a server without PARSE", f"use {NAME}")
        return f"{setting} {NAME}"

    def settings(self) -> str:
        """Returns settings that differ from PARSE's defaults.

        Raises:
            ConfigError, AdmissionError, BackendError: of PARSE's settings, then of SGLang's.
        """
        config = ParseConfig.from_env()
        simulated = SimulatedAcceptance.from_env(config)
        checks.check_settings(self.args)
        default = ParseConfig()
        changed = [
            f"{flag(name)} {value}"
            for name, value in config.model_dump().items()
            if value != getattr(default, name)
        ]
        if simulated is not None:
            raise Problem(
                f"acceptance is simulated ({simulated.fraction:g}): answers are meaningless",
                "unset SGLANG_PARSE_SIMULATE_ACCEPTANCE, unless this is a benchmark",
                WARNING,
            )
        return ", ".join(changed) or "PARSE's defaults"

    def device(self) -> str:
        """Raises: Problem, if this machine lacks the devices."""
        device, machine = self.args.device, conditions.machine()
        if device == "cpu":
            found = f"cpu: {machine['processor']}, {machine['cpus']} CPUs"
            return f"{found}, {machine['memory_gib']} GiB"
        kind = torch.get_device_module(device)
        count = kind.device_count() if kind.is_available() else 0
        if count < self.args.tp_size:
            raise Problem(
                f"--device is {device!r} with --tp-size {self.args.tp_size}; "
                f"this machine has {count}",
                "another machine, fewer ranks, or --device cpu",
            )
        return f"{device}: {', '.join(kind.get_device_name(index) for index in range(count))}"

    def attention(self) -> str:
        """Returns the backend and its layout. Raises: AdmissionError, BackendError, CompatError."""
        args, config = self.args, ParseConfig.from_env()
        layout, why = checks.pass_layout(args, config)
        checks.check_draft_graphs(args, config)
        compat.check_backend(args.attention_backend)
        overlap = "with" if checks.overlaps(args, config) else "without"
        found = f"{args.attention_backend}, {overlap} overlap; layout {layout} of the verify pass"
        return f"{found}, because {why}"

    def models(self) -> str:
        """Raises: AdmissionError, if PARSE cannot read or run one of them."""
        pair = models.read_pair(self.args)
        models.check_attention(self.args, *pair)
        models.check_heads(self.args, *pair)
        kinds = [f"{m.hf_config.architectures[0]}, {m.num_hidden_layers} layers" for m in pair]
        return f"target {kinds[0]}; draft {kinds[1]}"

    def tokenizer(self) -> Any:
        """Loads the target's tokenizer."""
        return models.tokenizer_of(self.args, self.args.tokenizer_path or self.args.model_path)

    def tokenizers(self) -> str:
        """Raises: AdmissionError, if they differ."""
        tokenizer = self.tokenizer()
        models.check_tokenizers(self.args, tokenizer)
        return f"the same {len(tokenizer.get_vocab()):,} entries"

    def vocabularies(self, target: Any, draft: Any) -> str:
        """Raises: AdmissionError, if they differ."""
        models.check_vocabularies(self.args, target, draft)
        return f"{target.vocab_size:,} tokens each"

    def contexts(self, target: Any, draft: Any) -> str:
        """Raises: AdmissionError, if the draft's is shorter."""
        models.check_contexts(self.args, target, draft)
        return f"target {target.context_len:,}, draft {draft.context_len:,} tokens"

    @staticmethod
    def block(draft: Any) -> str:
        """Raises: AdmissionError, if the draft cannot generate that many tokens per forward."""
        block = models.parallel_draft(ParseConfig.from_env(), draft)
        if block.size == 1:
            return "one token"
        return f"up to {block.size} tokens, by mask token {block.mask_id}"

    def default_requests(self, target: Any) -> str:
        """Raises: Problem, if requests that set no sampling parameters are served plainly."""
        for found, fix in fallback.plain_defaults(self.args, target):
            raise Problem(found, fix, WARNING)
        return "requests that set no sampling parameters are drafted for"

    def head(self, config: ParseConfig, target: Any) -> str:
        """Raises: AdmissionError, if the head does not fit the target."""
        steps = models.check_head(self.given, config, target)
        return f"{config.eagle3_path} fits the target; {steps} tokens ahead"

    def ratio(self, target: memory.Weights, draft: memory.Weights) -> str:
        """Raises: Problem, if the draft is nearly as large as the target."""
        ratio = target.count / draft.count
        found = (
            f"{target.count:,} and {draft.count:,} weights: {ratio:.1f} to 1 (in a mixture of "
            "experts a token uses some of them)"
        )
        if ratio < SMALL_RATIO:
            raise Problem(
                f"{found}; the time to draft limits the speedup",
                f"a smaller draft, of at most 1/{SMALL_RATIO:.0f} of the target",
                WARNING,
            )
        return found

    def question(self, tokenizer: Any) -> str:
        """Raises: AdmissionError, QuestionError, if the question cannot be built."""
        config = ParseConfig.from_env()
        question = question_for(self.args, tokenizer, config)
        if question is None:
            return f"none with {flag('verification')} {config.verification}"
        verdicts = [
            f"{tokenizer.decode([token])!r} ({token})"
            for token in (question.accept_id, question.reject_id)
        ]
        lens = [f"{name} {count}" for name, count in _lengths(question)]
        return f"{', '.join(lens)} tokens; verdict tokens {' and '.join(verdicts)}"

    def longest_pass(self, tokenizer: Any) -> str:
        """Raises: Problem, if one request's verify pass exceeds the memory that SGLang reserves."""
        config = ParseConfig.from_env()
        question = question_for(self.args, tokenizer, config)
        rows, chunk = checks.longest_pass(config, question), self.args.chunked_prefill_size
        found = f"at most {rows:,} rows for one request; --chunked-prefill-size is {chunk}"
        if chunk and 0 < chunk < rows:
            raise Problem(
                found,
                f"smaller {flag('draft_tokens')} or {flag('max_prefixes')}, a shorter question, a "
                "larger --chunked-prefill-size, or a smaller --mem-fraction-static",
                WARNING,
            )
        return found

    def certificate(self, tokenizer: Any, target: Any) -> str:
        """Raises: Problem, if the threshold was certified for another server."""
        config = ParseConfig.from_env()
        question = question_for(self.args, tokenizer, config)
        certified = certified_server(self.args, config, question, str(target.dtype))
        if certified.mismatch:
            differences = [
                f"{name} {wanted}, here {found}"
                for name, (wanted, found) in certified.mismatch.items()
            ]
            raise Problem(
                f"{flag('threshold')} {config.threshold} was certified for another server: "
                f"{'; '.join(differences)}",
                "run sglang-parse calibrate for this one",
                WARNING,
            )
        return f"{config.threshold} was made for this server: {config.accept_threshold:g}"

    @staticmethod
    def _or_none(load: Callable[[], Any]) -> Any:
        """Returns None on an error, which another check reports."""
        try:
            return load()
        except Exception:  # noqa: BLE001 - see ``run_check``
            return None


PAIR_LINES = (
    "tokenizers",
    "vocabularies",
    "context lengths",
    "draft forward",
    "default requests",
    "size ratio",
    "memory",
)


def _lengths(question: Question) -> list[tuple[str, int]]:
    lens = [("partial", len(question.partial_ids)), ("complete", len(question.complete_ids))]
    if question.thinking is not None:
        lens.append(("inside thoughts", len(question.thinking.suffix_ids)))
    return lens


def _not_checked(names: Sequence[str], because: str) -> list[Finding]:
    return [Finding(name, NOT_CHECKED, f"{because} could not be read") for name in names]
