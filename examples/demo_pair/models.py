"""The two model shapes, growth in depth, and the training loss."""

from __future__ import annotations

import copy
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


def grow(lm: Qwen3ForCausalLM, num_layers: int, *, on_top: bool = False) -> Qwen3ForCausalLM:
    """The same function with more layers: new ones add nothing until they are trained.

    A new layer is a copy of the one before it whose two output projections are zero. Training a
    shallow model first is several times cheaper than training all layers from the start.

    Args:
        lm: the shallow model.
        num_layers: depth of the result.
        on_top: put all new layers after the old ones (where a new skill needs the old one's
            result) instead of spreading them between.
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
        source = min(index, old - 1) if on_top else index * old // num_layers
        layer.load_state_dict(lm.model.layers[source].state_dict())
        if source == previous:
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        previous = source
    return grown


@torch.no_grad()
def start_as_comparison(lm: Qwen3ForCausalLM, index: int, texts: torch.Tensor) -> None:
    """Initialise new layer `index` to write (token predicted here before) - (token that is here).

    Both can be read linearly from the state below the layer, but gradient descent needs long to
    find the pair of attention heads that brings them together, so they are set: head 0 looks at
    the token before and carries what the model expects next, head 1 looks at the token itself and
    carries its identity; the difference goes where the language model's head does not read.
    Everything stays trainable.

    Args:
        lm: the grown model; layers below `index` are trained.
        index: a layer whose output projections are zero.
        texts: int64 [batch, length], answers (wrong ones too) to fit the linear readings on.
    """
    layer = lm.model.layers[index]
    out = lm.model(input_ids=texts, output_hidden_states=True, use_cache=False)
    state = functional.rms_norm(out.hidden_states[index], (lm.config.hidden_size,)).flatten(0, 1)
    expected, here = out_tokens(lm, out.last_hidden_state), texts.flatten()
    kinds = here.unique()[:HEAD_DIM]
    attention = layer.self_attn
    layer.input_layernorm.weight.fill_(1.0)
    constant = _linear_reading(state, torch.ones(len(state), 1))
    directions = [_offset_direction(lm.config, offset) for offset in (1, 0)]
    attention.q_proj.weight.copy_(torch.cat([d[:, None] * constant for d in directions]))
    at_zero = _offset_direction(lm.config, 0)
    attention.k_proj.weight.copy_(torch.cat([at_zero[:, None] * constant] * 2))
    attention.q_norm.weight.fill_(4.0)
    attention.k_norm.weight.fill_(4.0)
    attention.v_proj.weight.zero_()
    for head, tokens in enumerate((expected, here)):
        reading = _linear_reading(state, (tokens[:, None] == kinds).float())
        attention.v_proj.weight[head * HEAD_DIM :][: len(kinds)] = reading
    unread = _unread_directions(lm, kinds)[:, : len(kinds)]
    size = out.hidden_states[index].norm(dim=-1).mean()
    attention.o_proj.weight.zero_()
    attention.o_proj.weight[:, : len(kinds)] = unread * size
    attention.o_proj.weight[:, HEAD_DIM : HEAD_DIM + len(kinds)] = -unread * size


def out_tokens(lm: Qwen3ForCausalLM, last_hidden: torch.Tensor) -> torch.Tensor:
    """The model's greedy next token at every place, flat."""
    return lm.lm_head(last_hidden).argmax(-1).flatten()


def _linear_reading(state: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Ridge regression without offset: [wanted columns, state columns]."""
    gram = state.T @ state + len(state) * 1e-4 * torch.eye(state.shape[1])
    return torch.linalg.solve(gram, state.T @ wanted).T


def _offset_direction(config: Qwen3Config, offset: int, num_pairs: int = 8) -> torch.Tensor:
    """A query direction whose product with the key direction of offset 0 peaks `offset` back.

    Only the fastest rotary pairs are used: the slow ones cannot tell neighbours apart.
    """
    half = HEAD_DIM // 2
    theta = config.rope_parameters["rope_theta"]
    angles = -offset * theta ** (-torch.arange(num_pairs) / half)
    direction = torch.zeros(HEAD_DIM)
    direction[:num_pairs] = angles.cos()
    direction[half : half + num_pairs] = angles.sin()
    return direction


def _unread_directions(lm: Qwen3ForCausalLM, kinds: torch.Tensor) -> torch.Tensor:
    """Orthonormal directions [hidden, *] the output head does not read for these tokens."""
    rows = lm.lm_head.weight[kinds] * lm.model.norm.weight
    return torch.linalg.svd(rows, full_matrices=True).Vh[len(kinds) :].T


class TrainedLM(nn.Module):
    """A language model and its loss: next tokens, verdicts, and throw-away error probes.

    Dense labels, after which a verdict row has only a flag to copy: in the upper middle of the
    stack a probe reads "this token is an error, given the text before it", at the end another
    reads "an error has happened so far". They are not part of the saved model.
    """

    PROBE_WEIGHT = 0.5
    ERROR_HERE_WEIGHT = 5.0  # such tokens are rare

    def __init__(self, lm: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.lm = lm
        self.probes = nn.ModuleList(nn.Linear(lm.config.hidden_size, 1) for _ in range(2))
        self.metrics: dict[str, float] = {}

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        is_verdict: torch.Tensor | None = None,
        error_so_far: torch.Tensor | None = None,
        error_here: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Loss of one batch of `data.AnswerBatches` or `data.VerdictBatches`."""
        out = self.lm.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            output_hidden_states=error_so_far is not None,
            use_cache=False,
        )
        hidden = out.last_hidden_state
        is_answer = labels != IGNORE
        if is_verdict is not None:
            is_answer = is_answer & ~is_verdict
        loss = self._token_loss("answer", hidden, labels, is_answer)
        if is_verdict is not None and error_so_far is not None and error_here is not None:
            loss = loss + self._token_loss("verdict", hidden, labels, is_verdict)
            middle = out.hidden_states[len(out.hidden_states) * 3 // 4]
            loss = loss + self._probe_loss("error_here", 0, middle, error_here)
            loss = loss + self._probe_loss("error_so_far", 1, hidden, error_so_far)
        return {"loss": loss}

    def _token_loss(
        self, name: str, hidden: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        logits, wanted = self.lm.lm_head(hidden[rows]), labels[rows]
        self._record(name, logits.argmax(-1) == wanted)
        return functional.cross_entropy(logits, wanted)

    def _probe_loss(
        self, name: str, probe: int, state: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        rows = wanted != IGNORE
        logits, wanted = self.probes[probe](state[rows]).squeeze(-1), wanted[rows]
        if probe == 0:
            weight = torch.where(wanted > 0.5, self.ERROR_HERE_WEIGHT, 1.0)
            self._record(name, (logits > 0)[wanted > 0.5])
        else:
            weight = torch.ones_like(wanted)
            self._record(name, (logits > 0) == (wanted > 0.5))
        losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return self.PROBE_WEIGHT * (losses * weight).sum() / weight.sum()

    def _record(self, name: str, hits: torch.Tensor) -> None:
        """Running accuracy per token, on texts no earlier batch had."""
        accuracy = hits.float().mean().item()
        self.metrics[name] = 0.9 * self.metrics.get(name, accuracy) + 0.1 * accuracy


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
    max_new_tokens: int = 160,
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
