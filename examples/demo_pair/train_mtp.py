"""Train a layer for multi-token prediction (MTP) for the demo target.

    python examples/demo_pair/train_mtp.py --pair DIR

Reads DIR/target, writes DIR/mtp; started again, it resumes from its last checkpoint. Ends with the
accept length on held-out problems.
"""

from __future__ import annotations

from head_training import HeadKind, make_head
from mtp_layer import MtpLayer, layer_config, load_layer, save_layer
from transformers import Qwen3ForCausalLM


def start_layer(target: Qwen3ForCausalLM) -> MtpLayer:
    """The hidden state goes through, to the target's words."""
    layer = MtpLayer(layer_config(target.config), target.lm_head)
    layer.input_proj.weight.data.zero_()[:, : target.config.hidden_size].fill_diagonal_(1.0)
    layer.final_layernorm.weight.data.fill_(target.model.norm.weight.square().mean().sqrt())
    return layer


if __name__ == "__main__":
    make_head(HeadKind("mtp", start_layer, save_layer, load_layer), __doc__.partition("\n")[0])
