"""The launcher's checks of a PARSE server, without a process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.demo_pair import DEMO

QUESTION = str(DEMO / "question.json")
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
DSA = {"index_topk": 64, "index_head_dim": 32, "index_n_heads": 4, **LATENT}
V4 = DSA | {"num_hash_layers": 1, "sliding_window": 128, "compress_ratios": [0, 4, 128, 0]}


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


def other_model(source: Path, folder: Path, kind: tuple[str, str], **config: object) -> Path:
    """A copy of a small model's folder whose config.json is of another ``(model type, class)``."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384}
    names = {"model_type": kind[0], "architectures": [kind[1]], "dtype": "float32"}
    shutil.copytree(source, folder)
    length = {"max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(sizes | names | length | config))
    return folder


def changed(source: Path, folder: Path, **config: object) -> Path:
    """A copy of a model folder with other values in its config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder
