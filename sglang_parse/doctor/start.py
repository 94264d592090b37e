"""Checks the server that the given flags would start, without starting it."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_parse.algorithm import NAME
from sglang_parse.client import conditions
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.question import Question
from sglang_parse.core.setting import ConfigError
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.doctor import endpoint
from sglang_parse.doctor.finding import WARNING, Check, Problem, not_checked, simulated, warn_if
from sglang_parse.doctor.memory import check_memory, num_weights
from sglang_parse.startup import checks, heads, models
from sglang_parse.startup.certificates import certified_server
from sglang_parse.startup.families import usual_drafts
from sglang_parse.startup.judges import check_judge
from sglang_parse.startup.parallel import parallel_draft
from sglang_parse.startup.questions import question_for

SMALL_RATIO = 4.0
"""Target / draft weights below which little speedup is possible: every token is drafted first,
and verification comes on top."""
Parsed = TypeVar("Parsed")
QUIET = ("--log-level", "error")
NAMES = (
    *("flags", "start", "algorithm", "settings", "device", "attention", "models"),
    *("tokenizers", "vocabularies", "context lengths", "draft forward"),
    *("size ratio", "memory", "question", "judge", "verify pass"),
)
"""Checks of every server, by methods of these names."""


class Start:
    """The server of ``python -m sglang.launch_server`` with these flags.

    Attributes:
        given: ``ServerArgs`` as given; None until the flags have been read.
        args: resolved, up to the first error.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        self.words = flags
        self.given: Any = None
        self.args: Any = None

    def checks(self) -> Iterator[Check]:
        yield "flags", self.flags
        if self.given is None:
            return
        yield "port", self.port
        for name in NAMES[1:]:
            yield name, getattr(self, name.replace(" ", "_"))
        if self.config.proposer:
            _, title = heads.PROPOSED_BY[self.config.proposer]
            yield title, self.head
        elif hint := self.hint():
            yield "MTP layer", lambda: hint
        if self.config.draft_url:
            yield "draft endpoint", self.draft_endpoint
        if self.config.certificate:
            yield "certificate", self.certificate

    def flags(self) -> str:
        """Parses the flags, without those that SGLang with PARSE does not take.

        Raises: Problem, with a line for each of these.
        """
        groups = grouped(self.words)
        good, wrong = [], []
        for group in groups:
            try:
                captured(parser().parse_args, ["--model-path", "", *group])
                good.append(group)
            except Problem as problem:
                wrong.append(problem.found)
        for _ in range(2):  # without bad values of PARSE's own
            try:
                self.given = captured(prepare_server_args, sum(good, [*QUIET]))
                break
            except (ConfigError, Problem) as error:
                lines = str(error).splitlines()
                named = {line.partition(" ")[0] for line in lines}
                good = [group for group in good if group[0].partition("=")[0] not in named]
                wrong += [line for line in lines if line not in wrong]
        if wrong:
            raise Problem("\n".join(wrong), "see python -m sglang.launch_server --help")
        return f"{len(groups)} given"

    def port(self) -> str:
        checks.check_port(self.given)
        return f"{self.given.port} is free"

    def start(self) -> str:
        """Resolves the settings as the launcher does before it loads the models."""
        try:
            self.given.resolve_once()
        finally:
            self.args = resolving_view(self.given)
        return "SGLang and PARSE accept these settings"

    def algorithm(self) -> str:
        setting, value = "--speculative-algorithm", self.args.speculative_algorithm
        if value != NAME:
            raise Problem(f"{setting} is {value!r}: a server without PARSE", f"use {NAME}")
        return f"{setting} {NAME}"

    def settings(self) -> str:
        """Checks PARSE's, then SGLang's; returns PARSE's that were given."""
        simulation = SimulatedAcceptance.from_env(self.config)
        checks.check_settings(self.args)
        if simulation is not None:
            simulated(simulation.fraction)
        given = self.config.model_dump(exclude_unset=True).items()
        return ", ".join(f"{flag(name)} {value}" for name, value in given) or "PARSE's defaults"

    def device(self) -> str:
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
        args, config = self.args, self.config
        target, draft = self.pair
        block = parallel_draft(config, draft)
        layout, why = checks.pass_layout(args, config, target, block.size)
        backends = dict.fromkeys((args.attention_backend, checks.draft_attention(args)))
        overlap = "with" if checks.overlaps(args, config) else "without"
        names = " and, for drafts, ".join(backends)
        return f"{names}, {overlap} overlap; layout {layout} of the verify pass, because {why}"

    def models(self) -> str:
        pair = models.read_pair(self.args)
        for check in models.PAIR_CHECKS if pair[1] else models.TARGET_CHECKS:
            if check is not models.check_contexts:  # has its line
                check(self.args, *pair)
        kinds = [
            f"{m.hf_config.architectures[0]}, {m.num_hidden_layers} layers" if m else "none"
            for m in pair
        ]
        return f"target {kinds[0]}; draft {kinds[1]} (can draft {usual_drafts(pair[0])})"

    # -- read once, for several checks ----------------------------------------------

    @cached_property
    def config(self) -> ParseConfig:
        """PARSE's settings, published when the flags were read."""
        return ParseConfig.from_env()

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """``ModelConfig`` of target and draft, None without a draft model."""
        with _reading("models"):
            return models.read_pair(self.args)

    @property
    def draft(self) -> Any:
        if self.pair[1] is None:
            usual = usual_drafts(self.pair[0])
            texts = "texts and copies of the prompt"
            if self.config.prompt_drafts == "off":
                texts = "texts only"
            not_checked(f"no draft model: drafts are {texts} (can draft {usual})")
        return self.pair[1]

    @cached_property
    def tokenizer(self) -> Any:
        with _reading("the target's tokenizer"):
            return models.tokenizer_of(self.args)

    def hint(self) -> str:
        """What could draft and does not; "" where nothing of it can be read."""
        try:
            return heads.unused_mtp(self.args, self.config, self.pair[0])
        except (Problem, models.AdmissionError):
            return ""

    def built_question(self) -> Question | None:
        return question_for(self.args, self.tokenizer, self.config)

    # -- of the models --------------------------------------------------------------

    def tokenizers(self) -> str:
        _, tokenizer = self.draft, self.tokenizer
        models.check_tokenizers(self.args, tokenizer)
        return f"the same {len(tokenizer.get_vocab()):,} entries"

    def vocabularies(self) -> str:
        target, draft = self.pair[0], self.draft
        models.check_vocabularies(self.args, target, draft, self.tokenizer)
        if draft.vocab_size == target.vocab_size:
            return f"{target.vocab_size:,} tokens each"
        sizes = f"target {target.vocab_size:,}, draft {draft.vocab_size:,} tokens"
        return f"{sizes}; padding behind the tokenizer's {models.num_ids(self.tokenizer):,}"

    def context_lengths(self) -> str:
        target, draft = self.pair[0], self.draft
        models.check_contexts(self.args, target, draft)
        return f"target {target.context_len:,}, draft {draft.context_len:,} tokens"

    def draft_forward(self) -> str:
        block = parallel_draft(self.config, self.draft)
        if block.has_head:
            field, path = "draft_eagle3_path", self.config.draft_eagle3_path
            length = self.pair[0].context_len
            heads.check_head_fits(self.given, field, path, self.draft, length)
        return str(block)

    def draft_endpoint(self) -> str:
        config = self.config
        return endpoint.sample_draft(config.draft_url, config.draft_timeout, self.tokenizer)

    def head(self) -> str:
        steps = heads.check_head(self.given, self.config, self.pair[0])
        setting, _ = heads.PROPOSED_BY[self.config.proposer]
        return f"{getattr(self.config, setting)} fits the target; {steps} tokens ahead"

    def size_ratio(self) -> str:
        models = (self.pair[0], self.draft)
        target, draft = (sum(num_weights(model).values()) for model in models)
        if not (target and draft):
            not_checked("no safetensors files of the models' weights on this machine")
        ratio = target / draft
        found = (
            f"{target:,} and {draft:,} weights: {ratio:.1f} to 1 (in a mixture of experts a token "
            "uses some of them)"
        )
        fix = f"a smaller draft, of at most 1/{SMALL_RATIO:.0f} of the target"
        limits = "; the time to draft limits the speedup" if ratio < SMALL_RATIO else ""
        return warn_if(bool(limits), found + limits, fix)

    def memory(self) -> str:
        if self.args.speculative_num_draft_tokens is None:
            not_checked("settings that a start resolves are missing")
        return check_memory(self.args, self.config, *self.pair)

    def question(self) -> str:
        question = self.built_question()
        if question is None:
            name = "verification" if self.config.judge_name is None else "judge"
            return f"none with {flag(name)} {getattr(self.config, name)}"
        lens = {"partial": question.partial_ids, "complete": question.complete_ids}
        if question.thinking is not None:
            lens["inside thoughts"] = question.thinking.suffix_ids
        shown = ", ".join(f"{name} {len(ids)}" for name, ids in lens.items())
        yes, no = (
            f"{self.tokenizer.decode([token])!r} ({token})"
            for token in (question.accept_id, question.reject_id)
        )
        return f"{shown} tokens; verdict tokens {yes} and {no}"

    def judge(self) -> str:
        """Where verdicts come from; whether a verdict head, and layers to capture, fit."""
        name, head = self.config.judge_name, self.config.judge_file
        if name is None:
            return f"none with {flag('verification')} {self.config.verification}"
        check_judge(self.args, self.config, self.pair[0])
        if head is None:
            return name
        return f"{name}: {head.pooling}, layers {', '.join(map(str, head.layers)) or 'none'}"

    def verify_pass(self) -> str:
        """SGLang reserves memory for the activations of a prefill chunk."""
        rows = checks.longest_pass(self.config, self.built_question())
        chunk = self.args.chunked_prefill_size
        found = f"at most {rows:,} rows for one request; --chunked-prefill-size is {chunk}"
        fix = (
            f"smaller {flag('draft_tokens')} or {flag('max_prefixes')}, a shorter question, a "
            "larger --chunked-prefill-size, or a smaller --mem-fraction-static"
        )
        return warn_if(0 < (chunk or 0) < rows, found, fix)

    def certificate(self) -> str:
        config, dtype = self.config, str(self.pair[0].dtype)
        certified = certified_server(self.args, config, self.built_question(), dtype)
        if certified.mismatch:
            differences = "; ".join(
                f"{name} {wanted}, here {found}"
                for name, (wanted, found) in certified.mismatch.items()
            )
            setting = f"{flag('threshold')} {config.threshold}"
            found = f"{setting} was certified for another server: {differences}"
            raise Problem(found, "run sglang-parse calibrate for this one", WARNING)
        return f"{config.threshold} was made for this server: {config.accept_threshold:g}"


@cache
def parser() -> argparse.ArgumentParser:
    """SGLang's, with the flags of PARSE."""
    load_plugins()
    made = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(made)
    return made


def grouped(words: Sequence[str]) -> list[list[str]]:
    """Groups flags with their values, after groups of one word before the first flag."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups or not groups[-1][0].startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def captured(parse: Callable[[Sequence[str]], Parsed], words: Sequence[str]) -> Parsed:
    """Parses words. Raises: Problem, with argparse's error."""
    try:
        with redirect_stderr(stderr := io.StringIO()):
            return parse(words)
    except SystemExit:
        # Printed: usage, then "sglang serve: error: ...".
        raise Problem(stderr.getvalue().strip().rpartition("error: ")[2], "") from None


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Raises: Problem, on an error, which a check of its own reports."""
    try:
        yield
    except Exception:  # noqa: BLE001 - see ``run_check``
        not_checked(f"{what} could not be read")
