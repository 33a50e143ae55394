"""The draft trees of all sessions of a process, on both tiers.

A session is a row, a guessed token a node of it (`paceline.forest.records`). The root, which is no node, stands for the
last committed token. A verifier is sent guesses (`merge`) and adds those of its own sources (`add`); a drafter grows
them (`grow`, `frontier`, `push`); both follow what is committed (`commit`). Every operation is one compiled loop over
all sessions that it concerns, and reports in columns.

It knows tokens, positions and confidences, and nothing of models or networks. What a verifier knows of its sessions'
drafters has the same rows (`paceline.forest.links`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline.forest import drafting, tree_loops
from paceline.forest.linking import CHILD_SHARE
from paceline.forest.links import Links
from paceline.forest.records import (
    CALIBRATION,
    JUDGE,
    NAME,
    NONE,
    RECENT,
    RING,
    ROOT,
    SLOTS,
    TREE,
    Arrays,
    Bools,
    Calls,
    Committed,
    Floats,
    Gathered,
    Ints,
    Merged,
    Picked,
    Pushed,
    grown,
    node_type,
    records,
    rows_of,
)
from paceline.forest.tree_loops import INTERCEPT_VARIANCE, LEAST_SLOPE, OFFSET_VARIANCE, SLOPE_VARIANCE, probability

# Rows and calibrations that a forest begins with; it doubles when they are taken.
FIRST_ROWS, FIRST_CALIBRATIONS = 8, 8

# A calibration that believes its source: slope and intercept, their variances and covariance.
UNLEARNED = (1.0, 0.0, SLOPE_VARIANCE, INTERCEPT_VARIANCE, 0.0)

_NO_CHANCES = np.empty(0)
_ONE_LEVEL = np.empty((0, 0), np.int32)


class Forest:
    """See the module docstring.

    Args:
        sources: Names of all that may guess; in kernels they are numbers.
        slots: Most nodes of a session.

    Attributes:
        arrays: What kernels take.
        links: Of a verifier's sessions to their drafters.
    """

    def __init__(self, sources: Sequence[str], slots: int = SLOTS) -> None:
        self.sources = tuple(sources)
        self.number_of = {source: number for number, source in enumerate(sources)}
        self.arrays = Arrays(
            records(0, TREE),
            records((0, slots), node_type(len(sources))),
            records((0, RING), NAME),
            np.zeros((0, RECENT), np.int32),
            records((0, len(sources)), JUDGE),
            records(0, CALIBRATION),
        )
        self.links = Links(lambda: self.arrays.trees)
        self._free: list[int] = []
        self._num_calibrations = 0
        self._add_rows(FIRST_ROWS)
        self._add_calibrations(FIRST_CALIBRATIONS)

    # Rows

    def take_row(self) -> int:
        """A row for a session; `open` begins its tree."""
        if not self._free:
            self._add_rows(len(self.arrays.trees))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def open(
        self,
        row: int,
        tokens: Sequence[int],
        *,
        chain: bool = False,
        keeps_kv: bool = False,
        price: float = 0.0,
        room: int = 0,
    ) -> None:
        """A session's tree begins, or begins anew; ids begin with it.

        Args:
            row: Of the session.
            tokens: All committed ones.
            chain: A node has one child.
            keeps_kv: A commit leaves their rows of KV to the nodes that live on.
            price: Least survival worth drafting for.
            room: Nodes that a drafter may have in it.
        """
        tree = self.arrays.trees[row]
        tree["committed_len"], tree["next_id"], tree["push_at"], tree["held"] = len(tokens), 1, 1, 0
        tree["chain"], tree["keeps_kv"] = chain, keeps_kv
        tree["ready"] = tree["lags"] = False
        tree["price"], tree["room"], tree["share"] = price, min(room, drafting.MAX_ROOM), CHILD_SHARE
        tree["offered"] = 0
        self.clear(row)
        self.arrays.names[row] = np.zeros((), NAME)
        last = np.asarray(tokens[-RECENT:], np.int32)
        self.arrays.recent[row, np.arange(len(tokens) - len(last), len(tokens)) % RECENT] = last

    def clear(self, row: int) -> None:
        """Drops the nodes of a session; ids go on."""
        tree = self.arrays.trees[row]
        tree["count"] = tree["named"] = tree["unsent"] = 0

    def kv(self, row: int) -> Ints:
        """Rows of KV of a session's nodes, int32 `[n]`."""
        kv = self.arrays.nodes["kv"][row, : self.arrays.trees["count"][row]]
        return np.asarray(kv[kv != NONE])

    def set_kv(self, calls: Calls, kv: Ints) -> None:
        """Nodes have rows of KV, int32 `[nodes]`."""
        self.arrays.nodes["kv"][calls.rows, calls.slots] = kv

    def drop_kv(self, row: int, position: int = 0) -> None:
        """The nodes of a session from a position on have no rows of KV any more."""
        nodes = self.arrays.nodes[row, : self.count(row)]
        nodes["kv"][nodes["position"] >= position] = NONE

    def count(self, row: int) -> int:
        """Nodes of a session, those that are kept back included."""
        return int(self.arrays.trees["count"][row])

    def place(self, rows: Ints, *, ready: Sequence[bool], lags: Sequence[bool]) -> None:
        """Where a drafter stands with sessions.

        Args:
            rows: int32 `[sessions]`.
            ready: KV of all committed tokens is there, and their number is within the draft model's context.
            lags: The next step computes some of it.
        """
        trees = self.arrays.trees
        trees["ready"][rows], trees["lags"][rows] = ready, lags

    def wants_nodes(self, rows: Ints) -> Bools:
        """Whether the verifiers of sessions would take more nodes, bool `[sessions]`."""
        trees = self.arrays.trees[rows]
        wanted: Bools = (trees["price"] < 1.0) & (trees["named"] < trees["room"])
        return wanted

    def has_child(self, row: int, slot: int) -> bool:
        """Whether anything hangs below a slot, or the root."""
        return bool(tree_loops.has_child(self.arrays.nodes[row], self.arrays.trees["count"][row], slot))

    # Calibrations

    def new_calibration(self) -> int:
        """Number of a calibration that believes its source at first."""
        if self._num_calibrations == len(self.arrays.calibrations):
            self._add_calibrations(self._num_calibrations)
        number = self._num_calibrations
        self._num_calibrations += 1
        self.set_calibration(number, UNLEARNED)
        return number

    def set_calibration(self, number: int, learned: Sequence[float]) -> None:
        """Slope and intercept, their variances and covariance, as `calibration` returns them."""
        slope, *rest = learned
        self.arrays.calibrations[number] = (max(LEAST_SLOPE, slope), *rest)

    def calibration(self, number: int) -> list[float]:
        """What was learned of a source; may be called from another thread."""
        return list(map(float, self.arrays.calibrations[number].tolist()))

    def judge(self, row: int, source: int, calibration: int) -> None:
        """A source's guesses for a session are judged by a calibration from now on; NONE: believed."""
        self.arrays.judges[row, source] = (calibration, 0.0, OFFSET_VARIANCE)

    def probability(self, row: int, source: int, confidence: float) -> float:
        """Probability that a source's guess matches if its parent does."""
        arrays = self.arrays
        return float(probability(arrays.judges[row, source], arrays.calibrations, confidence))

    # Guesses

    def add(self, row: int, parent: int, token: int, confidence: float, source: int) -> int:
        """Adds a guess of a source in this process below a slot, or raises it; returns its slot, or FULL."""
        return int(tree_loops.add(self.arrays, row, parent, token, confidence, source))

    def mask(self, row: int, slot: int) -> None:
        """A node may not follow: it is never chosen, and neither is what hangs below it."""
        self.arrays.nodes["weight"][row, slot] = -math.inf

    def merge(
        self,
        source: int,
        rows: Ints,
        bases: Ints,
        ends: Ints,
        ids: Ints,
        parent_ids: Ints,
        tokens: Ints,
        confidences: Floats,
    ) -> Merged:
        """Merges messages of a drafter.

        A late message is no error: its guesses are walked down what has been committed since, and what falls off is
        dropped and counted.

        Args:
            source: Number of its source.
            rows: int32 `[messages]`, whose they are; NONE: passed over.
            bases: int32 `[messages]`, committed tokens that the sender knew.
            ends: int32 `[messages]`, where the guesses of each end.
            ids: int32 `[guesses]`, from 1 on; parents before children.
            parent_ids: int32 `[guesses]`; 0: the last committed token that the sender knew.
            tokens: int32 `[guesses]`.
            confidences: float64 `[guesses]`, from 0 to 1.
        """
        merged = Merged(np.empty((len(rows), 3), np.int32), np.empty(len(rows)))
        tree_loops.merge(self.arrays, source, rows, bases, ends, ids, parent_ids, tokens, confidences, *merged)
        return merged

    # Commits

    def commit(self, rows: Ints, ends: Ints, tokens: Ints, chances: Floats = _NO_CHANCES) -> Committed:
        """Follows tokens that sessions have committed: they judge guesses, and prune the trees.

        Args:
            rows: int32 `[commits]`, of the sessions, in order.
            ends: int32 `[commits]`, where the tokens of each end.
            tokens: int32 `[tokens]`.
            chances: float64 `[tokens]`, for each the probability that the guess in its place was accepted, below 0: it
                matched or did not; empty: all are so.
        """
        size, live = len(rows), int(self.arrays.trees["count"][rows].sum())
        done = Committed(
            np.empty(size, np.int32),
            np.empty(size, np.bool_),
            np.empty((min(live, len(tokens)), 2), np.int32),
            np.empty(live, np.int32),
            np.zeros((size, 3, len(self.sources)), np.int64),
        )
        num_moves, num_freed = tree_loops.commit(self.arrays, rows, ends, tokens, chances, *done)
        return done._replace(moves=done.moves[:num_moves], freed=done.freed[:num_freed])

    # Choices

    def best(self, rows: Ints, caps: Ints, chains: Bools | None = None) -> Picked:
        """The best nodes of sessions, parents before children (of equals, those that came first).

        Args:
            rows: int32 `[sessions]`.
            caps: int32 `[sessions]`, most nodes of each.
            chains: bool `[sessions]`, of which only a chain from the root on is taken, of the children of highest
                survival; None: of none.
        """
        most = int(caps.max(initial=0))
        picked = Picked(np.empty((len(rows), most), np.int32), np.empty((len(rows), most)))
        # The least finite logarithm leaves out what is masked.
        chains = np.zeros(len(rows), np.bool_) if chains is None else chains
        tree_loops.pick(self.arrays, rows, caps, chains, -1e300, *picked)
        return picked

    def gather(self, rows: Ints, slots: Ints, counts: Ints) -> Gathered:
        """The first `counts` [sessions] of the best nodes of sessions, `slots` [sessions, most]."""
        taken = Gathered(*np.empty((4, int(counts.sum())), np.int32))
        tree_loops.gather(self.arrays, rows, slots, counts, *taken)
        return taken

    def unverified_sources(self, row: int) -> list[str]:
        """By whom the nodes of a session were guessed first, masked ones left out."""
        nodes = self.arrays.nodes[row, : self.count(row)]
        return [self.sources[first] for first in nodes["first"][nodes["weight"] > -math.inf].tolist()]

    def expected_gains(
        self, rows: Ints, caps: Ints, prices: Floats, child_shares: Floats, chains: Bools | None = None
    ) -> tuple[Floats, Floats]:
        """What sessions have in hand, and the best leaf that a drafter is extending right now.

        Args:
            rows: int32 `[sessions]`.
            caps: int32 `[sessions]`, most nodes of each.
            prices: float64 `[sessions]`, least survival worth verifying; 1: it must not be delayed.
            child_shares: float64 `[sessions]`, survival of a node's best child over that of the node.
            chains: As in `best`.

        Returns:
            Expected tokens of a step now, and what the next nodes would add, float64 `[sessions]`.
        """
        picked = self.best(rows, caps, chains)
        expected, gains = np.empty(len(rows)), np.empty(len(rows))
        tree_loops.promise(self.arrays, rows, caps, prices, child_shares, *picked, expected, gains)
        return expected, gains

    def paths(self, rows: Ints, slots: Ints) -> tuple[Ints, Ints, Ints]:
        """Paths from below the root down to some nodes, these included.

        Returns:
            Where each one's ends, int32 `[nodes]`; tokens and rows of KV of all of them, int32 `[n]`.
        """
        ends = np.empty(len(rows), np.int32)
        tokens, kvs = np.empty(16 * len(rows), np.int32), np.empty(16 * len(rows), np.int32)
        total = tree_loops.paths(self.arrays, rows, slots, ends, tokens, kvs)
        if total > len(tokens):
            tokens, kvs = np.empty(total, np.int32), np.empty(total, np.int32)
            tree_loops.paths(self.arrays, rows, slots, ends, tokens, kvs)
        return ends, tokens, kvs

    # A drafter's end

    def any_work(self, rows: Ints, *, room: bool, context_len: int) -> bool:
        """Whether one of some sessions lags, or has nodes to push or, if there is room for KV, to grow."""
        return bool(drafting.any_work(self.arrays, rows, room, context_len))

    def frontier(self, rows: Ints, *, limit: int, context_len: int) -> Calls:
        """Nodes worth computing next, of all sessions, the best first.

        Args:
            rows: int32 `[sessions]`.
            limit: Most nodes of each.
            context_len: Tokens that the draft model takes: children must lie within them.
        """
        size = len(rows) * limit
        found = Calls(np.empty(size, np.int32), np.empty(size, np.int32))
        weights = np.empty(size)
        total = drafting.frontier(self.arrays, rows, limit, context_len, *found, weights)
        order = np.argsort(-weights[:total], kind="stable")
        return Calls(found.rows[order], found.slots[order])

    def levels(self, rows: Ints, slots: Ints, *, most: int, costs: Floats, context_len: int) -> Ints:
        """How many levels of guesses one call drafts below nodes, `[nodes]`, each below the best of the one before.

        Args:
            rows: int32 `[nodes]`.
            slots: int32 `[nodes]`, or ROOT.
            most: Of levels.
            costs: float64 `[nodes]`, time of a level as a share of that between two commits.
            context_len: As in `frontier`.
        """
        counts = np.empty(len(rows), np.int32)
        drafting.levels(self.arrays, rows, slots, most, costs, context_len, counts)
        return counts

    def grow(self, rows: Ints, parents: Ints, tokens: Ints, confidences: Floats, kv: Ints = _ONE_LEVEL) -> None:
        """Hangs guesses below nodes or roots that were computed, and keeps back what is worth too little now.

        Args:
            rows: int32 `[nodes]`.
            parents: int32 `[nodes]`, slots or ROOT.
            tokens: int32 `[levels, nodes, width]`, best first, below 0 behind the last; those of a level hang below
                the best of the level before.
            confidences: float64 `[levels, nodes, width]`.
            kv: int32 `[levels - 1, nodes]`, rows of KV of the best of each level but the last; NONE where it has taken
                them.
        """
        drafting.grow(self.arrays, rows, parents, tokens, confidences, kv)

    def reprice(self, rows: Ints, prices: Floats, rooms: Ints) -> None:
        """Prices and rooms that came with commits; what has become worth it is pushed soon."""
        drafting.reprice(self.arrays, rows, prices, np.minimum(rooms, drafting.MAX_ROOM))

    def push(self, rows: Ints, *, room: bool, context_len: int, at_once: bool = False) -> Pushed:
        """Nodes that are due after a draft step: held long enough, or the last for now.

        Args:
            rows: int32 `[sessions]`.
            room: Whether there is room for KV of more nodes.
            context_len: As in `frontier`.
            at_once: All that verifiers do not know.
        """
        size = int(self.arrays.trees["unsent"][rows].sum())
        ids, parent_ids, tokens, positions = np.empty((4, size), np.int32)
        pushed = Pushed(ids, parent_ids, tokens, positions, np.empty(size), np.zeros(len(rows), np.int32))
        if size:
            drafting.push(self.arrays, rows, room, at_once, context_len, *pushed)
        return pushed

    # For readers

    def path(self, row: int, slot: int) -> list[int]:
        """Tokens from below the root down to a slot."""
        tokens: list[int] = []
        nodes = self.arrays.nodes
        while slot != ROOT:
            tokens.append(int(nodes["token"][row, slot]))
            slot = int(nodes["parent"][row, slot])
        return tokens[::-1]

    # Growth of the arrays

    def _add_rows(self, more: int) -> None:
        """Makes place for more sessions, the lowest rows first."""
        first = len(self.arrays.trees)
        trees, nodes, names, recent, judges = (grown(each, more) for each in self.arrays[:-1])
        self.arrays = Arrays(trees, nodes, names, recent, judges, self.arrays.calibrations)
        self.links.add_rows(more)
        self.arrays.judges["calibration"][first:] = NONE
        self._free += range(first + more - 1, first - 1, -1)

    def _add_calibrations(self, more: int) -> None:
        self.arrays = self.arrays._replace(calibrations=grown(self.arrays.calibrations, more))


_CONTEXT_LEN = 8


def warm_up(forest: Forest) -> None:
    """Runs every loop once over a session of a token; what was compiled before is read from the cache."""
    row = forest.take_row()
    rows, one = rows_of([row]), rows_of([1])
    sure = np.array([0.5])
    forest.open(row, [0], keeps_kv=True, price=0.5, room=8)
    forest.place(rows, ready=[True], lags=[False])
    _verify(forest, row, one, sure)
    roots = rows_of([ROOT])
    forest.levels(rows, roots, most=1, costs=sure, context_len=_CONTEXT_LEN)
    forest.grow(rows, roots, np.array([[[1, 2]]], np.int32), np.array([[[0.5, 0.4]]]))
    forest.reprice(rows, sure, np.array([8]))
    forest.any_work(rows, room=True, context_len=_CONTEXT_LEN)
    calls = forest.frontier(rows, limit=1, context_len=_CONTEXT_LEN)
    forest.set_kv(calls, one[: len(calls.rows)])
    forest.paths(*calls)
    forest.push(rows, room=True, context_len=_CONTEXT_LEN)
    forest.wants_nodes(rows)
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
    forest.expected_gains(rows, one, sure, sure)
    forest.commit(rows, one, one)


def _link(forest: Forest, row: int) -> None:
    links, rows, one, sure = forest.links, rows_of([row]), rows_of([1]), np.array([0.5])
    links.begin(row, 0, 0.5)
    drafter = links.new_drafter(1.0)
    links.connect(row, drafter)
    links.look_ahead(rows, one, prices=sure, step_s=1.0)
    links.due(rows, 0.0)
    links.standing(rows, 1)
    links.serve(rows, one, drafter, has_distributions=False)
    links.waits(rows, 0.0)
    links.mark_silent(rows, 0.0)
    links.drafts_arrived(rows, one, one, sure, sure)
    links.lag_tokens(rows)
    links.drop_drafter(drafter)
