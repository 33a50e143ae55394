import numpy as np

from training.batches import CHUNK_TOKENS, TokenStore


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
