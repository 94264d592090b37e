"""Teach a draft model to write several tokens a forward, as PARD does (AMD-AGI/PARD).

    python examples/parallel_draft.py --model Qwen/Qwen3-0.6B --data conversations.jsonl \
        --output-dir parallel-draft --num-train-epochs 3 --learning-rate 3e-5 --bf16

One token that no text holds is the mask. Behind a token of the text, the anchor, stand
`block - 1` masks: they see the text up to their anchor and the masks before them, sit at the
positions that follow, and each learns the token one place further on; the anchor itself learns the
next one as ever. Depth d is a row's distance behind its anchor, 0 for the anchor.

The draft learns what it writes itself (`--answers own`): it is its own tokens that it has to
foresee when it is served, and so its text stays as it was. All flags of transformers'
`TrainingArguments` are taken. The saved folder is an ordinary checkpoint whose config names the
mask token as PARD's do (`pard_token`); SGLang and vLLM load it as any other draft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import qlen_only_mask

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and its answer, and how many of them are the prompt's."""

    ids: list[int]
    num_prompt: int

    @property
    def anchors(self) -> range:
        """Places whose next token is the answer's."""
        return range(self.num_prompt - 1, len(self.ids) - 1)


def pack(
    texts: Sequence[Text], anchors: Sequence[Sequence[int]], block: int, mask_id: int
) -> dict[str, torch.Tensor]:
    """One row of a batch per text: the text, then `block - 1` masks per anchor, in order.

    The rows are those a server sends: masks are laid out as questions behind a draft.

    Args:
        texts: at least one.
        anchors: per text, places in it; see `Text.anchors`.
        block: tokens a forward, at least 2.
        mask_id: id of the mask token.

    Returns:
        input_ids, position_ids: int64 [texts, rows], padded at the right.
        attention_mask: bool [texts, 1, rows, rows]; a padding row sees itself.
        labels: int64 [texts, rows], the text's token one place further on; IGNORE in the prompt
            and past the text's end.
        depths: int64 [texts, rows].
    """
    layouts = [_layout(text, places, block) for text, places in zip(texts, anchors, strict=True)]
    shape = len(texts), max(layout.num_rows for layout in layouts)
    batch = {
        "input_ids": torch.full(shape, mask_id),
        "position_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1, 1),
        "labels": torch.full(shape, IGNORE),
        "depths": torch.zeros(shape, dtype=torch.long),
    }
    for index, (text, layout) in enumerate(zip(texts, layouts, strict=True)):
        num_text, num_rows = layout.num_draft_rows, layout.num_rows
        positions = torch.tensor(layout.positions())
        following = torch.tensor([*text.ids[1:], *[IGNORE] * (block + 1)])
        following[: text.num_prompt - 1] = IGNORE
        batch["input_ids"][index, :num_text] = torch.tensor(text.ids)
        batch["position_ids"][index, :num_rows] = positions
        batch["attention_mask"][index, 0, :num_rows, :num_rows] = qlen_only_mask(layout)
        batch["labels"][index, :num_rows] = following[positions]
        runs = torch.arange(1, block).repeat(layout.num_questions)
        batch["depths"][index, num_text:num_rows] = runs
    return batch


def _layout(text: Text, anchors: Sequence[int], block: int) -> RequestLayout:
    return RequestLayout(
        prefix_len=0,
        num_draft_rows=len(text.ids),
        visible_lens=tuple(anchor + 1 for anchor in anchors),
        question_lens=(block - 1,) * len(anchors),
    )


