"""A tokenizer small enough to train in a test, saved as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs",
    "def main(): return 42  # naïve café, 日本語 and 😀 too",
]
BEGIN = "<|begin|>"
END = "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] == 'tool' %}\n"
    "        {{ raise_exception('no tools here') }}\n"
    "    {% endif %}\n"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(vocab_size: int = 320) -> Tokenizer:
    """Returns a byte-level BPE tokenizer that puts a begin token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    return tokenizer


def save_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes tokenizer.json and tokenizer_config.json and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    train().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BEGIN, "eos_token": {"__type": "AddedToken", "content": END, "special": True}}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
