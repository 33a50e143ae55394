"""Attention over pages and trees is that of float64, however contexts are divided, and looks at nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cuda import attention, plan
from paceline.engine.batch import Batch
from tests.unit.engine.cuda.interpreted import DEVICE
from tests.unit.engine.traffic import ALL_BLOCKS, Traffic

KINDS = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def lanes_of(batch: Batch, kv_heads: int, rows: int) -> attention.Lanes:
    arrays = plan.field_arrays(batch, rows, kv_heads, trash=0)
    return plan.PlanFields.of({name: torch.from_numpy(array).to(DEVICE) for name, array in arrays.items()}).lanes


def attended_slots(batch: Batch, row: int) -> np.ndarray:
    """Slots that a row attends, int64 [n]."""
    positions = np.arange(batch.context_lens[row])
    blocks = batch.block_tables[batch.sequences[row]][positions // BLOCK_SIZE].astype(np.int64)
    ancestors = batch.ancestors[row, : batch.num_ancestors[row]].astype(np.int64)
    return np.concatenate([blocks * BLOCK_SIZE + positions % BLOCK_SIZE, ancestors])


def in_float64(
    batch: Batch, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention row by row; keys and values [blocks, G, BLOCK_SIZE, D]."""
    out = torch.empty((batch.num_rows, *query.shape[1:]), dtype=torch.float64)
    flat = [part.double().cpu().transpose(1, 2).flatten(0, 1) for part in (keys, values)]
    for row in range(batch.num_rows):
        slots = attended_slots(batch, row)
        key, value = (part[slots].repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for part in flat)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", query[row].double().cpu(), key) * scale, dim=1)
        out[row] = torch.einsum("hn,nhd->hd", weights, value)
    return out


def spoiled(batch: Batch, cache: torch.Tensor) -> torch.Tensor:
    """The cache with NaN in every slot that no row attends."""
    seen = np.zeros(ALL_BLOCKS * BLOCK_SIZE, bool)
    for row in range(batch.num_rows):
        seen[attended_slots(batch, row)] = True
    unseen = torch.from_numpy(~seen).view(ALL_BLOCKS, 1, BLOCK_SIZE, 1)
    return cache.masked_fill(unseen.to(cache.device), float("nan"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kind", "width", "programs"),
    [
        (4, 2, 16, torch.float32, 4, 264),
        (6, 2, 24, torch.float32, 8, 6),
        (4, 4, 16, torch.float32, 16, 1),
        (7, 1, 32, torch.bfloat16, 4, 16),
        (2, 1, 160, torch.bfloat16, 1, 64),
    ],
)
def test_rows_attend_their_pages_and_ancestors_and_nothing_else(
    heads: int, kv_heads: int, dim: int, kind: torch.dtype, width: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "PROGRAMS", programs)
    monkeypatch.setattr(plan, "lane_width", lambda rows: width)
    torch.manual_seed(width)
    traffic, joined = Traffic(heads + dim), 0
    for _ in range(3):
        # Contexts grow beyond what one part holds.
        traffic.step(100)
    for _ in range(3):
        batch = traffic.step(12)
        keys, values = torch.randn((2, ALL_BLOCKS, kv_heads, BLOCK_SIZE, dim)).to(DEVICE, kind)
        query = torch.randn((batch.num_rows + 3, heads, dim)).to(DEVICE, kind)
        lanes = lanes_of(batch, kv_heads, len(query))
        found = attention.attend(lanes, query, spoiled(batch, keys), spoiled(batch, values), dim**-0.5)
        expected = in_float64(batch, query, keys, values, dim**-0.5)
        off = (found[: batch.num_rows].double().cpu() - expected).norm() / expected.norm()
        assert off < KINDS[kind]
        joined += int(((lanes.row_parts[:, 1] > 1) & (lanes.node_bits != 0)).sum())
    assert (joined > 0) == (programs > 6), "trees below divided contexts are half of the matter"


def test_a_context_longer_than_a_tile_is_joined_from_parts_of_equal_length() -> None:
    made = attention.divide(np.array([600]), 8)
    assert made.parts[:, 1].tolist() == [*range(0, 600, 64)]
    assert made.lanes.tolist() == [[0, 10]]


def test_parts_cover_each_context_once_and_stay_within_their_bounds() -> None:
    rng = np.random.default_rng(3)
    for kv_heads in (1, 4, 8, 32, 500):
        for count in (1, 2, 7, 64, 300):
            longest = rng.integers(0, 20_000 // count, count) * rng.choice([1, 0, 9], count)
            made = attention.divide(longest, kv_heads)
            lane, first, stop, place = made.parts.T
            for each in range(count):
                mine = lane == each
                assert [0, *stop[mine]] == [*first[mine], longest[each]]
                kept, parts = made.lanes[each]
                assert place[mine].tolist() == ([*range(kept, kept + parts)] if parts else [-1])
            assert len(lane) <= attention.most_parts(count, kv_heads)
            assert place.max() < 2 * attention._fill(kv_heads)


def test_one_long_context_among_many_is_divided() -> None:
    longest = np.full(64, 600)
    longest[5] = 30_000
    made = attention.divide(longest, 8)
    lengths = made.parts[:, 2] - made.parts[:, 1]
    assert lengths.max() < 30_000 / 10


def test_attention_takes_two_launches(launches: list[str]) -> None:
    batch = Traffic(1).step(5)
    keys, values = torch.zeros((2, ALL_BLOCKS, 1, BLOCK_SIZE, 16), device=DEVICE)
    query = torch.zeros((batch.num_rows, 1, 16), device=DEVICE)
    attention.attend(lanes_of(batch, 1, batch.num_rows), query, keys, values, 1.0)
    assert launches == ["_attend", "_join"]
