"""The two model shapes, growth in depth, the training loss and its optimiser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import IGNORE
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HEAD_DIM = 64  # the smallest FlashInfer serves


def make_lm(
    tokenizer: PreTrainedTokenizerFast, *, num_layers: int, hidden: int, intermediate: int
) -> Qwen3ForCausalLM:
    """A fresh Qwen3 with two heads."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def grow(lm: Qwen3ForCausalLM, num_layers: int) -> Qwen3ForCausalLM:
    """The same function with more layers: new ones add nothing until they are trained.

    A new layer is a copy of the one before it whose two output projections are zero. Training a
    shallow model first is several times cheaper than training all layers from the start.
    """
    old = lm.config.num_hidden_layers
    config = copy.deepcopy(lm.config)
    config.num_hidden_layers = num_layers
    config.layer_types = ["full_attention"] * num_layers
    grown = Qwen3ForCausalLM(config)
    grown.model.embed_tokens.load_state_dict(lm.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(lm.model.norm.state_dict())
    grown.lm_head.load_state_dict(lm.lm_head.state_dict())
    previous = -1
    for index, layer in enumerate(grown.model.layers):
        source = index * old // num_layers
        layer.load_state_dict(lm.model.layers[source].state_dict())
        if source == previous:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        previous = source
    return grown


class TrainedLM(nn.Module):
    """A language model and its loss on next tokens: digits weigh more than words.

    A digit has one right value, a word of a wording is drawn: its loss has a floor that teaches
    nothing.
    """

    WORD_WEIGHT = 0.3

    def __init__(self, lm: Qwen3ForCausalLM, digits: torch.Tensor) -> None:
        super().__init__()
        self.lm = lm
        self.register_buffer("digits", digits)
        self.metrics: dict[str, float] = {}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss of one batch of `data.AnswerBatches`."""
        rows = labels != IGNORE
        hidden = self.lm.model(input_ids=input_ids, use_cache=False).last_hidden_state[rows]
        logits, wanted = self.lm.lm_head(hidden), labels[rows]
        is_digit = torch.isin(wanted, self.digits)
        self._record("digits", (logits.argmax(-1) == wanted)[is_digit])
        losses = functional.cross_entropy(logits, wanted, reduction="none")
        weights = torch.where(is_digit, 1.0, self.WORD_WEIGHT)
        return {"loss": (losses * weights).sum() / weights.sum()}

    def _record(self, name: str, hits: torch.Tensor) -> None:
        """Running accuracy per token, on texts no earlier batch had."""
        accuracy = hits.float().mean().item()
        self.metrics[name] = 0.9 * self.metrics.get(name, accuracy) + 0.1 * accuracy


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for embeddings, LM heads and norms; several times fewer steps."""

    MUON_RATE = 10.0  # times AdamW's

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        words = ("embed_tokens", "lm_head")
        matrices = {
            n: p for n, p in named.items() if p.ndim == 2 and not any(w in n for w in words)
        }
        rest = [p for n, p in named.items() if n not in matrices]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices.values(),
                lr=learning_rate * self.MUON_RATE,
                weight_decay=0.01,
                adjust_lr_fn="original",
            ),
            torch.optim.AdamW(
                rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
            ),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Each part's step on its own group; state is here, so that checkpoints hold it."""
        loss = closure() if closure else None
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]
            part.step()
        return loss


def save_lm(lm: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a served folder: bf16 weights, tokenizer, generation config."""
    rounded = copy.deepcopy(lm).to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_lm(folder: Path) -> Qwen3ForCausalLM:
    """The saved bf16 weights, computed with in fp32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def write_answers(
    lm: Qwen3ForCausalLM,
    tokenizer: Any,
    prompts: torch.Tensor,
    *,
    temperature: float = 0.0,
    max_new_tokens: int = 280,
) -> list[str]:
    """Answers to prompts of one length, [batch, length]; the end token is kept if written."""
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    tokens = lm.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    texts = tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=False)
    return [text.replace(tokenizer.pad_token, "") for text in texts]
