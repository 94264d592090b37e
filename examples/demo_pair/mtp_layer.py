"""An MTP layer in plain PyTorch: the shape of MiMo's, unrolled as SGLang's NEXTN runs it.

It drafts as an EAGLE-3 head does (`eagle3_head` has the notation), from the target's last hidden
state alone, and with the target's embedding and LM head. SGLang's `MiMoMTP` serves it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from eagle3_head import HeadAttention, of_target
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2MLP,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

PREFIX = "model.mtp_layers.0."
"""What the names of its weights begin with."""


def layer_config(config: Qwen3Config) -> Qwen2Config:
    """One Qwen2 layer as wide as the target, with its heads.

    Args:
        config: the target's.
    """
    return Qwen2Config(
        **of_target(config),
        architectures=["MiMoMTP"],
        num_nextn_predict_layers=1,
        # As many as the hidden size holds: on a CPU SGLang derives this class's head_dim from it.
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
    )


class MtpLayer(nn.Module):
    """The layer; the names of its parts are those of a MiMo checkpoint.

    Args:
        lm_head: the target's, of which it has a frozen copy.
    """

    def __init__(self, config: Qwen2Config, lm_head: nn.Module) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(width, eps)
        self.hidden_layernorm = Qwen2RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.input_layernorm = Qwen2RMSNorm(width, eps)
        self.self_attn = HeadAttention(config, width, bias=True)
        self.post_attention_layernorm = Qwen2RMSNorm(width, eps)
        self.mlp = Qwen2MLP(config)
        self.final_layernorm = Qwen2RMSNorm(width, eps)
        self.lm_head = copy.deepcopy(lm_head).requires_grad_(False)
        self.rotary = Qwen2RotaryEmbedding(config)

    def target_states(
        self, target: Qwen3ForCausalLM, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the layer reads and what it should say, from one forward of the target.

        Args:
            ids: int64 [batch, T].

        Returns:
            ``h`` behind the target's last norm and ``e``, both [batch, T, width], logits
            [batch, T, vocab].
        """
        hidden = target.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden, target.model.embed_tokens(ids), target.lm_head(hidden)

    def unroll(
        self, features: torch.Tensor, embeds: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """Logits of every step, fed with the layer's own output from step 1 on.

        Args:
            features: float [batch, T, width], ``h_t``.
            embeds: float [batch, T, width], ``e_t``.

        Returns:
            ``num_steps`` times [batch, T - num_steps, vocab].
        """
        num_rows = embeds.shape[1] - num_steps
        hidden = features[:, :num_rows]
        keys, values, logits = [], [], []
        for step in range(num_steps):
            positions = torch.arange(step, step + num_rows)[None]
            embed = embeds[:, 1 + step : 1 + step + num_rows]
            embed = embed.masked_fill((positions == 0)[..., None], 0.0)  # as `MiMoMTP` does
            both = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embed)), dim=-1)
            hidden = self.input_proj(both)
            rotary = self.rotary(hidden, positions)
            q, k, v = self.self_attn.project(self.input_layernorm(hidden), rotary)
            keys.append(k)
            values.append(v)
            hidden = hidden + self.self_attn.attend(q, keys, values)
            hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
            hidden = self.final_layernorm(hidden)
            logits.append(self.lm_head(hidden))
        return logits


def save_layer(layer: MtpLayer, folder: Path) -> None:
    """Write the folder SGLang serves: bf16 weights under MiMo's names, and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        PREFIX + name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in layer.state_dict().items()
        if not name.startswith("lm_head.")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    layer.config.save_pretrained(folder)


def load_layer(folder: Path, target: Qwen3ForCausalLM) -> MtpLayer:
    """The saved bf16 weights, computed with in fp32."""
    config = Qwen2Config(**json.loads((folder / "config.json").read_text()))
    layer = MtpLayer(config, target.lm_head)
    weights = load_file(folder / "model.safetensors")
    shared = {f"lm_head.{name}": tensor for name, tensor in target.lm_head.state_dict().items()}
    own = {name.removeprefix(PREFIX): tensor.float() for name, tensor in weights.items()}
    layer.load_state_dict(own | shared)
    return layer.eval()