class BlockTrainer(Trainer):
    """Next tokens of the text and tokens behind the masks; logs the share of right ones by depth.

    The texts' own next tokens weigh twice all masks together: the draft is to write what it wrote.
    """

    TEXT_WEIGHT = 2.0

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, also with accumulation
        self.hits: dict[int, float] = {}

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any
    ) -> torch.Tensor:
        """Called by the Trainer with a batch of `pack`."""
        labels, depths = inputs["labels"], inputs["depths"]
        read = (labels != IGNORE).any(dim=0).nonzero().flatten()  # where any text has a label
        logits = model(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            attention_mask=inputs["attention_mask"],
            logits_to_keep=read,
            use_cache=False,
        ).logits
        wanted = labels[:, read]
        is_wanted = wanted != IGNORE
        said, wanted, depths = logits[is_wanted], wanted[is_wanted], depths[:, read][is_wanted]
        self._record(said.argmax(-1) == wanted, depths)
        losses = functional.cross_entropy(said.float(), wanted, reduction="none")
        is_text = depths == 0
        return self.TEXT_WEIGHT * losses[is_text].mean() + losses[~is_text].mean()

    def _record(self, hits: torch.Tensor, depths: torch.Tensor) -> None:
        for depth in depths.unique().tolist():
            share = hits[depths == depth].float().mean().item()
            self.hits[depth] = 0.9 * self.hits.get(depth, share) + 0.1 * share

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Called by the Trainer every `logging_steps`."""
        shares = {f"depth_{depth}": round(share, 4) for depth, share in sorted(self.hits.items())}
        super().log({**logs, **shares}, start_time)


@torch.inference_mode()
def right_by_depth(
    lm: Any, text: Text, block: int, mask_id: int, together: int = 64
) -> torch.Tensor:
    """What a block at every place of an answer would foresee: bool [anchors, block].

    `together` anchors at a time: each adds `block - 1` rows to a forward.
    """
    parts = []
    for start in range(0, len(text.anchors), together):
        anchors = list(text.anchors[start : start + together])
        batch = pack([text], [anchors], block, mask_id)
        logits = lm(
            input_ids=batch["input_ids"].to(lm.device),
            position_ids=batch["position_ids"].to(lm.device),
            attention_mask=batch["attention_mask"].to(lm.device),
            use_cache=False,
        ).logits[0]
        hits = logits.argmax(-1).cpu() == batch["labels"][0]
        masks = hits[len(text.ids) :].view(len(anchors), block - 1)
        parts.append(torch.cat([hits[anchors, None], masks], dim=1))
    return torch.cat(parts)


def num_forwards(right: torch.Tensor, *, behind_every: bool) -> int:
    """Forwards for an answer when the draft verifies its own blocks, greedily.

    A forward draws one token and proposes the next ones; the forward after it verifies these, and
    draws the one behind those that stand.

    Args:
        right: bool [anchors, block] of `right_by_depth`.
        behind_every: masks stand behind every candidate; else behind the last only, and a block
            of which a part fails is followed by a forward without candidates.
    """
    whole, last = right.shape[1], len(right) - 1
    standing = right.long().cumprod(dim=1).sum(dim=1).clamp(min=1).tolist()
    drawn, forwards = 0, 1
    while drawn < last:
        is_whole = standing[drawn] == whole
        drawn, forwards = drawn + standing[drawn], forwards + 1
        if not (behind_every or is_whole) and drawn < last:
            drawn, forwards = drawn + 1, forwards + 1
    return forwards


def name_mask(lm: PreTrainedModel, mask_id: int) -> None:
    """Write the mask token into the model's config, under the names PARD's checkpoints have."""
    lm.config.pard_token = mask_id
    lm.config.spd_type = "pard"


def find_mask(tokenizer: Any, vocab_size: int, token: str | None) -> int:
    """Id of the mask token: the one named, else one that the model has and the tokenizer lacks.

    Raises:
        ValueError: no such token.
    """
    if token is None:
        if len(tokenizer) >= vocab_size:
            raise ValueError(
                f"every one of the model's {vocab_size} token ids is in use: name a token that no "
                "text holds with --mask-token, as <|reserved_special_token_0|> of Llama 3"
            )
        return vocab_size - 1
    mask_id = tokenizer.convert_tokens_to_ids(token)
    if mask_id is None or mask_id == tokenizer.unk_token_id:
        raise ValueError(f"--mask-token {token!r} is no single token of this tokenizer")
    return mask_id


# -- the command --------------------------------------------------------------------


@dataclass
class Recipe:
    """What is taught, beside transformers' own arguments."""

    model: str = field(metadata={"help": "the draft: a folder, or a name on the hub"})
    data: str = field(
        metadata={"help": 'JSON lines: {"messages": [{"role": ..., "content": ...}, ...]}'}
    )
    answers: Literal["own", "given"] = field(
        default="own",
        metadata={"help": "own: the draft answers each last user turn, greedily; given: data's"},
    )
    block: int = field(default=8, metadata={"help": "tokens a forward, masks included"})
    anchors: int = field(default=32, metadata={"help": "mask runs per text and step"})
    mask_token: str | None = field(
        default=None,
        metadata={"help": "a token no text holds; default: an id the tokenizer lacks"},
    )
    max_length: int = field(default=2048, metadata={"help": "tokens of a text, cut there"})
    max_new_tokens: int = field(default=512, metadata={"help": "of an own answer"})
    write_batch: int = field(default=16, metadata={"help": "own answers written at a time"})
    held_out: int = field(default=32, metadata={"help": "conversations kept for the figures"})


