"""Random batches as the engines pack them."""

from __future__ import annotations

import numpy as np

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.batch import Batch
from tests.unit.engine.tiny_models import VOCAB, Row, chain, pack

SESSIONS = 6
BLOCKS_EACH = 9
SCRATCH_BLOCKS = 6
ALL_BLOCKS = SESSIONS * BLOCKS_EACH + SCRATCH_BLOCKS


class Traffic:
    """Batches as the engines pack them: chunks, single tokens, and trees with their roots, sessions in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        blocks = self.rng.permutation(ALL_BLOCKS).tolist()
        self.tables = [blocks[each * BLOCKS_EACH :][:BLOCKS_EACH] for each in range(SESSIONS)]
        scratch = blocks[SESSIONS * BLOCKS_EACH :]
        self.scratch = [block * BLOCK_SIZE + offset for block in scratch for offset in range(BLOCK_SIZE)]
        self.lengths = [0] * SESSIONS

    def step(self, most_rows: int) -> Batch:
        """Rows of some sessions, and the rows of which logits are wanted."""
        free = self.rng.permutation(self.scratch).tolist()
        rows: list[Row] = []
        busy = self.rng.permutation(SESSIONS)[: self.rng.integers(1, SESSIONS + 1)].tolist()
        for session in busy:
            if self.rng.random() < 0.4 or self.lengths[session] == 0:
                rows += self.chunk(session, most_rows)
            else:
                rows += self.chunk(session, 1)
                rows += self.tree(session, free)
        order = self.rng.permutation(len(rows)).tolist() if self.rng.random() < 0.3 else list(range(len(rows)))
        rows = [rows[index] for index in order]
        used = sorted({row.sequence for row in rows})
        rows = [
            Row(
                token_id=row.token_id,
                position=row.position,
                sequence=used.index(row.sequence),
                ancestors=row.ancestors,
                context_len=row.context_len,
            )
            for row in rows
        ]
        wanted = self.rng.permutation(len(rows))[: self.rng.integers(0, len(rows) + 1)].tolist()
        return pack(rows, [self.tables[session] for session in used], wanted)

    def chunk(self, session: int, most: int) -> list[Row]:
        start = self.lengths[session]
        count = min(int(self.rng.integers(1, most + 1)), BLOCKS_EACH * BLOCK_SIZE - start)
        self.lengths[session] += count
        return chain(self.rng.integers(2, VOCAB, count).tolist(), start, session)

    def tree(self, session: int, free: list[int]) -> list[Row]:
        length = self.lengths[session]
        paths: list[tuple[int, ...]] = [()]
        rows = []
        for _ in range(int(self.rng.integers(0, 12))):
            path = (*paths[self.rng.integers(len(paths))], free.pop())
            paths.append(path)
            rows.append(
                Row(
                    token_id=int(self.rng.integers(2, VOCAB)),
                    position=length + len(path) - 1,
                    sequence=session,
                    ancestors=path,
                    context_len=length,
                )
            )
        return rows
