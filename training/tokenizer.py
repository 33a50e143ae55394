"""Byte-level BPE for the demo pair, saved as a Hugging Face tokenizer folder."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BEGIN = "<|begin|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (BEGIN, END, SYSTEM, USER, ASSISTANT)
BEGIN_ID = 0
END_ID = 1

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn merges from the texts; every byte has its own token, so any text round-trips.

    Args:
        texts: training documents.
        vocab_size: number of ids, special tokens and the 256 bytes included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        tokenizer: as `train_tokenizer` made it.
        folder: created where missing.
        max_length: context of the model in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": END_ID},
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
