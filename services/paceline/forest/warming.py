"""Compiles the loops of a forest before they are needed: a step must not wait for that."""

from __future__ import annotations

import numpy as np

from paceline.forest.columns import Calls, Coming, Merged, rows_of
from paceline.forest.forest import Forest
from paceline.forest.records import ROOT

_CONTEXT_LEN = 8


def warm_up(forest: Forest) -> None:
    """Runs every loop once over a session of a token; what was compiled before is read from the cache."""
    row = forest.take_row()
    rows, one = rows_of([row]), rows_of([1])
    sure = np.array([0.5])
    forest.open(row, [0], keeps_kv=True, price=0.5, room=8)
    forest.place(row, ready=True, lags=False)
    _verify(forest, row, one, sure)
    roots = rows_of([ROOT])
    forest.levels(rows, roots, most=1, costs=sure, context_len=_CONTEXT_LEN)
    forest.grow(rows, roots, np.array([[[1, 2]]], np.int32), np.array([[[0.5, 0.4]]]))
    forest.reprice(rows, sure, np.array([8]))
    forest.any_work(rows, room=True, context_len=_CONTEXT_LEN)
    calls = forest.frontier(rows, limit=1, most=1, context_len=_CONTEXT_LEN)
    forest.set_kv(calls, one[: len(calls.rows)])
    forest.trace(*calls)
    forest.push(rows, room=True, context_len=_CONTEXT_LEN)
    forest.wants_nodes(row)
    forest.has_child(row, ROOT)
    forest.commit(rows, one, one, sure)
    _link(forest, row)
    forest.give_back(row)


def _verify(forest: Forest, row: int, one: np.ndarray, sure: np.ndarray) -> None:
    rows = rows_of([row])
    forest.merge(0, rows, one, one, one, rows_of([0]), one, sure)
    forest.add(row, ROOT, 1, 0.5, 0)
    forest.probability(row, 0, 0.5)
    picked = forest.best(rows, one)
    taken = forest.gather(rows, picked.slots, one)
    forest.set_kv(Calls(rows, taken.slots), one)
    forest.prospects(rows, one, sure, Coming(sure, sure))
    forest.commit(rows, one, one)


def _link(forest: Forest, row: int) -> None:
    links, rows, one = forest.links, rows_of([row]), rows_of([1])
    links.begin(row, 0.5)
    drafter = links.new_drafter(1.0)
    links.connect(row, drafter)
    links.look_ahead(rows, one, price=0.5, step_s=1.0)
    links.due(rows, 0.0)
    links.caps(rows, 1)
    links.drafted_by(rows, drafter)
    links.at_work(rows)
    links.first_doubtful(rows, one, has_distributions=False)
    links.answered(rows)
    links.waits(rows, 0.0)
    links.mark_silent(rows, 0.0)
    links.took_in(rows, one, one, Merged(np.zeros((1, 3), np.int32), np.array([0.5]), one), 1.0)
    links.lag_tokens(rows)
    links.drop_drafter(drafter)
