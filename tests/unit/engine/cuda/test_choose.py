"""Tokens and rankings chosen on the device are those of the CPU's loops from the same logits, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.calibration import NUM_RANKED
from paceline.core.params import SamplingParams
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.backends.cuda.choose import CHOICE_WORDS, NOTHING, Questions, choose, rank
from paceline.engine.sampler import RowSampler, working_space
from tests.unit.engine.cuda.interpreted import DEVICE

# By Triton's interpreter.
pytestmark = pytest.mark.full

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "min-p": {"temperature": 1.3, "min_p": 0.02},
    "top-k": {"top_k": 7},
    "top-k-of-many": {"top_k": 600},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-p-of-most": {"temperature": 3.0, "top_p": 0.999},
    "top-p-of-few": {"temperature": 1.5, "min_p": 0.1, "top_p": 0.95},
    "all": {"temperature": 1.2, "top_k": 50, "top_p": 0.8, "min_p": 0.001},
    "one": {"top_k": 1},
    "half": {"top_p": 0.5},
}


def choices_of(rng: np.random.Generator, ways: list[dict[str, Any]]) -> np.ndarray:
    """A `CHOICE` for each, of any seed."""
    seeds = rng.integers(0, 2**64, len(ways), np.uint64).tolist()
    samplers = [
        RowSampler(SamplingParams(max_tokens=1, seed=seed, **way), 10, (), ())
        for seed, way in zip(seeds, ways, strict=True)
    ]
    return np.frombuffer(b"".join(sampler.choice or b"" for sampler in samplers), step_kernels.CHOICE)


def rows_of(rng: np.random.Generator, vocab: int) -> dict[str, np.ndarray]:
    """Rows of all shapes."""
    normal = rng.standard_normal(vocab)
    peaked = normal * 2
    peaked[rng.integers(vocab, size=4)] += 15.0
    masked = np.where(rng.random(vocab) < 0.7, -np.inf, normal * 3)
    few = np.full(vocab, -np.inf)
    few[rng.integers(vocab, size=3)] = rng.standard_normal(3)
    equal = np.full(vocab, -np.inf)
    equal[rng.choice(vocab, 7, replace=False)] = 3.0
    rows = {
        "few-ties": equal,
        "flat": normal * 0.01, "usual": normal * 4, "peaked": peaked, "many-ties": np.round(normal), "masked": masked,
        "few": few, "equal": np.zeros(vocab), "signed-zeros": np.where(normal > 0, 0.0, -0.0), "huge": normal * 1e38,
        "subnormal": normal * 1e-42,
    }  # fmt: skip
    return {name: row.astype(np.float32) for name, row in rows.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Rows, and how a token of each is chosen."""

    logits: np.ndarray
    positions: np.ndarray
    choices: np.ndarray

    def expected(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """What the CPU's loops choose: ids and scores [rows, count]."""
        token_ids = np.full((len(self.logits), count), step_kernels.NOTHING)
        scores, rows = np.full(token_ids.shape, -np.inf), np.arange(len(self.logits))
        space = working_space(self.logits.shape[1])
        step_kernels.rank(
            self.logits, rows, self.positions, self.choices, space, token_ids, scores, np.empty(len(rows))
        )  # fmt: skip
        return token_ids, scores

    def asked(self) -> tuple[torch.Tensor, Questions]:
        """The same for the device; its logits lie in another order, beside others."""
        num = len(self.logits)
        logits = np.zeros((2 * num, self.logits.shape[1]), np.float32)
        logits[1::2] = self.logits[::-1]
        words = self.choices.view(np.int64).reshape(num, CHOICE_WORDS)
        fields = {"rows": np.arange(num)[::-1] * 2 + 1, "positions": self.positions, "choices": words}
        on_device = {name: torch.from_numpy(np.array(field)).to(DEVICE) for name, field in fields.items()}
        return torch.from_numpy(logits).to(DEVICE), Questions(**on_device)


def step_of(vocab: int, ways: list[str], shapes: list[str]) -> Step:
    rng = np.random.default_rng(vocab)
    rows = rows_of(rng, vocab)
    chosen = [(shape, way) for shape in shapes for way in ways]
    return Step(
        logits=np.stack([rows[shape] for shape, _ in chosen]),
        positions=rng.integers(0, 2**33, len(chosen)),
        choices=choices_of(rng, [WAYS[way] for _, way in chosen]),
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_token_is_that_of_the_loops_on_a_cpu_for_rows_of_any_shape(way: str) -> None:
    step = step_of(300, [way], [*rows_of(np.random.default_rng(0), 300)])
    assert choose(*step.asked()).tolist() == step.expected(1)[0][:, 0].tolist()


@pytest.mark.parametrize("shape", ["flat", "usual", "peaked"])
def test_the_token_is_that_of_the_loops_on_a_cpu_where_a_few_of_many_blocks_matter(shape: str) -> None:
    step = step_of(20_003, ["cold", "hot", "top-p", "all"], [shape])
    assert choose(*step.asked()).tolist() == step.expected(1)[0][:, 0].tolist()


@pytest.mark.parametrize("vocab", [300, 5003])
def test_a_ranking_is_that_of_the_loops_on_a_cpu_and_its_shares_follow_from_their_scores(vocab: int) -> None:
    step = step_of(vocab, ["greedy", "hot", "top-k", "half"], ["usual", "many-ties", "few", "few-ties"])
    expected, scores = step.expected(NUM_RANKED)
    found = rank(*step.asked()).cpu()
    assert found[:, 0].tolist() == expected.tolist()
    shares = found[:, 1].contiguous().view(torch.float32)
    np.testing.assert_allclose(shares, np.exp(scores - scores[:, :1]), rtol=1e-5, atol=1e-30)


def test_rows_that_leave_nothing_to_choose_have_no_token_and_no_ranking() -> None:
    step = step_of(300, ["greedy", "all", "top-p"], ["usual"] * 3)
    for row, spoiler in enumerate((np.nan, -np.nan, np.inf)):
        step.logits[3 * row : 3 * row + 2, 200] = spoiler
        step.logits[3 * row + 2] = -np.inf
    assert choose(*step.asked()).tolist() == [NOTHING] * 9
    found = rank(*step.asked())
    assert found[:, 0].unique().tolist() == [NOTHING]
    assert not found[:, 1].any()


def test_a_choice_lies_in_memory_as_kernels_read_it() -> None:
    fields = step_kernels.CHOICE.fields
    assert fields is not None
    names = ("greedy", "inverse_temperature", "log_min_p", "top_k", "top_p", "seed_low", "seed_high")
    assert [fields[name][1] for name in names] == [8 * word for word in range(CHOICE_WORDS)]


def test_tokens_of_all_rows_take_three_launches(launches: list[str]) -> None:
    logits, questions = step_of(300, ["top-p"], ["usual", "flat"]).asked()
    choose(logits, questions)
    assert launches == ["_find_maxima", "_add_masses", "_choose"]
