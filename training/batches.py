"""Token batches as a pure function of seed and step, so that resuming needs no iterator state."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from training.tokenizer import BEGIN_ID

CHUNK_TOKENS = 1024
BEGIN_SHARE = 0.5
"""Share of chunks whose first token is replaced by <|begin|>: prompts begin in mid-file too."""


Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """A long row of token ids, cut into chunks of `CHUNK_TOKENS` when batches are drawn."""

    tokens: np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]
    seed: int
    begin_id: int | None = BEGIN_ID

    @property
    def num_chunks(self) -> int:
        """Chunks in one epoch; one is given up so that every epoch can start at an offset."""
        return max(1, (len(self.tokens) - CHUNK_TOKENS - 1) // CHUNK_TOKENS)

    def batch(self, step: int, batch_tokens: int, sequence_tokens: int) -> torch.Tensor:
        """Ids `[batch, sequence_tokens + 1]`; the extra token is the last label.

        Args:
            step: 0 for the first batch of the run.
            batch_tokens: a multiple of `CHUNK_TOKENS`.
            sequence_tokens: a divisor of `CHUNK_TOKENS`.
        """
        per_step = batch_tokens // CHUNK_TOKENS
        rows = [
            row for index in range(step * per_step, (step + 1) * per_step) for row in self._rows(index, sequence_tokens)
        ]
        return torch.from_numpy(np.stack(rows))

    def _rows(self, index: int, sequence_tokens: int) -> list[Ids]:
        epoch, place = divmod(index, self.num_chunks)
        order, offset = _epoch_order(self.seed, epoch, self.num_chunks)
        start = offset + int(order[place]) * CHUNK_TOKENS
        chunk = self.tokens[start : start + CHUNK_TOKENS + 1].astype(np.int64)
        coin = np.random.default_rng((self.seed, 2, index)).random()
        if self.begin_id is not None and coin < BEGIN_SHARE:
            chunk[0] = self.begin_id
        return [chunk[at : at + sequence_tokens + 1] for at in range(0, CHUNK_TOKENS, sequence_tokens)]


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_chunks: int) -> tuple[Ids, int]:
    rng = np.random.default_rng((seed, 1, epoch))
    offset = int(rng.integers(CHUNK_TOKENS)) if epoch else 0
    return rng.permutation(num_chunks), offset


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], begin_id: int | None, end_id: int | None, seed: int
) -> TokenStore:
    """Pack shuffled documents, each between begin and end token, into one row of ids.

    Args:
        tokenizer: of the checkpoint.
        texts: the documents.
        begin_id: None if the tokenizer has no such token.
        end_id: None if the tokenizer has no such token.
        seed: of the order.
    """
    begin: list[int] = [] if begin_id is None else [begin_id]
    end: list[int] = [] if end_id is None else [end_id]
    # In one batch, so that the tokenizer uses all cores.
    documents = [row.ids for row in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    order = np.random.default_rng((seed, 0)).permutation(len(documents))
    row = [token for place in order for token in (*begin, *documents[place], *end)]
    return TokenStore(tokens=np.asarray(row, dtype=np.uint32), seed=seed, begin_id=begin_id)


def save_store(store: TokenStore, path: Path) -> None:
    """Keep the packed ids, so that a resumed run sees the same row."""
    np.save(path, store.tokens)


def load_store(path: Path, seed: int) -> TokenStore:
    """Read what `save_store` wrote.

    Raises:
        FileNotFoundError: no such file.
    """
    return TokenStore(tokens=np.load(path), seed=seed)
