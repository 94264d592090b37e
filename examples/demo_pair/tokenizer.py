"""Make the one tokenizer both models share: byte-level BPE, digits apart, ChatML template.

Byte-level, so any text round-trips; trained on the task's own texts, so that its frequent words
(and those of the chat roles and of the question) are single tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from problems import ANY, draw_problem, write_answer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 448
END_OF_TURN, START_OF_TURN, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A line label, a digit, a line end, a word with its commas and spaces, or a run of anything else
# ("+", "=", spaces).
PIECES = Regex(r"[a-z]: |[0-9]|\n|[,.]? ?[A-Za-z]+(?:, | |,)?|[^0-9A-Za-z\n]+")
ROLES = "user\nassistant\nsystem\n"


def question_texts() -> dict[str, str]:
    """The question's wording and verdict words, the file the engine reads too."""
    return json.loads((HERE / "question.json").read_text())


def _corpus() -> list[str]:
    """Task texts and the words that must be single tokens, those many times."""
    rng = random.Random("tokenizer")
    problems = [draw_problem(rng, held_out=False) for _ in range(600)]
    others = [ROLES, *question_texts().values()]
    texts = [p.text + "\n" + write_answer(p, rng, [ANY]) for p in problems]
    return texts + others * 100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train and wrap the tokenizer; deterministic."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=END_OF_TURN,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    """Write the tokenizer files to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    make_tokenizer().save_pretrained(parser.parse_args().out)


if __name__ == "__main__":
    main()
