"""The computed tables of docs/gains.md follow from its formulas and the points that it prints."""

from __future__ import annotations

import re

import pytest

from paceline.core.step_time import DEFAULT_STEP_COST, StepCost
from tests.support.site import ROOT

MOST_GAMMA = 40
DRAFT_COST = 0.07


def table(heading: str) -> list[list[str]]:
    """Cells of the table whose first row begins so, without its line."""
    text = (ROOT / "docs" / "gains.md").read_text(encoding="utf-8")
    found = re.search(rf"(?m)^\| {re.escape(heading)} \|.*\n(?:\|.*\n)+", text)
    assert found, heading
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in found[0].splitlines()]
    return [rows[0], *rows[2:]]


def expected(chance: float, gamma: int) -> float:
    return (1.0 - chance ** (gamma + 1)) / (1.0 - chance)


def test_tokens_per_step_and_the_best_gamma() -> None:
    heading, *rows = table("a")
    gammas = [int(re.sub("gamma ", "", cell)) for cell in heading[1:-2]]
    for chance, *cells in rows:
        a = float(chance)
        best = max(range(MOST_GAMMA), key=lambda gamma: expected(a, gamma) / (1.0 + DRAFT_COST * gamma))
        told = [f"{expected(a, gamma):.2f}" for gamma in gammas]
        assert cells == [*told, str(best), f"{expected(a, best) / (1.0 + DRAFT_COST * best):.2f}"]


def points() -> StepCost:
    """The step times that the page prints."""
    rows, seconds = table("rows")
    return StepCost(rows=tuple(map(int, rows[1:])), seconds=tuple(map(float, seconds[1:])))


def test_the_page_prints_the_step_times_that_a_verifier_begins_with() -> None:
    assert points() == DEFAULT_STEP_COST


@pytest.mark.parametrize("row", table("acceptance")[1:], ids=lambda row: row[0])
def test_the_best_gamma_under_load(row: list[str]) -> None:
    cost, a = points(), float(row[0])

    def gain(sessions: int, gamma: int) -> float:
        return expected(a, gamma) * cost.at(sessions) / cost.at(sessions * (1 + gamma))

    for heading, cell in zip(table("acceptance")[0][1:], row[1:], strict=True):
        sessions = int(heading.split()[0])
        best = max(range(MOST_GAMMA), key=lambda gamma: gain(sessions, gamma))
        assert cell == f"{best} ({gain(sessions, best):.2f})", heading
