"""Targets of a comparison: the flags that start each kind of server for a pair of models.

The stock ones get the settings a user would choose for them: chains (topk 1), no thresholds.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from sglang_parse.client.demo_pair import check_there
from sglang_parse.client.records import (
    DFLASH,
    DRAFT,
    EAGLE3,
    NEXTN,
    NGRAM,
    ON_GPU,
    PARSE,
    PARSE_EAGLE3,
    PARSE_HEAD,
    PARSE_LIKELIHOOD,
    PARSE_MTP,
    PARSE_ONE,
    PARSE_QUESTION,
    PARSE_TOKEN,
    PLAIN,
    STANDALONE,
    STOCK,
    TITLES,
    WITH_PARSE,
    BenchError,
)
from sglang_parse.client.servers import COMMON_FLAGS, ServerSpec
from sglang_parse.core.config import OWN, ParseConfig
from sglang_parse.core.config import flag as flag_of
from sglang_parse.core.judge import LIKELIHOOD, QUESTION, JudgeError, read_judge
from sglang_parse.core.setting import ConfigError
from sglang_parse.core.simulation import ENV_VAR, SimulatedAcceptance

DFLASH_BLOCK = 16
"""Tokens of a DFLASH draft's block, unless its config says otherwise."""


@dataclass(frozen=True)
class Models:
    """What is served, and the flags that all servers share.

    Attributes:
        eagle3: folder with an EAGLE-3 head for the target, for the servers with it.
        question: PARSE's question file; "" asks the built-in one.
        flags: of SGLang, for every server.
        parse_flags: more flags for the servers with PARSE.
        standalone_steps, eagle3_steps: draft tokens per verification of stock servers; an MTP layer
            has the head's. PARSE has its own default.
        judge: folder with a verdict head for the target, in place of the question.
        dflash: folder with a DFLASH draft for the target.
        mtp: the target's MTP layer, as of ``--parse-mtp``.
    """

    target: str
    draft: str
    eagle3: str = ""
    question: str = ""
    flags: tuple[str, ...] = COMMON_FLAGS
    parse_flags: tuple[str, ...] = ()
    standalone_steps: int = 4
    eagle3_steps: int = 3
    judge: str = ""
    dflash: str = ""
    mtp: str = OWN

    @property
    def layer_path(self) -> str:
        """Where the MTP layer is, if not in the target's checkpoint; else ""."""
        return "" if self.mtp == OWN else self.mtp

    def check_local(self) -> None:
        """A path that is not there is no hub name."""
        folders = {"--target": self.target, "--draft": self.draft, "--eagle3": self.eagle3}
        folders |= {"--dflash": self.dflash, "--mtp": self.layer_path}
        check_there({**folders, "--question": self.question, "--judge": self.judge})
        for flag, path in folders.items():
            looks_local = path and (path.startswith(("/", ".")) or Path(path).exists())
            if looks_local and not (Path(path) / "config.json").is_file():
                raise BenchError(f"{flag} is {path!r}, which holds no model (no config.json)")
        if self.judge:
            try:
                read_judge(self.judge)
            except JudgeError as error:
                fix = "give a folder of sglang-parse train-judge"
                raise BenchError(f"--judge is {self.judge!r}: {error}; fix: {fix}") from error


def server_specs(models: Models, names: Sequence[str]) -> list[ServerSpec]:
    """Specs of the named servers, in that order; KIND@VALUE simulates acceptance."""
    return [_server_spec(models, name) for name in names]


def command_of(spec: ServerSpec) -> str:
    return shlex.join(["python", *spec.launcher, *spec.common, *spec.flags])


def parse_settings(**settings: object) -> tuple[str, ...]:
    """PARSE's flags for settings of ``ParseConfig``, by their names."""
    return tuple(word for name, value in settings.items() for word in (flag_of(name), str(value)))


def check_server(name: str, kinds: Collection[str] = TITLES.keys()) -> None:
    """Refuses a server that is of none of these kinds, and a VALUE that it cannot simulate."""
    kind, _, value = name.partition("@")
    if kind not in kinds or (value and kind in (PLAIN, DRAFT, NGRAM)):
        known = f"{', '.join(kinds)}; {PLAIN}, {DRAFT} and {NGRAM} take no @VALUE"
        raise BenchError(f"--servers names {name!r}; use {known}")
    longest = DFLASH_BLOCK if kind == DFLASH else 4
    is_number = re.fullmatch(r"\d+(\.\d+)?", value)
    if value and kind in STOCK and not (is_number and 1 <= float(value) <= longest):
        raise BenchError(f"--servers names {name!r}; use an accept length of 1 to {longest}")
    config = ParseConfig(verification="token" if kind == PARSE_TOKEN else "semantic")
    try:
        SimulatedAcceptance.from_env(config, {ENV_VAR: value if kind in WITH_PARSE else ""})
    except ConfigError as error:
        raise BenchError(f"--servers names {name!r}: {error}") from error


