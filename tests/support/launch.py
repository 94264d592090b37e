"""The launcher's checks of a PARSE server, without a process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.demo_pair import DEMO

QUESTION = str(DEMO / "question.json")


def launch(pair: tuple[Path, Path | None], *flags: str, ask: bool = True):
    """The launcher's checks before it starts processes; without a draft model if it is None.

    Args:
        ask: the question pair's question.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    target, draft = pair
    argv = ["--model-path", str(target), "--device", "cpu", "--dtype", "float32"]
    argv += ["--speculative-algorithm", "PARSE"]
    for name, value in (
        ("--attention-backend", "torch_native"),
        ("--speculative-draft-model-path", str(draft or "")),
        ("--parse-question", QUESTION if ask else ""),
    ):
        if value and name not in flags:
            argv += [name, value]
    args = prepare_server_args([*argv, *flags])
    args.resolve_once()
    return args


def changed(source: Path, folder: Path, **config: object) -> Path:
    """A copy of a model folder with other values in its config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder
