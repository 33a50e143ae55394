"""Random streams through the forest and through trees of plain objects, side by side."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from paceline.forest import NONE, ROOT, Forest, rows_of
from tests.support.slow_trees import SlowCalibration, SlowGrowth, SlowNode, SlowOffset, SlowTree
from tests.support.trees import show

SOURCES = ("draft_model", "ngram", "grammar")
STREAMS = int(os.environ.get("FOREST_STREAMS", "60"))
Guess = tuple[int, int, int, float]


def tree_of(tree: SlowTree) -> dict[tuple[int, ...], tuple[float, dict[int, float]]]:
    return {node.path(): (tree.survival(node), node.guesses) for node in tree.nodes()}


def tree_in(forest: Forest, row: int, *, named: bool = False) -> dict[tuple[int, ...], tuple[float, dict[int, float]]]:
    found = {}
    for slot in range(forest.count(row)):
        node = forest.arrays.nodes[row, slot]
        if not named or node["id"]:
            guesses = {source: float(sure) for source, sure in enumerate(node["confidences"]) if sure >= 0.0}
            found[tuple(forest.path(row, slot))] = (math.exp(node["weight"]), guesses)
    return found


def assert_same(forest: Forest, row: int, tree: SlowTree, *, named: bool = False) -> None:
    ours, its = tree_in(forest, row, named=named), tree_of(tree)
    assert ours.keys() == its.keys(), show(forest, row)
    for each, (survival, guesses) in its.items():
        assert math.isclose(ours[each][0], survival, rel_tol=1e-9), (each, survival, show(forest, row))
        assert ours[each][1] == guesses, (each, show(forest, row))


def slot_of(forest: Forest, row: int, node: SlowNode) -> int:
    return next((slot for slot in range(forest.count(row)) if tuple(forest.path(row, slot)) == node.path()), ROOT)


class Session:
    """One session at a verifier, in both forms, and a drafter that is some commits behind and repeats itself."""

    def __init__(self, rng: random.Random, forest: Forest, calibrations: list[SlowCalibration]) -> None:
        self.rng, self.forest, self.row = rng, forest, forest.take_row()
        self.calibrations = calibrations
        self.chain = rng.random() < 0.25
        self.tokens = rng.choices(range(4), k=rng.randint(1, 5))
        for source in range(len(SOURCES)):
            forest.judge(self.row, source, source)
        self.offsets = [SlowOffset() for _ in SOURCES]
        self.open(self.tokens)

    def open(self, tokens: list[int]) -> None:
        self.tree = SlowTree(
            tokens,
            lambda source, sure: self.calibrations[source].probability(sure, self.offsets[source]),
            lambda source, sure, matched: self.calibrations[source].observe(sure, self.offsets[source], matched),
            chain=self.chain,
        )
        self.forest.open(self.row, tokens, chain=self.chain)
        self.ids: list[int] = []
        self.next_id = 1
        self.bases = [len(tokens)]

    def message(self) -> tuple[int, list[Guess]]:
        base, guesses = self.rng.choice(self.bases[-4:]), []
        for _ in range(self.rng.randint(1, 12)):
            live = [each for each in self.ids if each in self.tree.index]
            known = [0, *self.rng.choice((live, self.ids[-60:], self.ids[-5:]))]
            sure = self.rng.choice((0.0, 1.0)) if self.rng.random() < 0.03 else self.rng.randint(1, 254) / 255
            guesses.append((self.next_id, self.rng.choice(known), self.rng.randrange(4), sure))
            self.ids.append(self.next_id)
            self.next_id += self.rng.choice((1, 1, 1, 2))
        if self.rng.random() < 0.1:
            guesses.append(self.rng.choice(guesses))
        return base, guesses


def merge(forest: Forest, sessions: list[Session]) -> None:
    """Messages of several sessions at once, in one call and one by one."""
    batch = [(each, *each.message()) for each in sessions]
    told = [each.tree.merge(base, guesses) for each, base, guesses in batch]
    flat = [guess for _, _, guesses in batch for guess in guesses]
    ids, parents, tokens = (np.array([guess[place] for guess in flat], np.int32) for place in range(3))
    merged = forest.merge(
        0,
        rows_of(each.row for each, _, _ in batch),
        rows_of(base for _, base, _ in batch),
        np.cumsum([len(guesses) for _, _, guesses in batch]).astype(np.int32),
        ids,
        parents,
        tokens,
        np.array([guess[3] for guess in flat]),
    )
    assert merged.counts.tolist() == [list(each) for each in told]
    last = {each.row: (each.tree, base, first) for (each, base, _), first in zip(batch, merged.firsts, strict=True)}
    for tree, base, first in last.values():
        known = base == len(tree.tokens)
        best = max(map(tree.survival, tree.root.children.values()), default=0.0)
        assert math.isclose(first, best if known else -1.0, rel_tol=1e-9)


def add(forest: Forest, session: Session, rng: random.Random) -> None:
    parent = rng.choice([session.tree.root, *session.tree.nodes()])
    if session.chain and parent.children:
        return
    token, sure, source = rng.randrange(4), rng.randint(1, 255) / 255, rng.randrange(1, 3)
    slot = slot_of(forest, session.row, parent)
    session.tree.add(parent, token, sure, source)
    assert forest.add(session.row, slot, token, sure, source) >= 0


def step(forest: Forest, sessions: list[Session], rng: random.Random) -> None:
    """Chooses nodes, verifies them, and commits tokens that a drafter may have guessed."""
    kvs = count()
    for chain in (False, True):
        for each in sessions:
            if each.chain is not chain:
                continue
            cap = rng.choice((0, 1, 4, 16))
            picked = forest.best(rows_of([each.row]), rows_of([cap]), np.array([chain]))
            mine = each.tree.best_chain(cap) if chain else each.tree.best(cap)
            assert np.allclose(picked.survivals[0, : len(mine)], [each.tree.survival(node) for node in mine])
            assert (picked.slots[0, len(mine) :] == NONE).all()
            seen = {ROOT}
            for slot in picked.slots[0, : len(mine)]:
                assert forest.arrays.nodes["parent"][each.row, slot] in seen, "parents come first"
                seen.add(int(slot))
            for node in mine:
                node.kv = next(kvs)
                forest.arrays.nodes["kv"][each.row, slot_of(forest, each.row, node)] = node.kv
    ends, tokens, told = [], [], []
    for each in sessions:
        node: SlowNode | None = each.tree.root
        said: list[int] = []
        for _ in range(rng.randint(1, 6)):
            likely = list(node.children) if node is not None and rng.random() < 0.8 else []
            said.append(rng.choice(likely or range(4)))
            node = None if node is None else node.children.get(said[-1])
        tokens += said
        ends.append(len(tokens))
        told.append(each.tree.commit(said))
        each.bases.append(len(each.tree.tokens))
    done = forest.commit(rows_of(each.row for each in sessions), rows_of(ends), rows_of(tokens))
    counts = np.zeros((len(told), 3, len(SOURCES)), int)
    moves = []
    for index, (matched, dead, hit) in enumerate(told):
        accepted = [node for node in matched if node.kv is not None]
        moves += [[node.kv, node.position] for node in accepted]
        assert (done.accepted[index], done.hits[index]) == (len(accepted), hit)
        for node in (*matched, *dead):
            first = next(iter(node.guesses))
            counts[index, 2, first] += node.kv is None
            counts[index, 0, first] += node.kv is not None
            counts[index, 1, first] += node.kv is not None and node in matched
        for node in sessions[index].tree.nodes():
            node.kv = None
    assert done.moves.tolist() == moves
    assert done.counts.tolist() == counts.tolist()


def verifier_stream(seed: int) -> None:
    rng = random.Random(seed)
    forest = Forest(SOURCES)
    calibrations = [SlowCalibration() for _ in SOURCES]
    assert [forest.new_calibration() for _ in SOURCES] == [0, 1, 2]
    sessions = [Session(rng, forest, calibrations) for _ in range(rng.randint(1, 4))]
    for _ in range(rng.randint(5, 30)):
        roll = rng.random()
        if roll < 0.5:
            merge(forest, [rng.choice(sessions) for _ in sessions])
        elif roll < 0.7:
            add(forest, rng.choice(sessions), rng)
        elif roll < 0.97:
            step(forest, rng.sample(sessions, rng.randint(1, len(sessions))), rng)
        else:
            again = rng.choice(sessions)
            again.open(again.tree.tokens)
        for each in sessions:
            assert_same(forest, each.row, each.tree)
    for slow, ours in zip(calibrations, forest.arrays.calibrations, strict=False):
        its = [slow.slope, slow.intercept, slow.var_slope, slow.var_intercept, slow.covariance]
        assert np.allclose(its, list(ours.tolist()), rtol=1e-6, atol=1e-9)


class Drafting:
    """One session at a drafter, in both forms."""

    context_len = 60

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.forest = Forest(SOURCES[:1])
        self.row = rows_of([self.forest.take_row()])
        price, room = self._terms()
        self.growth = SlowGrowth((1, 2, 3), price, room)
        self.forest.open(int(self.row[0]), (1, 2, 3), keeps_kv=True, price=price, room=room)
        self.forest.place(self.row, ready=[True], lags=[False])
        self.kvs = count()

    def _terms(self) -> tuple[float, int]:
        return self.rng.choice((0.0, 0.05, 0.3, 0.9, 1.0)), self.rng.choice((0, 4, 20, 200))

    def grow(self, nodes: list[SlowNode], slots: list[int]) -> None:
        """Up to three levels below each node; what is kept back has nothing below it, and takes no row of KV."""
        tokens, confidences = np.full((3, len(nodes), 4), -1, np.int32), np.zeros((3, len(nodes), 4))
        kv, left = np.full((2, len(nodes)), -1, np.int32), []
        for place, start in enumerate(nodes):
            node: SlowNode | None = start
            for level in range(3):
                found = self._ranked()
                tokens[level, place, : len(found)] = [token for token, _ in found]
                confidences[level, place, : len(found)] = [sure for _, sure in found]
                if node is not None:
                    self.growth.offer(node, found)
                    node = node.children.get(found[0][0])
                if level == 2 or self.rng.random() < 0.4:
                    break
                kv[level, place] = next(self.kvs)
                if node is None:
                    left.append(kv[level, place])
                else:
                    node.kv = int(kv[level, place])
        self.forest.grow(np.repeat(self.row, len(nodes)), rows_of(slots), tokens, confidences, kv)
        assert sorted(kv[kv >= 0].tolist()) == left

    def _ranked(self) -> list[tuple[int, float]]:
        left, found = 1.0, []
        for token in self.rng.sample(range(5), self.rng.randint(1, 4)):
            sure = left * self.rng.random()
            left -= sure
            found.append((token, sure))
        return sorted(found, key=lambda each: -each[1])

    def compute(self) -> None:
        """A draft step."""
        limit = self.rng.choice((1, 4, 50))
        nodes = self.growth.frontier(limit, self.context_len)
        calls = self.forest.frontier(self.row, limit=limit, context_len=self.context_len)
        row = int(self.row[0])
        assert [node.path() for node in nodes] == [tuple(self.forest.path(row, slot)) for slot in calls.slots]
        for node, slot in zip(nodes, calls.slots, strict=True):
            node.kv = next(self.kvs)
            self.forest.arrays.nodes["kv"][row, slot] = node.kv
        self.grow(nodes, calls.slots.tolist())

    def push(self, *, at_once: bool = False) -> None:
        room = self.rng.random() < 0.8
        goes_on = room and bool(self.growth.frontier(1, self.context_len))
        mine = self.growth.drain() if at_once else self.growth.push(goes_on=goes_on)
        pushed = self.forest.push(self.row, room=room, context_len=self.context_len, at_once=at_once)
        row, nodes = int(self.row[0]), self.forest.arrays.nodes
        paths = {
            int(nodes["id"][row, slot]): tuple(self.forest.path(row, slot)) for slot in range(self.forest.count(row))
        }
        paths[0] = ()
        end = pushed.ends[0]
        its = {
            (paths[each], paths[parent], token, sure)
            for each, parent, token, sure in zip(
                pushed.ids[:end].tolist(),
                pushed.parent_ids[:end].tolist(),
                pushed.tokens,
                pushed.confidences,
                strict=False,
            )
        }
        told = {(node.path(), node.path()[:-1], node.token, node.guesses[0]) for node in mine}
        assert its == told, show(self.forest, row)
        seen = {0} | set(paths) - set(pushed.ids[:end].tolist())
        for each, parent in zip(pushed.ids[:end].tolist(), pushed.parent_ids[:end].tolist(), strict=True):
            assert parent in seen, "parents come first"
            seen.add(each)

    def commit(self) -> bool:
        """Returns whether the root is to be computed anew."""
        node: SlowNode | None = self.growth.tree.root
        said: list[int] = []
        for _ in range(self.rng.randint(1, 4)):
            likely = list(node.children) if node is not None and self.rng.random() < 0.85 else []
            said.append(self.rng.choice(likely or range(5)))
            node = None if node is None else node.children.get(said[-1])
        price, room = self._terms()
        matched, dead, hit = self.growth.commit(said, price, room)
        done = self.forest.commit(self.row, rows_of([len(said)]), rows_of(said))
        self.forest.reprice(self.row, np.array([price]), rows_of([room]))
        assert done.moves[:, 0].tolist() == [node.kv for node in matched if node.kv is not None]
        assert sorted(done.freed) == sorted(node.kv for node in dead if node.kv is not None)
        if hit:
            self.push(at_once=True)
        return not (hit and matched[-1].kv is not None)

    def assert_same(self) -> None:
        row, tree = int(self.row[0]), self.growth.tree
        assert_same(self.forest, row, tree, named=True)
        assert self.forest.arrays.trees["named"][row] == len(tree.nodes())
        kept = {(*node.path(), token) for node, ranked in self.growth.kept.items() for token, _ in ranked}
        assert kept == tree_in(self.forest, row).keys() - tree_in(self.forest, row, named=True).keys()
        work = bool(self.growth.unsent or self.growth.frontier(1, self.context_len))
        assert self.forest.any_work(self.row, room=True, context_len=self.context_len) == work


def drafter_stream(seed: int) -> None:
    stream, root_is_new = Drafting(seed), True
    for _ in range(stream.rng.randint(5, 50)):
        roll = stream.rng.random()
        if root_is_new:
            stream.grow([stream.growth.tree.root], [ROOT])
            root_is_new = False
        elif roll < 0.55:
            stream.compute()
        elif roll < 0.75:
            stream.push()
        else:
            root_is_new = stream.commit()
        stream.assert_same()


@pytest.mark.parametrize("stream", [verifier_stream, drafter_stream])
def test_random_streams_leave_the_same_trees(stream) -> None:
    for seed in range(STREAMS):
        stream(seed)


@pytest.mark.full
@pytest.mark.parametrize("way", ["NUMBA_DISABLE_JIT", "NUMBA_BOUNDSCHECK"])
def test_streams_are_the_same_uncompiled_and_with_bounds_checked(way: str, tmp_path) -> None:
    environ = os.environ | {way: "1", "FOREST_STREAMS": "8", "NUMBA_CACHE_DIR": str(tmp_path)}
    links = Path(__file__).parents[1] / "core" / "test_link.py"
    command = [sys.executable, "-m", "pytest", "-q", "-k", "random or test_link", __file__, str(links)]
    subprocess.run(command, env=environ, check=True, timeout=300)
