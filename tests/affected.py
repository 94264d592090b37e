"""Names the tests on servers that a change can break: ``affected.py BASE`` prints their files.

A changed test file affects itself. ``tests/unit/test_affected.py`` keeps the table complete.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
E2E = ROOT / "tests" / "e2e"
STEP = "exact overlap blocks lengths memory pools aborts radix multi_turn stops tensor_parallel"
PROGRAMS = "compare load demo_programs doctor_and_explain documents calibrate train_judge try wheel"
AFFECTED = {
    # pattern of a path: names of files in tests/e2e; every pattern that matches counts
    "sglang_parse/core/*": "exact overlap lengths resume demo_pair requests predictions grammars",
    "sglang_parse/core/policy/*": "drafting_pays doubt load",
    "sglang_parse/core/[aclp]*.py": "prompt",
    "sglang_parse/core/config.py": "documents serve",
    "sglang_parse/core/judge.py": "heads head_and_question calibrate",
    "sglang_parse/engine/*": f"{STEP} streams",
    "sglang_parse/engine/prefill.py": "disaggregation",
    "sglang_parse/engine/schedule.py": "sessions",
    "sglang_parse/engine/logits/grammar.py": "grammars hostile_grammars forced_text predictions",
    "sglang_parse/engine/sources/*": "predictions prompt endpoint grammars soak documents",
    "sglang_parse/engine/sources/[cept]*.py": "tails eagle3_drafts",
    "sglang_parse/engine/sources/eagle.py": "mtp",
    "sglang_parse/engine/drafting/*": "blocks doubt draft_head drafting_pays sessions",
    "sglang_parse/engine/logits/*": "adjusted grammars",
    "sglang_parse/engine/a*.py": "fallbacks malformed extreme_numbers",
    "sglang_parse/engine/logits/sampling.py": "sampling adjusted",
    "sglang_parse/engine/logits/logprobs.py": "logprobs demo_requests",
    "sglang_parse/engine/e*.py": "eagle3_continuation eagle3_drafts mtp head_and_question defaults",
    "sglang_parse/engine/f*.py": "faults request_errors weight_updates",
    "sglang_parse/engine/judge/*": "heads head_and_question demo_pair security",
    "sglang_parse/engine/v*.py": "heads demo_pair",
    "sglang_parse/engine/*graph*.py": "graphs steps",
    "sglang_parse/engine/drafting/block_graphs.py": "graphs",
    "sglang_parse/attention/*i*_*.py": "graphs",
    "sglang_parse/engine/states.py": "states families",
    "sglang_parse/engine/trace.py": "heads train_judge try",
    "sglang_parse/engine/b*.py": "lora weight_updates router call_direction",
    "sglang_parse/attention/*": "as_on_a_gpu exact blocks demo_pair demo_requests families pools",
    "sglang_parse/telemetry/*": "prometheus requests",
    "sglang_parse/startup/*": "documents options serve calibrate wheel families states defaults",
    "sglang_parse/__init__.py": "documents wheel",
    "sglang_parse/algorithm.py": "documents serve disaggregation",
    "sglang_parse/cli.py": "documents wheel",
    "sglang_parse/context.py": f"{STEP} call_direction",
    "sglang_parse/device.py": STEP,
    "sglang_parse/plugin.py": "documents serve wheel",
    "sglang_parse/frontend.py": "demo_programs documents",
    "sglang_parse/client/*": f"{PROGRAMS} explain_page compare_page",
    "sglang_parse/tasks/*": "calibrate train_judge compare",
    "sglang_parse/compare/*": "compare load compare_page documents",
    "sglang_parse/bench/*": "documents",
    "sglang_parse/shapes/*": "documents",
    "sglang_parse/models/*": "documents",
    "sglang_parse/roofline/*": "documents",
    "sglang_parse/calibrate/*": "calibrate compare_page documents",
    "sglang_parse/train_judge/*": "train_judge documents",
    "sglang_parse/doctor/*": "doctor_and_explain documents",
    "sglang_parse/trial/*": "try documents",
    "sglang_parse/explain/*": "doctor_and_explain explain_page documents",
    "patches/*": "requests malformed fallbacks stops streams aborts logprobs sampling predictions",
    "patches/parse/request_*.py": "extreme_numbers",
    "patches/parse/kv_by_phase.py": "sessions",
    "patches/cpu/*": "stock_speculative eagle3_continuation lora families mtp",
    "patches/README.md": "",
    "examples/*": "documents demo_programs router predictions",
    "examples/real/*": "demo_real real_pair",
    "examples/real_pair/*": "real_pair",
    "docs/*": "documents",
    "README.md": "documents",
    "tests/support/*": STEP,
    "tests/support/plugins/cpu_families/*": "families pools states disaggregation defaults",
    "tests/soak/*": "soak",
}


def affected_by(path: str) -> set[str]:
    """Returns file names in tests/e2e."""
    names = {
        f"test_{name}.py"
        for pattern, listed in AFFECTED.items()
        if fnmatch(path, pattern)
        for name in listed.split()
    }
    return names | ({Path(path).name} if fnmatch(path, "tests/e2e/test_*.py") else set())


def changed_since(base: str) -> Iterator[str]:
    for command in (("diff", "--name-only", base), ("ls-files", "--others", "--exclude-standard")):
        yield from subprocess.check_output(("git", *command), cwd=ROOT, text=True).splitlines()


def main(paths: Iterable[str]) -> None:
    found = sorted(set().union(*map(affected_by, paths)))
    print(*(f"tests/e2e/{name}" for name in found if (E2E / name).exists()))


if __name__ == "__main__":
    main(changed_since(sys.argv[1]))
