from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from training.tokenizer import BEGIN_ID, END_ID, save_tokenizer, train_tokenizer

TINY = train_tokenizer(["def f(x):\n    return x\n" * 20], 300)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = TINY.encode(text, add_special_tokens=False).ids
    assert TINY.decode(ids, skip_special_tokens=False) == text


def test_the_special_tokens_have_the_ids_the_models_are_configured_with(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.token_to_id("<|begin|>") == BEGIN_ID
    assert tokenizer.token_to_id("<|end|>") == END_ID
    assert tokenizer.encode("x").ids[0] == BEGIN_ID


def test_transformers_loads_the_folder_and_renders_a_chat(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_tokenizer(tokenizer, tmp_path, 2048)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eos_token == "<|end|>"
    assert loaded("def f")["input_ids"] == tokenizer.encode("def f").ids
    messages = [
        {"role": "user", "content": "Write f."},
        {"role": "assistant", "content": "def f(): ..."},
        {"role": "user", "content": "Again."},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|begin|><|user|>\nWrite f.\n<|assistant|>\ndef f(): ...<|end|><|user|>\nAgain.\n<|assistant|>\n")
