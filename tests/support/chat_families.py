"""Small tokenizers and chat templates in the formats of common model families.

Special tokens, order, whitespace, trimming and dropping follow the real models; vocabularies and
templates are made here.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang_parse.core.question import DEFAULT_QUESTION_FILE, QuestionWording

QUESTIONS = DEFAULT_QUESTION_FILE.parent
VOCAB_SIZE = 600
# As in these families, newlines merge with each other and a preceding mark, not with words.
PIECES = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")

LINE_ENDS = pre_tokenizers.Split("\n", "isolated")


@dataclass(frozen=True)
class Family:
    """One chat-template family.

    Attributes:
        question: file in ``sglang_parse/questions``.
        template: Jinja, as in ``tokenizer_config.json``.
        special: special tokens.
        thinking: added tokens that are not special.
        eos: token that ends an assistant turn.
        kind: tokenizer kind, see ``_trained``.
    """

    name: str
    question: str
    template: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    thinking: tuple[str, ...] = ()
    kind: str = "bytes"

    @property
    def wording(self) -> QuestionWording:
        return QuestionWording.read(QUESTIONS / f"{self.question}.json")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Returns a new tokenizer, which tests may change."""
        raw = _raw_tokenizer(self.kind, self.special)
        raw.add_tokens(list(self.thinking))
        return PreTrainedTokenizerFast(
            tokenizer_object=raw,
            bos_token=self.bos,
            eos_token=self.eos,
            additional_special_tokens=list(self.special),
            chat_template=self.template,
            clean_up_tokenization_spaces=False,
        )


def _texts() -> list[str]:
    words = ["Yes", "No", "user", "assistant", "system", "model", "Correct", "step", "answer"]
    wordings = [path.read_text() for path in sorted(QUESTIONS.glob("*.json"))]
    return [f"{word}\n{word} {word}.\n\n" for word in words] * 50 + wordings


@cache
def _trained(kind: str, special: tuple[str, ...]) -> str:
    """Returns a trained tokenizer as JSON.

    Kinds: ``bytes`` is byte-level BPE (Qwen, Llama 3, Mistral since Tekken); ``space`` is
    SentencePiece with a space added before the text (Mistral up to v0.3); ``plain`` is without it
    (Gemma).
    """
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "show_progress": False}
    options["initial_alphabet"] = list(string.printable)
    raw = Tokenizer(models.BPE())
    if kind == "bytes":
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(PIECES, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        raw.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = sorted(pre_tokenizers.ByteLevel.alphabet())
    elif kind == "space":
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="first", split=True), LINE_ENDS]
        )
        raw.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        raw.normalizer = normalizers.Replace(" ", "\u2581")
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split("\u2581", "merged_with_next"), LINE_ENDS]
        )
        raw.decoder = decoders.Replace("\u2581", " ")
    trainer = trainers.BpeTrainer(special_tokens=list(special), **options)
    raw.train_from_iterator(_texts(), trainer)
    return raw.to_str()


def _raw_tokenizer(kind: str, special: tuple[str, ...]) -> Tokenizer:
    return Tokenizer.from_str(_trained(kind, special))


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Qwen3: shows reasoning only after the last user turn; a reply without thinking starts with an
# empty block.
QWEN3 = """\
{%- set place = namespace(asked=-1) %}
{%- for message in messages if message.role == 'user' %}
  {%- set place.asked = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\\n' }}
  {%- if message.role == 'assistant' %}
    {%- set said = message.content %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if '</think>' in said %}
      {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > place.asked %}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- said }}
  {%- else %}
    {{- message.content }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}"""

# Models that always think (Qwen3-Thinking): every reply starts inside a block.
QWEN3_ALWAYS = QWEN3.partition("{%- if enable_thinking")[0].rstrip() + (
    "\n  {{- '<think>\\n' }}\n{%- endif %}"
)

# DeepSeek-R1: no newlines between turns, only the answer's turn has an end token; drops reasoning.
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "<\uff5cUser\uff5c>{{ message.content }}{% elif message.role == 'assistant' %}"
    "<\uff5cAssistant\uff5c>{{ message.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n"
    "{% endif %}"
)

# Llama 3: always has a system turn with dates; trims contents.
LLAMA3 = """\
{{- bos_token }}
{%- set said = 'Answer briefly.' %}
{%- if messages[0].role == 'system' %}
  {%- set said = messages[0].content %}
  {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 1 May 2026\\n\\n' }}
{{- said | trim + '<|eot_id|>' }}
{%- for message in messages %}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
  {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Mistral: [INST] instead of roles, alternating turns; system text goes into the last user turn.
_MISTRAL = """\
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
  {%- set system = messages[0].content + '\\n\\n' %}
  {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate') }}
  {%- endif %}
  {%- if message.role == 'user' %}
    {{- '[INST]SPACE' + (system if loop.last else '') + message.content + '[/INST]' }}
  {%- else %}
    {{- 'SPACE' + message.content | trim + eos_token }}
  {%- endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace("SPACE", " ")
MISTRAL_TEKKEN = _MISTRAL.replace("SPACE", "")

# Gemma: the assistant is called "model", a system turn is an error; trims contents.
GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('roles must alternate, no system role') }}
  {%- endif %}
  {%- set role = 'model' if message.role == 'assistant' else message.role %}
  {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

_QWEN = {
    "special": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "eos": "<|im_end|>",
}
_THINK = ("<think>", "</think>")
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", "chatml", CHATML, **_QWEN),
        Family("qwen3", "chatml", QWEN3, thinking=_THINK, **_QWEN),
        Family("qwen3-thinking", "qwen3_thinking", QWEN3, thinking=_THINK, **_QWEN),
        Family("qwen3-always", "qwen3_thinking", QWEN3_ALWAYS, thinking=_THINK, **_QWEN),
        Family(
            "deepseek-r1",
            "qwen3_thinking",
            DEEPSEEK_R1,
            special=("<s>", "<|end|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
            eos="<|end|>",
            bos="<s>",
            thinking=_THINK,
        ),
        Family(
            "llama3",
            "llama3",
            LLAMA3,
            special=(
                *("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
                *("<|start_header_id|>", "<|end_header_id|>"),
            ),
            eos="<|eot_id|>",
            bos="<|begin_of_text|>",
        ),
        Family(
            "mistral",
            "mistral",
            MISTRAL,
            special=("<s>", "</s>", "[INST]", "[/INST]"),
            eos="</s>",
            bos="<s>",
            kind="space",
        ),
        Family(
            "mistral-tekken",
            "mistral",
            MISTRAL_TEKKEN,
            special=("<s>", "</s>", "[INST]", "[/INST]"),
            eos="</s>",
            bos="<s>",
        ),
        Family(
            "gemma",
            "gemma",
            GEMMA,
            special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            eos="<end_of_turn>",
            bos="<bos>",
            kind="plain",
        ),
    )
}
