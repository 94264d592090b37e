"""A draft model is served as its own class, with its KV under the target's slot numbers and the
target's token ids (ledger: draft_models)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_parse.algorithm import is_parse, names_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Patch, after, around

_MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig"
_EMBEDDING = "sglang.srt.layers.vocab_parallel_embedding.VocabParallelEmbedding"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"


def _is_draft(config: Any) -> bool:
    return config.is_draft_model and names_parse(config) and not process_context().loads_mtp


def _keep_class(original: Callable, self: Any) -> None:
    if not _is_draft(self):
        original(self)


def _derive_shapes(_result: None, self: Any) -> None:
    if not _is_draft(self):
        return
    self.num_nextn_predict_layers = None
    context, text = process_context(), self.hf_text_config
    if context.target_rows not in (0, text.vocab_size):
        context.draft_rows = text.vocab_size
        self.vocab_size = text.vocab_size = context.target_rows


def _fit_shard(original: Callable, self: Any, param: Any, loaded_weight: Any) -> None:
    dim = getattr(param, "output_dim", None)
    original(self, param, _fitted(loaded_weight, dim, self.org_vocab_size))


def _fit_whole(original: Callable, param: Any, loaded_weight: Any) -> None:
    original(param, _fitted(loaded_weight, 0, param.shape[0] if param.ndim == 2 else 0))


def _fitted(weight: Any, dim: Any, num_rows: int) -> Any:
    """With the target's rows, of a draft's weight with its own, for a parameter of ``num_rows``."""
    context = process_context()
    found, wanted = context.draft_rows, context.target_rows
    has_rows = found and dim is not None and dim < weight.ndim
    if not has_rows or (weight.shape[dim], num_rows) != (found, wanted):
        return weight
    known = weight.narrow(dim, 0, min(found, wanted))
    shape = [*known.shape]
    shape[dim] = wanted - known.shape[dim]
    return torch.cat((known, known.new_zeros(shape)), dim)


def _use_one_pool(_result: None, self: Any) -> None:
    # Windows with other heads than the rest of the layers need a pool of their own.
    if _is_draft(self) and not self.is_hybrid_swa_compress:
        self.is_hybrid_swa = False
        self.swa_attention_layer_ids = self.full_attention_layer_ids = None


def _keep_all_windows(_result: None, self: Any) -> None:
    if self.is_draft_worker and is_parse(self.spec_algorithm) and self.model_config.is_hybrid_swa:
        self.draft_swa_full_capacity = True


PATCH = Patch(
    "draft_models",
    {
        f"{_MODEL_CONFIG}._config_draft_model": around(_keep_class),
        f"{_MODEL_CONFIG}._derive_model_shapes": after(_derive_shapes),
        f"{_MODEL_CONFIG}._derive_hybrid_model": after(_use_one_pool),
        f"{_CONFIGURATOR}.__post_init__": after(_keep_all_windows),
        f"{_EMBEDDING}.weight_loader": around(_fit_shard),
        "sglang.srt.model_loader.weight_utils.default_weight_loader": around(_fit_whole),
    },
    why="SGLang takes a draft model of some families (Qwen3-MoE, GLM-4.5, Ernie 4.5 and others) "
    "for the checkpoint of an MTP head: it renames the architecture to the head's, whose forward "
    "fails without the target's hidden states, and counts the head's layers. The layers of a draft "
    "with windows (gpt-oss, Gemma 4) would share the slots of the target's window pool: when the "
    "draft model is prefilled, those of tokens before the target's window are freed already. "
    "Models with one tokenizer have embeddings of different sizes: padding (Qwen2.5, Gemma 3).",
    how="under PARSE a draft model, or an EAGLE-3 head, but no MTP layer, keeps the architecture "
    "and the layers of its config.json. Its KV is in one pool; where windows have other heads "
    "(Gemma 4), in two of the size of the target's larger one, as SGLang gives an MTP head with "
    "windows. Its embedding and LM head, and those of its EAGLE-3 head, get as many rows as the "
    "target's: padding is left out, or is zeros; no draft has a token of it.",
    upstream="not reported; `STANDALONE` renames its draft models, too",
    removed_when="SGLang renames the draft models of the algorithms that use MTP heads only.",
)