@dataclass(frozen=True, slots=True)
class PackTexts:
    """The Trainer's collator: anchors are drawn anew each time a text is used.

    Never an answer's last place, whose masks would stand behind its end.
    """

    block: int
    anchors: int
    mask_id: int

    def __call__(self, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
        return pack(texts, [self._draw(text) for text in texts], self.block, self.mask_id)

    def _draw(self, text: Text) -> list[int]:
        order = torch.randperm(len(text.anchors) - 1)[: self.anchors]
        return [text.anchors[place] for place in order.tolist()]


def read_texts(recipe: Recipe, lm: Any, tokenizer: Any) -> list[Text]:
    """The conversations as prompts and answers.

    Raises:
        ValueError: a conversation has no turns of the kind that is needed.
    """
    prompts, answers = [], []
    for number, line in enumerate(Path(recipe.data).read_text("utf-8").splitlines(), 1):
        turns = json.loads(line)["messages"]
        last = next((i for i in reversed(range(len(turns))) if turns[i]["role"] == "user"), None)
        answer = turns[last + 1 : last + 2] if last is not None else []
        if last is None or (recipe.answers == "given" and not answer):
            raise ValueError(
                f"{recipe.data}: line {number} has no user turn"
                + (" with an answer behind it (or take --answers own)" if last is not None else "")
            )
        prompts.append(
            tokenizer.apply_chat_template(
                turns[: last + 1], add_generation_prompt=True, tokenize=False
            )
        )
        answers += [turn["content"] + tokenizer.eos_token for turn in answer]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    if recipe.answers == "own":
        answer_ids = write_own(recipe, lm, tokenizer, prompt_ids)
    else:
        answer_ids = tokenizer(answers, add_special_tokens=False)["input_ids"]
    texts = [
        Text((prompt + answer)[: recipe.max_length], len(prompt))
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True)
    ]
    return [text for text in texts if len(text.anchors) > 1]


@torch.inference_mode()
def write_own(
    recipe: Recipe, lm: Any, tokenizer: Any, prompt_ids: Sequence[list[int]]
) -> list[list[int]]:
    """The draft's greedy answers, in the prompts' order; prompts of like length go together."""
    order = sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
    answers: dict[int, list[int]] = {}
    for start in range(0, len(order), recipe.write_batch):
        some = order[start : start + recipe.write_batch]
        batch = tokenizer.pad(
            {"input_ids": [prompt_ids[index] for index in some]},
            padding_side="left",
            return_tensors="pt",
        ).to(lm.device)
        rows = lm.generate(
            **batch,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=recipe.max_new_tokens,
                eos_token_id=lm.generation_config.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            ),
        )
        written = rows[:, batch["input_ids"].shape[1] :].tolist()
        answers.update((index, _to_end(row, lm)) for index, row in zip(some, written, strict=True))
    return [answers[index] for index in range(len(prompt_ids))]


def _to_end(row: list[int], lm: Any) -> list[int]:
    """An answer up to its end token, which is kept; all of it where there is none."""
    ends = lm.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def score_blocks(lm: Any, texts: Sequence[Text], block: int, mask_id: int) -> dict[str, Any]:
    """Right tokens by depth, and tokens a forward when the draft verifies its own blocks."""
    right = [right_by_depth(lm, text, block, mask_id) for text in texts]
    num_tokens = sum(len(r) for r in right)
    shares = [torch.cat([r[: len(r) - d, d] for r in right]).float().mean() for d in range(block)]
    return {
        "texts": len(right),
        "right_by_depth": [round(share.item(), 4) for share in shares],
        "tokens_per_forward": {
            f"{size}, masks behind {name}": round(
                num_tokens
                / sum(num_forwards(r[:, :size], behind_every=name == "every") for r in right),
                3,
            )
            for size in sorted({2, 4, block})
            for name in ("every", "last")
        },
    }


def main() -> None:
    """Command line."""
    recipe, arguments = HfArgumentParser((Recipe, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    stored_dtype = AutoConfig.from_pretrained(recipe.model).dtype
    lm = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32)
    lm.to(arguments.device)
    mask_id = find_mask(tokenizer, lm.config.vocab_size, recipe.mask_token)
    texts = read_texts(recipe, lm, tokenizer)
    kept, taught = texts[: recipe.held_out], texts[recipe.held_out :]
    if not taught:
        raise ValueError(
            f"{recipe.data} has {len(texts)} conversations with an answer of two tokens or more; "
            f"--held-out {recipe.held_out} leaves none to learn from: give more, or hold out fewer"
        )
    arguments.remove_unused_columns = False
    arguments.use_cache = True  # it is written into the model's config; the loss asks for none
    trainer = BlockTrainer(
        model=lm,
        args=arguments,
        train_dataset=taught,
        data_collator=PackTexts(recipe.block, recipe.anchors, mask_id),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    if trainer.is_world_process_zero():
        lm.eval()
        name_mask(lm, mask_id)
        lm.to(stored_dtype or torch.float32).save_pretrained(arguments.output_dir)
        tokenizer.save_pretrained(arguments.output_dir)
        print(json.dumps(score_blocks(lm.float(), kept, recipe.block, mask_id), indent=2))


if __name__ == "__main__":
    main()
