"""An EAGLE-3 head in plain PyTorch: the shape SGLang serves, unrolled as it is at serving time.

Notation: h_t is the target's hidden state at token t (some layers of it, side by side), e_t the
target's embedding of token t. Row t of step k reads e_{t+1+k} beside fc(h_t) for k = 0 or its own
output of step k-1, stands at position t + k, and predicts token t+2+k.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


def aux_layer_ids(num_layers: int) -> list[int]:
    """Target layers whose outputs the head reads: a low one, one in the middle, the last but one.

    Explicit in the head's config: SGLang's default for small targets names one layer twice.

    Raises:
        ValueError: the target has fewer than four layers.
    """
    top = num_layers - 2  # the topmost that SGLang captures
    if top < 2:
        raise ValueError(f"{num_layers} layers are too few, the head reads 3 of all but the last")
    return [top // 4, (top + 1) // 2, top]


def of_target(config: Qwen3Config) -> dict[str, Any]:
    """What the config of a head with one layer takes from its target's."""
    return {
        **{"num_hidden_layers": 1, "hidden_size": config.hidden_size},
        **{"intermediate_size": 2 * config.intermediate_size, "head_dim": config.head_dim},
        **{"vocab_size": config.vocab_size, "rms_norm_eps": config.rms_norm_eps},
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        **{"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id},
        **{"pad_token_id": config.pad_token_id, "tie_word_embeddings": False, "dtype": "bfloat16"},
    }


def head_config(config: Qwen3Config, layer_ids: list[int]) -> LlamaConfig:
    """One Llama layer as wide as the target, twice its heads, over its whole vocabulary.

    Args:
        config: the target's.
        layer_ids: target layers whose outputs the head reads, 0 the lowest.
    """
    return LlamaConfig(
        **of_target(config),
        architectures=["LlamaForCausalLMEagle3"],
        num_attention_heads=2 * config.num_attention_heads,
        num_key_value_heads=2 * config.num_key_value_heads,
        draft_vocab_size=config.vocab_size,
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layer_ids,
        },
    )


class HeadAttention(nn.Module):
    """Attention of a head's only layer.

    Args:
        width: of its input.
        bias: whether queries, keys and values have one.
    """

    def __init__(self, config: PreTrainedConfig, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, query_width, bias=bias)
        self.k_proj = nn.Linear(width, key_width, bias=bias)
        self.v_proj = nn.Linear(width, key_width, bias=bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def project(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values, each [batch, heads, rows, head_dim]."""
        shape = (*x.shape[:2], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (projection(x).view(shape).transpose(1, 2) for projection in projections)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        return q, *(t.repeat_interleave(self.num_groups, dim=1) for t in (k, v))

    def attend(
        self, q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Rows see step 0 up to themselves, and of every later step only their own row."""
        rows = q.shape[2]
        is_later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(q @ keys[0].transpose(2, 3)).masked_fill(is_later, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
        weights = (torch.cat(scores, dim=-1) * self.head_dim**-0.5).softmax(-1)
        own = weights[..., rows:].unbind(-1)
        mixed = weights[..., :rows] @ values[0]
        mixed = mixed + sum(w[..., None] * v for w, v in zip(own, values[1:], strict=True))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class HeadLayer(nn.Module):
    """The head's only layer; the names of its parts are those of an EAGLE-3 checkpoint."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        # Its input is embedding and hidden state side by side.
        self.self_attn = HeadAttention(config, 2 * width)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(width, eps)
        self.hidden_norm = LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)


class EagleHead(nn.Module):
    """The head without the embedding, which it shares with the target."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(self.layer_ids) * width, width, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer_ids(self) -> list[int]:
        """Target layers whose outputs the head reads."""
        return self.config.eagle_config["eagle_aux_hidden_state_layer_ids"]

    def target_states(
        self, target: Qwen3ForCausalLM, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the head reads and what it should say, from one forward of the target.

        Args:
            ids: int64 [batch, T].

        Returns:
            ``h`` [batch, T, layers * width], ``e`` [batch, T, width], logits [batch, T, vocab].
        """
        out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[layer + 1] for layer in self.layer_ids], dim=-1)
        return features, target.model.embed_tokens(ids), target.lm_head(out.last_hidden_state)

    def unroll(
        self, features: torch.Tensor, embeds: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """Logits of every step, fed with the head's own hidden states from step 1 on.

        Args:
            features: float [batch, T, layers * width], ``h_t``.
            embeds: float [batch, T, width], ``e_t``.

        Returns:
            ``num_steps`` times [batch, T - num_steps, vocab].
        """
        num_rows = embeds.shape[1] - num_steps
        hidden = self.fc(features[:, :num_rows])
        keys, values, logits = [], [], []
        layer = self.midlayer
        for step in range(num_steps):
            embed = embeds[:, 1 + step : 1 + step + num_rows]
            both = torch.cat((layer.input_layernorm(embed), layer.hidden_norm(hidden)), dim=-1)
            positions = torch.arange(step, step + num_rows)[None]
            q, k, v = layer.self_attn.project(both, self.rotary(hidden, positions))
            keys.append(k)
            values.append(v)
            hidden = hidden + layer.self_attn.attend(q, keys, values)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits


def save_head(head: EagleHead, folder: Path) -> None:
    """Write the folder SGLang serves: bf16 weights under EAGLE-3's names, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    head.config.save_pretrained(folder)


def load_head(folder: Path) -> EagleHead:
    """The saved bf16 weights, computed with in fp32."""
    config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
    head = EagleHead(config)
    head.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    )
    return head.eval()
