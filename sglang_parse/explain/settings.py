"""Flags of ``sglang-parse explain``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_parse.client.flags import Flags, at_least, option
from sglang_parse.client.prompts import PROMPTS_HELP
from sglang_parse.client.records import BenchError


@dataclass(frozen=True)
class ExplainSettings(Flags):
    traces: tuple[Path, ...] = option(
        (),
        "JSON files: answers of /generate, or of chat completions with return_token_ids and "
        "return_meta_info, or the answers.json of an earlier run",
        name="traces",
        read=lambda paths: tuple(map(Path, paths)),
        nargs="*",
        metavar="FILE",
    )
    url: str = option("", "URL of a running PARSE server")
    prompt: tuple[str, ...] = option(
        None,
        "a prompt; may be given several times",
        read=lambda texts: tuple(texts or ()),
        action="append",
        metavar="TEXT",
    )
    prompts: Path | None = option(None, PROMPTS_HELP, type=Path, metavar="FILE")
    requests: int = option(3, "prompts sent at most", type=at_least(1))
    max_tokens: int = option(256, "longest answer, in tokens", type=at_least(1))
    threshold: float | None = option(None, "for these requests (default: the server's)", type=float)
    tokenizer: str = option(
        "", "folder of the target's tokenizer, for files without --url", metavar="PATH"
    )
    output: Path = option(
        Path("build/explain"), "folder of explain.html and answers.json", type=Path
    )

    def __post_init__(self) -> None:
        if not (self.traces or self.url):
            raise BenchError("nothing to explain; fix: give --url of a PARSE server, or files")
        if self.traces and not (self.url or self.tokenizer):
            raise BenchError(
                "a trace holds tokens; fix: give --tokenizer the target's folder, or --url of a "
                "server that runs with it"
            )


add_arguments = ExplainSettings.add_arguments
