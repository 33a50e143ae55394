import numpy as np
from tokenizers import Tokenizer

from paceline.checkpoints.corpus import SourceFile
from training.batches import CHUNK_TOKENS, TokenStore, encode_documents
from training.demo import exchanges
from training.tokenizer import BEGIN_ID, END_ID


def make_store(num_chunks: int) -> TokenStore:
    tokens = np.arange(10, (num_chunks + 1) * CHUNK_TOKENS + 12, dtype=np.uint32)
    return TokenStore(tokens=tokens, seed=3)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    store = make_store(8)
    first = store.batch(5, 2 * CHUNK_TOKENS, 256)
    store.batch(6, 2 * CHUNK_TOKENS, 256)
    assert (first == make_store(8).batch(5, 2 * CHUNK_TOKENS, 256)).all()


def test_rows_of_any_length_are_the_same_text_with_one_label_more_than_inputs() -> None:
    store = make_store(8)
    short, long = (store.batch(2, 2 * CHUNK_TOKENS, length)[:, 1:] for length in (256, 1024))
    assert short.shape == (8, 256)
    assert (short[:, 1:] - short[:, :-1] == 1).all()
    assert (short.flatten().sort().values == long.flatten().sort().values).all()


def test_one_epoch_reads_every_chunk_once() -> None:
    store = make_store(8)
    labels = [store.batch(step, CHUNK_TOKENS, 1024)[0, 1:] for step in range(store.num_chunks)]
    assert len({int(row[0]) for row in labels}) == store.num_chunks


def test_documents_and_chats_stand_between_begin_and_end(tokenizer: Tokenizer) -> None:
    source = 'def f():\n    """Return nothing.\n\n    Never.\n    """\n'
    chats = exchanges((SourceFile(path="f.py", text=source),), limit=10)
    row = encode_documents(tokenizer, ["x = 1\n", *chats], BEGIN_ID, END_ID, seed=0).tokens.tolist()
    assert row.count(BEGIN_ID) == row.count(END_ID) == 2
    assert (row[0], row[-1]) == (BEGIN_ID, END_ID)
    text = tokenizer.decode(row, skip_special_tokens=False)
    assert "<|begin|><|user|>\nWrite f: Return nothing.\n<|assistant|>\ndef f():" in text
