"""The command line of ``sglang-parse try``, and the servers that it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_parse.client.demo_pair import is_of_demo_pair
from sglang_parse.client.flags import Flags, at_least, option, split_words
from sglang_parse.client.records import PARSE, PARSE_EAGLE3, PLAIN, BenchError
from sglang_parse.client.servers import NAMED_URLS, Remote, ServerSpec
from sglang_parse.client.targets import Models, parse_settings, server_specs
from sglang_parse.core.config import OWN
from sglang_parse.core.judge import LIKELIHOOD

CPU_FLAGS = "--device cpu --attention-backend torch_native --dtype float32 --max-total-tokens 16384"


@dataclass(frozen=True)
class TrialSettings(Flags):
    target: str = option("", "path or name; not needed where both servers run")
    draft: str = option(
        "",
        "path or name of a smaller model with the same tokenizer (default: none; prompts and what "
        "their requests send along draft)",
    )
    eagle3: str = option("", "path or name of an EAGLE-3 head for the target")
    mtp: str = option(
        "", "'own': the target's checkpoint has an MTP layer; or the path of one that has it"
    )
    prompts: Path | None = option(
        None,
        'lines of text, or of JSON: a text or an object with "prompt" (default: 20 questions; '
        "without a draft model tasks on a text that they give; for the demo pair its problems)",
        type=Path,
        metavar="FILE",
    )
    remotes: dict[str, Remote] = option(
        [], "a running server instead of one started here: plain=URL, parse=URL", **NAMED_URLS
    )
    flags: tuple[str, ...] = option(
        "", f"of SGLang, for both servers (default without a GPU: {CPU_FLAGS})", read=split_words
    )
    requests: int = option(20, "prompts asked at most", type=at_least(1))
    concurrency: int = option(
        1, "prompts asked together; other judges are predicted for one", type=at_least(1)
    )
    max_tokens: int = option(128, "longest answer; less where it takes long", type=at_least(16))
    budget: int = option(600, "seconds for answers; starts come on top", type=at_least(1))
    output: Path = option(Path("build/try"), "folder", type=Path)

    def __post_init__(self) -> None:
        missing = {PLAIN, PARSE} - self.remotes.keys()
        if others := ", ".join(self.remotes.keys() - {PLAIN, PARSE}):
            raise BenchError(f"--url names {others}; use {PLAIN}=URL or {PARSE}=URL")
        if missing and not self.target:
            names = ", ".join(sorted(missing))
            raise BenchError(f"no server for {names}; fix: give --target, or --url of both")

    @property
    def predicts(self) -> bool:
        """Whether other judges are predicted: from a model's drafts, one at a time. What a running
        server has is not known yet."""
        has_head = self.eagle3 or self.mtp
        return self.concurrency == 1 and not has_head and bool(self.draft or not self.target)

    @property
    def models(self) -> Models:
        """Of the servers that are started; the likelihood needs nothing but the target."""
        flags = self.flags or (() if has_gpu() else split_words(CPU_FLAGS))
        layer = parse_settings(mtp=self.mtp) if self.mtp else ()
        return Models(
            self.target, self.draft, self.eagle3, flags=flags, parse_flags=layer, judge=LIKELIHOOD
        )

    def specs(self) -> list[ServerSpec]:
        """The servers to start: a model of the hub may have to be downloaded."""
        names = [name for name in (PARSE, PLAIN) if name not in self.remotes]
        if names:
            replace(self.models, judge="").check_local()
        environment = {"TORCHDYNAMO_DISABLE": "0"} if has_gpu() else {}
        if not is_of_demo_pair(self.target):  # which is faster on one thread
            cores = str(len(os.sched_getaffinity(0)))
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", cores)
        paths = {self.target, self.draft, self.eagle3, self.mtp} - {"", OWN}
        if not all(map(os.path.exists, paths)):
            environment |= {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        kinds = {PARSE: parse_kind(self.models), PLAIN: PLAIN}
        found = server_specs(self.models, [kinds[name] for name in names])
        return [
            replace(spec, name=name, environment=environment)
            for name, spec in zip(names, found, strict=True)
        ]


def parse_kind(models: Models) -> str:
    return PARSE_EAGLE3 if models.eagle3 else PARSE


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


add_arguments = TrialSettings.add_arguments