def _server_spec(models: Models, name: str) -> ServerSpec:
    check_server(name)
    kind, _, value = name.partition("@")
    if kind in ON_GPU and "cpu" in models.flags:
        fix = "leave it out with --servers, or use a GPU"
        raise BenchError(f"--servers names {name!r}, whose kernels run on GPUs only; {fix}")
    model = models.draft if kind == DRAFT else models.target
    flags = ("--model-path", model, *_speculative_flags(models, kind))
    simulated: dict[str, str] = {}
    if value:
        steps = dict.fromkeys((EAGLE3, NEXTN), models.eagle3_steps)
        steps[STANDALONE] = models.standalone_steps
        longest = 1 + steps[kind] if kind in steps else DFLASH_BLOCK
        simulated = simulated_lens(float(value), longest) if kind in STOCK else {ENV_VAR: value}
    return ServerSpec(name, flags, common=models.flags, environment=simulated)


def simulated_lens(mean: float, longest: int) -> dict[str, str]:
    """Environment of a stock server whose accept lengths spread around ``mean``: SGLang draws them
    from a normal distribution of deviation 1, rounded and cut to 1 and ``longest``."""
    low, high = -4.0, longest + 5.0
    for _ in range(60):
        drawn = NormalDist((low + high) / 2, 1.0)
        found = longest - sum(drawn.cdf(length + 0.5) for length in range(1, longest))
        low, high = (drawn.mean, high) if found < mean else (low, drawn.mean)
    is_fixed = mean >= longest or mean <= 1  # no distribution has such a mean
    name, value = ("match-expected", mean) if is_fixed else ("multinomial", max(1e-3, low))
    return {"SGLANG_SIMULATE_ACC_LEN": f"{value:g}", "SGLANG_SIMULATE_ACC_METHOD": name}


def _speculative_flags(models: Models, kind: str) -> tuple[str, ...]:
    if kind == NGRAM:
        return algorithm_flags(NGRAM, "")
    if kind == DFLASH:
        if not models.dflash:
            fix = "give --dflash its folder, or leave the server out with --servers"
            raise BenchError(f"a server {DFLASH} needs a draft made for the target; fix: {fix}")
        return algorithm_flags(DFLASH, models.dflash)
    if kind == STANDALONE:
        return (*algorithm_flags(STANDALONE, models.draft), *_steps(models.standalone_steps))
    if kind == EAGLE3:
        return (*algorithm_flags(EAGLE3, _head(models)), *_steps(models.eagle3_steps))
    if kind == NEXTN:
        return (*algorithm_flags(NEXTN, models.layer_path), *_steps(models.eagle3_steps))
    if kind not in WITH_PARSE:
        return ()
    parse = algorithm_flags(PARSE, models.draft)
    found = (*parse, *_judge_flags(models, kind), *models.parse_flags)
    if kind == PARSE_ONE:  # what the draft's several tokens a forward are worth
        return (*found, *parse_settings(draft_parallel_tokens=1))
    if kind == PARSE_EAGLE3:
        return (*found, *parse_settings(eagle3_path=_head(models)))
    if kind == PARSE_MTP:
        return (*found, *parse_settings(mtp=models.mtp))
    return found


def algorithm_flags(name: str, draft: str) -> tuple[str, ...]:
    """Flags of a speculative algorithm; ``draft`` "": without a draft model."""
    model = ("--speculative-draft-model-path", draft) if draft else ()
    return ("--speculative-algorithm", name.upper(), *model)


def _steps(num_steps: int) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", str(num_steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_steps + 1)),
    )


def _head(models: Models) -> str:
    if not models.eagle3:
        raise BenchError(
            "servers with EAGLE-3 need a head for the target; fix: give --eagle3 its folder, or "
            "leave them out with --servers"
        )
    return models.eagle3


def _judge_flags(models: Models, kind: str) -> tuple[str, ...]:
    if kind == PARSE_TOKEN:
        return parse_settings(verification="token")
    if kind == PARSE_LIKELIHOOD or (kind == PARSE_MTP and not models.judge):
        return parse_settings(judge=LIKELIHOOD)
    if kind == PARSE_HEAD and not models.judge:
        raise BenchError(
            f"a server {PARSE_HEAD} needs a verdict head for the target; fix: give --judge its "
            "folder (sglang-parse train-judge), or leave the server out with --servers"
        )
    if models.judge and kind != PARSE_QUESTION:
        return parse_settings(judge=models.judge)
    asked = {"question": models.question} if models.question else {"judge": QUESTION}
    return parse_settings(**asked)
