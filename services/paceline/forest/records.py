"""The records that a forest is made of.

A tree is a row of nodes, parents before children. Between two commits rows are only appended, so a slot names a node
until then; a commit moves the nodes that live on to the front. Nothing but the plan of a step holds a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core.config import DISABLE_JIT

from paceline.kernel_cache import FOREST, FunctionT, compiled

# Parent of what hangs below the last committed token.
ROOT = -1
# No slot, or no row of KV.
NONE = -1
# There is no place for another node.
FULL = -2
# No such id. Numbers from -1 down to it stand for committed nodes: ~position.
GONE = -(2**31)
# Ids of a session that are remembered, a power of 2: a node with an older id gets no more children.
RING = 1024
# Committed tokens of a session that are remembered, for guesses that are still under way.
RECENT = 128
# Most nodes of a session, far more than one can use; what comes beyond is not added.
SLOTS = 1024
# Commits to a session's drafter that are kept track of; with more on their way at once the oldest are forgotten.
TRACKED = 64
# The least likely guess still has a survival above 0, so that logarithms stay finite.
LEAST_CONFIDENCE = 1 / 512

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

TREE = np.dtype(
    [
        # Nodes, and committed tokens.
        ("count", "i4"),
        ("committed_len", "i4"),
        # A node has one child: what is guessed beside the first is dropped.
        ("chain", "i1"),
        # Rows of KV stay with their nodes when a commit comes, as a drafter's do.
        ("keeps_kv", "i1"),
        # Of a drafter's end: whether KV of all committed tokens is there, and whether some is to be computed; draft
        # steps since the last commit, and the one at which new nodes are pushed; the next node's id.
        ("ready", "i1"),
        ("lags", "i1"),
        ("held", "i2"),
        ("push_at", "i2"),
        ("next_id", "i4"),
        # Nodes that the verifier knows or is to know, and those it does not know yet; most of them.
        ("named", "i4"),
        ("unsent", "i4"),
        ("room", "i4"),
        # Guesses that messages have brought since the last commit.
        ("offered", "i4"),
        # Least survival worth drafting for; 1: none is.
        ("price", "f8"),
        # How sure a drafter's best guess below a node usually is here.
        ("share", "f8"),
    ],
    align=True,
)
# What an id stands for: a slot, or ~position of a committed token.
NAME = np.dtype([("id", "i4"), ("at", "i4")])
# A source's calibration for a session, NONE: it is believed; and how much better than usual it does there, in log odds.
JUDGE = np.dtype([("calibration", "i4"), ("offset", "f8"), ("variance", "f8")], align=True)
CALIBRATION = np.dtype(
    [("slope", "f8"), ("intercept", "f8"), ("var_slope", "f8"), ("var_intercept", "f8"), ("covariance", "f8")]
)

LINK = np.dtype(
    [
        # Number of its drafter; NONE: the stream to it is not up.
        ("drafter", "i4"),
        # Its name in messages.
        ("number", "i4"),
        # Committed tokens that its drafter knows; 0: it does not know the session.
        ("sent_len", "i4"),
        # Committed tokens from which on the next message tells it; NONE: it is told nothing.
        ("unsent_from", "i4"),
        # Committed tokens that it knew when it last sent guesses.
        ("answered_len", "i4"),
        # Committed tokens when it was called to work, and whether it has answered since.
        ("activated_len", "i4"),
        ("answered", "i1"),
        # The commits that it has not answered yet, in a ring.
        ("oldest", "i2"),
        ("num_unanswered", "i2"),
        # Nodes that it may have in the tree; least survival worth drafting for, 1: it idles; and the price last sent.
        ("room", "i4"),
        ("price", "f8"),
        ("sent_price", "f8"),
        # When nodes last came from a drafter that knew of the last commit; NaN: they have not.
        ("received_s", "f8"),
        # Most guesses of a step; how long the text may become, and up to which length it may wait for drafts.
        ("most_guesses", "i4"),
        ("last_len", "i4"),
        ("waits_up_to", "i4"),
        # Whether a step verifies one chain instead of a tree, and whether sources inside the verifier guess, too.
        ("takes_chains", "i1"),
        ("has_sources", "i1"),
    ],
    align=True,
)
# Expected seconds from a commit to the first nodes of a drafter that knew it, and between two messages with nodes of
# one session; survival of the best first guess after a commit; whether an answer was overdue, and nothing came since.
DRAFTER = np.dtype([("response_s", "f8"), ("interval_s", "f8"), ("child_share", "f8"), ("silent", "i1")], align=True)


def node_type(num_sources: int) -> np.dtype[np.void]:
    """Type of one guessed token."""
    return np.dtype(
        [
            # Its name on the wire; 0: none, or the verifier is not to know it yet.
            ("id", "i4"),
            ("token", "i4"),
            # The absolute index that the token would take.
            ("position", "i4"),
            # Where its row of KV is, or NONE: not computed.
            ("kv", "i4"),
            # Slot, or ROOT.
            ("parent", "i2"),
            # The source that guessed it first.
            ("first", "i1"),
            ("sent", "i1"),
            # Logarithm of its survival: the probability that all tokens from the root down to it match. -inf: masked.
            ("weight", "f8"),
            # Of each source, below 0: it did not guess the token.
            ("confidences", "f8", (num_sources,)),
        ],
        align=True,
    )


class Arrays(NamedTuple):
    """A forest, as its kernels take it; a session is a row.

    Attributes:
        trees: TREE `[rows]`.
        nodes: `node_type` `[rows, slots]`.
        names: NAME `[rows, RING]`, by the last bits of ids.
        recent: int32 `[rows, RECENT]`, committed tokens by the last bits of their positions.
        judges: JUDGE `[rows, sources]`.
        calibrations: CALIBRATION `[calibrations]`.
    """

    trees: Any
    nodes: Any
    names: Any
    recent: Ints
    judges: Any
    calibrations: Any


class LinkArrays(NamedTuple):
    """The links of sessions to their drafters, as kernels take them; a session has the row of its tree.

    Attributes:
        links: LINK `[rows]`.
        sent_lens: int32 `[rows, TRACKED]`, committed tokens of the commits without an answer.
        sent_s: float64 `[rows, TRACKED]`, when these were sent.
        drafters: DRAFTER `[drafters]`.
    """

    links: Any
    sent_lens: Ints
    sent_s: Floats
    drafters: Any


class Standing(NamedTuple):
    """Where sessions stand, `[sessions]` each.

    Attributes:
        caps: int32, most guesses of a step.
        drafted: Whether they have a drafter whose stream is up.
        sourced: Whether sources inside the verifier guess for them.
        works: Whether their drafter works for them, and a step may verify its guesses.
        answered: Whether their drafter has answered since it was called, or should have.
        chains: Whether a step verifies one chain instead of a tree.
        prices: float64, least survival worth drafting for; 1: the drafter idles.
        shares: float64, survival of the best child over its parent's, as the drafter guesses.
    """

    caps: Ints
    drafted: Bools
    sourced: Bools
    works: Bools
    answered: Bools
    chains: Bools
    prices: Floats
    shares: Floats

    def first(self, count: int) -> Standing:
        """Where the first of the sessions stand."""
        return Standing._make([column[:count] for column in self])


def records(shape: int | tuple[int, ...], kind: np.dtype[np.void]) -> Any:
    """Empty records; where kernels are not compiled they are read by the names of their fields all the same."""
    made = np.zeros(shape, kind)
    return made.view(np.recarray) if DISABLE_JIT else made


def grown(array: Any, more: int) -> Any:
    """An array with more rows, of zeros, behind its own."""
    longer = np.zeros((len(array) + more, *array.shape[1:]), array.dtype).view(type(array))
    longer[: len(array)] = array
    return longer


def kernel(function: FunctionT) -> FunctionT:
    """Compiles a loop of the forest on its first call.

    It keeps the GIL: it takes microseconds, and a thread that gave the GIL up would wait longer to get it back.
    """
    return compiled(function, FOREST, nogil=False)


def rows_of(rows: Iterable[int]) -> Ints:
    """Numbers as kernels take them, int32 `[n]`."""
    return np.fromiter(rows, np.int32)


class Merged(NamedTuple):
    """What became of messages.

    Attributes:
        counts: int32 `[messages, 3]`, guesses added, those that fell off, and those without a parent or a place.
        firsts: float64 `[messages]`, best survival of a first guess, of those that know the last commit; else -1.
    """

    counts: Ints
    firsts: Floats


class Committed(NamedTuple):
    """What commits did.

    Attributes:
        accepted: int32 `[commits]`, tokens that were in the tree and had a row of KV.
        hits: bool `[commits]`, whether all were in the tree.
        moves: int32 `[n, 2]`, KV and position of the accepted nodes, commit by commit.
        freed: int32 `[n]`, KV of nodes that fell off.
        counts: int64 `[commits, 3, sources]`, nodes with a row that were judged, those of them that matched, and nodes
            that went without a row, by the source that guessed them first.
    """

    accepted: Ints
    hits: Bools
    moves: Ints
    freed: Ints
    counts: npt.NDArray[np.int64]


class Picked(NamedTuple):
    """The best nodes of some sessions.

    Attributes:
        slots: int32 `[sessions, most]`, best first, NONE behind the last.
        survivals: float64 `[sessions, most]`, 0 behind the last.
    """

    slots: Ints
    survivals: Floats


class Gathered(NamedTuple):
    """Nodes that a step verifies, session by session, parents before children: int32 `[nodes]` each.

    Attributes:
        parents: Which of the session's nodes here each one hangs below; ROOT: the root.
    """

    slots: Ints
    tokens: Ints
    positions: Ints
    parents: Ints


class Guesses(NamedTuple):
    """Guesses that a step verifies, session by session, parents before children, in columns.

    Attributes:
        counts: int32 `[sessions]`, how many each session has.
        tokens: int32 `[guesses]`.
        positions: int32 `[guesses]`, absolute.
        parents: int32 `[guesses]`, which of its session's guesses each one hangs below; ROOT: the root.
        kv: int32 `[guesses]`, scratch slots.
    """

    counts: Ints
    tokens: Ints
    positions: Ints
    parents: Ints
    kv: Ints

    @property
    def deepest(self) -> list[int]:
        """The last position of each session, 0 of one without guesses."""
        last = np.zeros(len(self.counts), np.int32)
        np.maximum.at(last, np.repeat(np.arange(len(last)), self.counts), self.positions)
        return last.tolist()

    def of(self, place: int) -> Guesses:
        stop = int(self.counts[: place + 1].sum())
        mine = slice(stop - int(self.counts[place]), stop)
        return Guesses(self.counts[place : place + 1], *(column[mine] for column in self[1:]))

    def without(self, places: Sequence[int]) -> Guesses:
        """All but those of some sessions."""
        counts = self.counts.copy()
        counts[places] = 0
        left = np.repeat(counts > 0, self.counts)
        return Guesses(counts, *(column[left] for column in self[1:]))


NO_GUESSES = Guesses(*np.zeros((5, 0), np.int32))


class Calls(NamedTuple):
    """Nodes whose children a drafter computes next: int32 `[nodes]` each, best first."""

    rows: Ints
    slots: Ints


class Pushed(NamedTuple):
    """Nodes that verifiers are to know: `[nodes]` each, and int32 `[sessions]` where those of a session end."""

    ids: Ints
    parent_ids: Ints
    tokens: Ints
    positions: Ints
    confidences: Floats
    ends: Ints

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Ids, parents' ids, tokens and confidences of the nodes that are due."""
        end = self.ends[-1]
        return self.ids[:end], self.parent_ids[:end], self.tokens[:end], self.confidences[:end]
