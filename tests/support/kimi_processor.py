"""A processor of Kimi K2.5 as published, as far as SGLang reads it to serve texts.

Saved beside a tiny model as the code of its repository.
"""

from types import SimpleNamespace
from typing import Any

from transformers import Kimi_K25Processor

IMAGES = {"patch_size": 14, "merge_kernel_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
LIMITS = {"in_patch_limit": 16384, "patch_limit_on_one_side": 512}


class KimiProcessor(Kimi_K25Processor):
    """transformers' has no ``media_processor``."""

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        chat_template: Any = None,
        **named: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, video_processor, chat_template, **named)
        self.media_processor = SimpleNamespace(media_proc_cfg=IMAGES | LIMITS)
