"""Train an EAGLE-3 head for the demo target.

    python examples/demo_pair/train_eagle3.py --pair DIR

Reads DIR/target, writes DIR/eagle3; started again, it resumes from its last checkpoint. Ends with
the accept length on held-out problems.
"""

from __future__ import annotations

from pathlib import Path

from eagle3_head import EagleHead, aux_layer_ids, head_config, load_head, save_head
from head_training import HeadKind, make_head
from transformers import Qwen3ForCausalLM


def start_head(target: Qwen3ForCausalLM) -> EagleHead:
    """The topmost state that it reads goes the target's own way to words."""
    config = target.config
    head = EagleHead(head_config(config, aux_layer_ids(config.num_hidden_layers)))
    head.fc.weight.data.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    head.norm.load_state_dict(target.model.norm.state_dict())
    return head


def load(folder: Path, _target: Qwen3ForCausalLM) -> EagleHead:
    """It has an LM head of its own."""
    return load_head(folder)


if __name__ == "__main__":
    make_head(HeadKind("eagle3", start_head, save_head, load), __doc__.partition("\n")[0])
