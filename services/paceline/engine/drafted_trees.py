"""The trees of all sessions of a drafter: how commits prune them, where they grow, and what goes to verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from paceline.core.calibration import CHAIN_CONFIDENCE
from paceline.core.messages import Drafts, sizes_of
from paceline.core.pages import SlotPool
from paceline.core.params import DRAFT_MODEL
from paceline.engine.draft_plan import Starts
from paceline.engine.draft_session import DraftSession
from paceline.forest import NONE, ROOT, Calls, Floats, Forest, Ints, rows_of

# Messages to verifiers, by their streams.
Messages = list[tuple[int, Drafts]]
# Tokens of a session that its tree does not know yet, and the number of those before.
FreshTokens = tuple[DraftSession, int, Sequence[int]]


class DraftedTrees:
    """The trees, and where sessions stand.

    Args:
        scratch: Slots for KV of nodes.
        context_len: Tokens that the draft model takes.
    """

    def __init__(self, scratch: SlotPool, context_len: int) -> None:
        self.forest = Forest((DRAFT_MODEL,))
        self._scratch = scratch
        self._context_len = context_len
        self._sessions: dict[int, DraftSession] = {}
        self._rows = rows_of(())
        # By row, the stream of its verifier.
        # By rows of the forest, which grows now and then.
        self._link_of = np.zeros(1, np.int64)
        # By row, those whose trees cannot grow before some committed tokens are computed.
        self._behind: dict[int, DraftSession] = {}

    @property
    def has_work(self) -> bool:
        """True while a session lags, or has nodes to push or to expand."""
        return self.forest.any_work(self._rows, room=self._has_room, context_len=self._context_len)

    @property
    def behind(self) -> Sequence[DraftSession]:
        """Sessions that have committed tokens to be computed, or no place for more."""
        return list(self._behind.values())

    @property
    def _has_room(self) -> bool:
        return self._scratch.num_free > 0

    def add(self, session: DraftSession) -> None:
        row = session.row = self.forest.take_row()
        self._sessions[row] = session
        self._rows = rows_of(self._sessions)
        if len(self._link_of) < len(self.forest.arrays.trees):
            self._link_of = np.resize(self._link_of, len(self.forest.arrays.trees))
        self._link_of[row] = session.link
        self.forest.open(
            row,
            session.tokens,
            chain=session.chain,
            # Rows drafted from a head's own features are computed anew from the target's.
            keeps_kv=session.features is None,
            price=session.price,
            room=session.room,
        )
        self.place(session)

    def remove(self, session: DraftSession) -> None:
        self.clear(session)
        self._behind.pop(session.row, None)
        del self._sessions[session.row]
        self._rows = rows_of(self._sessions)
        self.forest.give_back(session.row)

    def clear(self, session: DraftSession) -> None:
        """A session's tree has no nodes any more."""
        self._scratch.give_back(*self.forest.kv(session.row).tolist())
        self.forest.clear(session.row)

    def place(self, *sessions: DraftSession) -> None:
        """Something of what there is to compute of some sessions has changed."""
        ready = [session.ready for session in sessions]
        rows, lags = rows_of([session.row for session in sessions]), [session.lags for session in sessions]
        self.forest.place(rows, ready=ready, lags=lags)
        for session, is_ready in zip(sessions, ready, strict=True):
            if is_ready:
                self._behind.pop(session.row, None)
            else:
                self._behind[session.row] = session

    def wants_drafts(self, sessions: Sequence[DraftSession]) -> list[bool]:
        """Whether the verifiers of sessions would take more nodes of them."""
        wanted: list[bool] = self.forest.wants_nodes(rows_of([session.row for session in sessions])).tolist()
        return wanted

    def wants_guesses(self, session: DraftSession, slot: int) -> bool:
        """Whether guesses below a node are still to be drawn; below a node of a chain they are drawn only once."""
        return not session.chain or not self.forest.has_child(session.row, slot)

    def node_id(self, session: DraftSession, slot: int) -> int:
        """Name of a node on the wire; 0: the root."""
        return 0 if slot == ROOT else int(self.forest.arrays.nodes["id"][session.row, slot])

    def commit(self, fresh: Sequence[FreshTokens]) -> tuple[list[tuple[int, int]], Messages]:
        """Follows committed tokens.

        Returns:
            KV of nodes on their paths, from slot to slot of the sessions' pages; and nodes to send at once, where all
            tokens were guessed: a verifier may be waiting for what is at hand.
        """
        sessions, base_lens, token_ids = zip(*fresh, strict=True)
        rows = rows_of([session.row for session in sessions])
        ends = np.cumsum([len(each) for each in token_ids], dtype=np.int32)
        done = self.forest.commit(rows, ends, rows_of(chain.from_iterable(token_ids)))
        kept, start, moves = done.moves.tolist(), 0, list[tuple[int, int]]()
        for session, base_len, count in zip(sessions, base_lens, done.accepted.tolist(), strict=True):
            if count:
                moves += session.keep(base_len, kept[start : start + count])
                start += count
        self.place(*sessions)
        self._scratch.give_back(*done.moves[:, 0].tolist(), *done.freed.tolist())
        prices, rooms = zip(*((session.price, session.room) for session in sessions), strict=True)
        self.forest.reprice(rows, np.array(prices), np.array(rooms, np.int64))
        return moves, self.push(np.unique(rows[done.hits]), at_once=True)

    def plan(self, *, most: int, most_each: int) -> Starts:
        """The best nodes of all sessions to expand, `most_each` of a session at most; takes slots for them."""
        most = min(most, self._scratch.num_free)
        calls = self.forest.frontier(self._rows, limit=most_each, context_len=self._context_len)
        calls = self._shared(calls, most)
        self.forest.set_kv(calls, rows_of(self._scratch.take_many(len(calls.rows))))
        rows, each = np.unique(calls.rows, return_inverse=True)
        ends, path, kv = self.forest.paths(*calls)
        sessions = [self._sessions[row] for row in rows.tolist()]
        return Starts(sessions, rows, each, calls.slots, ends, sizes_of(ends), path, kv)

    def _shared(self, calls: Calls, most: int) -> Calls:
        """The best of some nodes, best first: an equal share of each verifier, and what is left of all."""
        if len(calls.rows) > most:
            links = self._link_of[calls.rows]
            share = -(-most // len(np.unique(links)))
            order = np.argsort(links, kind="stable")
            first = np.searchsorted(links[order], links)
            rank = np.empty(len(links), np.int64)
            rank[order] = np.arange(len(links))
            taken = np.sort(np.argsort(rank - first >= share, kind="stable")[:most])
            calls = Calls(calls.rows[taken], calls.slots[taken])
        return calls

    def plan_levels(self, starts: Starts, *, most: int, costs: Floats) -> Ints:
        """Takes slots for the levels that one call drafts below nodes or roots, int32 `[levels - 1, starts]`.

        Args:
            most: Most levels.
            costs: float64 `[starts]`, see `Forest.levels`.
        """
        counts = self.forest.levels(*starts.calls, most=most, costs=costs, context_len=self._context_len)
        counts[~starts.by_logits] = 1
        counts = np.minimum(counts, 1 + self._scratch.num_free // max(1, len(counts)))
        kv = np.full((int(counts.max(initial=1)) - 1, len(counts)), NONE, np.int32)
        taken = np.arange(len(kv))[:, None] < counts - 1
        kv[taken] = self._scratch.take_many(int(taken.sum()))
        return kv

    def grow_levels(self, starts: Calls, token_ids: Ints, confidences: Floats, kv: Ints) -> None:
        """Hangs levels of guesses below what a step has computed; see `Forest.grow`."""
        self.forest.grow(*starts, token_ids, confidences, kv)
        self.give_back(kv)

    def give_back(self, kv: Ints) -> None:
        """Gives back slots of levels that no node has taken."""
        self._scratch.give_back(*kv[kv != NONE].tolist())

    def grow_chains(self, drawn: Sequence[tuple[DraftSession, int, int]]) -> None:
        """Hangs guesses of chains that are worth it below slots, and keeps the others back; NONE: there is none."""
        if drawn:
            sessions, slots, token_ids = zip(*drawn, strict=True)
            tokens = rows_of(token_ids).reshape(1, -1, 1)
            rows = rows_of(session.row for session in sessions)
            self.forest.grow(rows, rows_of(slots), tokens, np.where(tokens == NONE, 0.0, CHAIN_CONFIDENCE))

    def push(self, rows: Ints | None = None, *, at_once: bool = False) -> Messages:
        """Nodes that are due after a draft step, of sessions in some rows or of all."""
        rows = self._rows if rows is None else rows
        pushed = self.forest.push(rows, room=self._has_room, context_len=self._context_len, at_once=at_once)
        due = sizes_of(pushed.ends) > 0
        if not due.any():
            return []
        sessions = [self._sessions[row] for row in rows[due].tolist()]
        ids, parent_ids, tokens, confidences = pushed.columns
        drafts = Drafts(
            numbers=rows_of(each.number for each in sessions),
            base_lens=rows_of(len(each.tokens) for each in sessions),
            ends=pushed.ends[due],
            ids=ids,
            parent_ids=parent_ids,
            tokens=tokens,
            confidences=confidences,
        )
        return _by_stream(sessions, drafts, pushed.positions)


def _by_stream(sessions: Sequence[DraftSession], drafts: Drafts, positions: Ints) -> Messages:
    """A message for each verifier, and one for each chain, whose guesses have distributions."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, session in enumerate(sessions):
        groups.setdefault((session.link, index if session.chain else NONE), []).append(index)
    messages: Messages = []
    for (link, chain_at), group in groups.items():
        mine = np.zeros(len(sessions), np.bool_)
        mine[group] = True
        message = drafts if len(group) == len(sessions) else drafts.only(mine)
        if chain_at != NONE:
            session, first = sessions[group[0]], drafts.ends[group[0]] - message.num_nodes
            places = positions[first : first + message.num_nodes].tolist()
            message = replace(message, distributions=[session.drafts[place] for place in places])
        messages.append((link, message))
    return messages
