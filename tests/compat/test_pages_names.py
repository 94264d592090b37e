"""What the README and docs/ name of the command line and of the log is there, in these words."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Callable
from importlib import util
from pathlib import Path

import measure  # examples/real is on pytest's pythonpath
import parallel_draft
import pytest
import side_by_side
from transformers import HfArgumentParser, TrainingArguments

from sglang_parse import cli
from soak.run import make_parser
from support.pages import PAGES

pytestmark = pytest.mark.compat

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
NOT_OURS = {
    *("--silent", "--fail", "--header", "--data"),  # curl
    *("--base-url", "--num-examples", "--out-dir", "--from-dataset"),  # sgl-eval
    *("--dataset", "--backend", "--greedy", "--model"),  # EvalPlus
    "--profile",  # docker compose
}

# Words of the pages on trouble -> the file that has them in a text, under sglang_parse or SGLang.
QUOTED = {
    "PARSE: found SGLang": "sglang_parse/startup/compat.py",
    "this SGLang differs from the one PARSE was built for": "sglang_parse/startup/compat.py",
    "are not in force": "sglang_parse/patches/__init__.py",
    "question file": "sglang_parse/core/question.py",
    "chat template": "sglang_parse/core/question.py",
    "the verdict tokens get only": "sglang_parse/engine/judge/judge.py",
    "the exact token check would be faster here": "sglang_parse/engine/judge/judge.py",
    "verify passes use the layout": "sglang_parse/engine/build.py",
    "NaN in the target model's logits": "sglang_parse/core/request.py",
    "the draft model": "sglang_parse/engine/faults.py",
    "SIMULATED acceptance": "sglang_parse/patches/parse/decode_log.py",
    "drafting speedup": "sglang_parse/patches/parse/decode_log.py",
    "accepted: ": "sglang_parse/patches/parse/decode_log.py",
    "custom_params.parse": "sglang_parse/core/options.py",
    "Unknown speculative algorithm name": "sglang/srt/speculative/spec_info.py",
    "Failed to load plugin": "sglang/srt/plugins/__init__.py",
    "SGLANG_PLUGINS": "sglang/srt/plugins/__init__.py",
    "Failed to apply hooks": "sglang/srt/plugins/hook_registry.py",
    "Not enough memory": "sglang/srt/model_executor/pool_configurator.py",
    "KV cache pool is full. Retract requests": "sglang/srt/managers/scheduler.py",
}


def flags_of_program(*words: str, main: Callable[[list[str]], object] = cli.main) -> set[str]:
    """Flags and, in braces, commands that ``sglang-parse ... --help`` names, or another main."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]*|(?<=[{,])[a-z-]+(?=[,}])", text.getvalue()))


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Of SGLang's server with PARSE, of ``sglang-parse``, the soak and the examples' programs."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    server = argparse.ArgumentParser()
    ServerArgs.add_cli_args(server)
    programs = {name for name in flags_of_program() if not name.startswith("-")}
    assert {"demo", "compare"} <= programs
    recipe = HfArgumentParser((parallel_draft.Recipe, TrainingArguments))
    actions = (*server._actions, *recipe._actions, *make_parser()._actions)
    flags = {flag for action in actions for flag in action.option_strings}
    examples = (flags_of_program(main=main) for main in (measure.main, side_by_side.main))
    return flags.union(*map(flags_of_program, programs), *examples)


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_every_flag_exists(path: Path, known_flags: set[str]):
    named = set(FLAG.findall(PAGES[path]))
    unknown = {flag for flag in named if not flag.endswith("-")} - known_flags - NOT_OURS
    assert unknown == set()


@pytest.mark.parametrize("words", QUOTED)
def test_what_the_log_is_said_to_hold_is_there(words: str):
    package, _, rest = QUOTED[words].partition("/")
    [folder] = util.find_spec(package).submodule_search_locations
    # A text may go over several lines of source.
    source = re.sub(r'"\s*\n\s*f?"', "", (Path(folder) / rest).read_text(encoding="utf-8"))
    assert words in source
    assert words in PAGES[Path("docs/troubleshooting.md")]
