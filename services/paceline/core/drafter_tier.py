"""The drafter tier as a verifier sees it: drafters whose streams are up, and the messages from and to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import RemoteProtocolError
from paceline.core.link import ConnectedDrafter, SessionLink, merge
from paceline.core.messages import Commits, Drafts, LaggingSession, ToDrafter, sizes_of
from paceline.core.target_events import DraftsArrived, LinkChanged, StepReport
from paceline.core.tree import DraftTree
from paceline.forest import NONE, Committed, Forest, Ints, rows_of

# Tokens of sessions that a step sends again to a drafter that missed commits; beyond this it must ask again. A drafter
# that always asks would have all its sessions sent whole in each step.
MOST_RESENT = 65_536
# Labels of sessions without a drafter.
NO_DRAFTER = ("", "")


class DrafterTier:
    """All drafters of an engine.

    Args:
        vocab_size: The target's vocabulary size.
        forest: The trees of all sessions.
    """

    def __init__(self, vocab_size: int, forest: Forest) -> None:
        self.forest = forest
        self._vocab_size = vocab_size
        self._links = forest.links
        self._drafters: dict[str, ConnectedDrafter] = {}
        self._outgoing: dict[str, list[ToDrafter]] = {}
        # Rows of sessions whose drafters must get commits.
        self._told: list[Ints] = []
        self._broken: dict[str, RemoteProtocolError] = {}
        # Sessions resent to their drafters in this step, and tokens, by address.
        self._answered: set[int] = set()
        self._num_resent: Counter[str] = Counter()
        self._by_number: dict[int, SessionLink] = {}
        self._row_of: dict[int, int] = {}
        # Numbers of sessions whose trees filter guesses.
        self._filtered: set[int] = set()
        # Of commits that are not counted yet: drafters of their sessions, tokens of each, and `Committed.counts`.
        self._commits: list[tuple[list[ConnectedDrafter | None], npt.NDArray[Any], npt.NDArray[np.int64]]] = []

    @property
    def has_work(self) -> bool:
        """True while messages are left to send, or a link is to be reported as broken."""
        return bool(self._outgoing or self._told or self._broken)

    def connect(self, link: SessionLink) -> None:
        """A session begins, and its drafter may be up already."""
        assert link.tree.forest is self.forest, "links stand in the rows of one forest"
        self._by_number[link.number], self._row_of[link.number] = link, link.tree.row
        if link.tree.filters_guesses:
            self._filtered.add(link.number)
        drafter = self._drafters.get(link.address)
        if drafter is not None:
            link.connect(drafter)

    def pair(self, link: SessionLink, address: str, now_s: float) -> None:
        """Closes a session at its drafter, and opens it at another."""
        self.queue(link.address, link.pair(address, self._drafters.get(address)))
        self.update([link], now_s)

    def part(self, link: SessionLink) -> None:
        """A session ends, at its drafter too."""
        self._by_number.pop(link.number, None)
        self._row_of.pop(link.number, None)
        self._filtered.discard(link.number)
        self.queue(link.address, link.close())

    def change(self, event: LinkChanged, now_s: float) -> None:
        """A drafter was reached, and its sessions are opened anew, or lost."""
        self._lose(event.address)
        if not event.up:
            return
        labels = event.draft_model, event.address
        drafter = ConnectedDrafter(self._links, wants_states=event.wants_states, labels=labels)
        self._drafters[event.address] = drafter
        mine = self._of(event.address)
        for link in mine:
            link.connect(drafter)
        self.update(mine, now_s)

    def _of(self, address: str) -> list[SessionLink]:
        return [link for link in self._by_number.values() if link.address == address]

    def _lose(self, address: str) -> None:
        drafter = self._drafters.pop(address, None)
        for link in self._of(address):
            link.disconnect()
        if drafter is not None:
            drafter.drop()

    def receive(self, events: Sequence[DraftsArrived], report: StepReport) -> None:
        """Handles drafters' messages in order; the link to one that breaks the protocol is reset."""
        for address in dict.fromkeys([each.address for each in events]):
            drafter = self._drafters.get(address)
            if drafter is None:
                continue
            drafter.speaks()
            mine = [each for each in events if each.address == address]
            try:
                self._take_in(mine, drafter, report)
            except RemoteProtocolError as error:
                self._broken[address] = error
                self._lose(address)

    def _take_in(self, events: Sequence[DraftsArrived], drafter: ConnectedDrafter, report: StepReport) -> None:
        """Handles a drafter's messages; guesses that wait are merged in one call."""
        waiting: list[tuple[Drafts, float]] = []
        for message, arrived_s in [(message, each.arrived_s) for each in events for message in each.messages]:
            if isinstance(message, Drafts):
                waiting.append((message, arrived_s))
            # Trees that filter look at the guesses of a message before the next ones hang below them.
            if self._filtered or isinstance(message, LaggingSession):
                self._merge(waiting, drafter, report)
                waiting.clear()
            if isinstance(message, LaggingSession):
                self._answer(message, drafter)
        self._merge(waiting, drafter, report)

    def _answer(self, message: LaggingSession, drafter: ConnectedDrafter) -> None:
        """Sends what a drafter lacks; once a step, and bounded, so that it cannot make us work by asking more often."""
        link = self._by_number.get(message.number)
        if link is None or link.drafter is not drafter or message.number in self._answered:
            return
        address = link.address
        if self._num_resent[address] >= MOST_RESENT:
            return
        self._answered.add(message.number)
        self._num_resent[address] += len(link.tokens)
        self.queue(address, link.catch_up(message))
        self._told.append(rows_of([link.tree.row]))

    def _merge(self, waiting: Sequence[tuple[Drafts, float]], drafter: ConnectedDrafter, report: StepReport) -> None:
        """Merges guesses of sessions that the drafter still drafts for; of others it has not heard yet."""
        if not waiting:
            return
        drafts = self._within_vocabulary(all_sent := Drafts.joined([each for each, _ in waiting]))
        arrived_s = np.repeat([at_s for _, at_s in waiting], [each.num_sessions for each, _ in waiting])
        # NONE for a session that has ended, and then for those of other drafters.
        rows = rows_of([self._row_of.get(number, NONE) for number in drafts.numbers.tolist()])
        has = bool(drafts.distributions)
        doubtful = self._links.serve(rows, drafts.base_lens, drafter.number, has_distributions=has)
        if doubtful != NONE:
            link = self._by_number[int(drafts.numbers[doubtful])]
            link.check(int(drafts.base_lens[doubtful]), has_distributions=has)
        merged = merge(self.forest, drafter.source, rows, drafts, self._filtered_among(drafts.numbers, rows))
        taken_s = self._links.drafts_arrived(rows, drafts.base_lens, drafts.sizes, merged.firsts, arrived_s)
        report.sample("paceline:draft_round_trip_seconds", *taken_s)
        num_lost = all_sent.num_nodes - drafts.num_nodes + int(merged.counts[:, 1:].sum())
        if num_lost:
            report.count("paceline:draft_nodes", drafter.source, "late", by=num_lost)

    def _filtered_among(self, numbers: Ints, rows: Ints) -> dict[int, DraftTree]:
        """Trees that filter their guesses, by the places of their sessions' numbers."""
        if not self._filtered:
            return {}
        places = np.flatnonzero(np.isin(numbers, [*self._filtered]) & (rows != NONE)).tolist()
        return {place: self._by_number[int(numbers[place])].tree for place in places}

    def _within_vocabulary(self, drafts: Drafts) -> Drafts:
        """Leaves out what the vocabulary does not hold; with a distribution, the token itself does not matter."""
        highest: npt.NDArray[Any] = drafts.tokens
        if drafts.distributions:
            highest = np.array([max(each.token_ids) for each in drafts.distributions], np.int64)
        if np.maximum.reduce(highest, initial=0) < self._vocab_size:
            return drafts
        return drafts.only(np.ones(drafts.num_sessions, np.bool_), highest < self._vocab_size)

    def count_commits(self, links: Sequence[SessionLink], ends: Sequence[int], done: Committed) -> None:
        """Notes tokens that sessions have committed, and what became of their drafters' guesses, for `report_commits`.

        Args:
            links: Of the sessions.
            ends: Where the tokens of each end.
            done: Outcome of the commit.
        """
        self._commits.append(([each.drafter for each in links], sizes_of(rows_of(ends)), done.counts))

    def report_commits(self, report: StepReport) -> None:
        """Counts what was noted, by drafter."""
        commits, self._commits = self._commits, []
        for drafters, num_tokens, counts in commits:
            for drafter in dict.fromkeys(drafters):
                mine = np.array([each is drafter for each in drafters], np.bool_)
                labels = NO_DRAFTER if drafter is None else drafter.labels
                report.count("paceline:drafter_committed_tokens", *labels, by=int(num_tokens[mine].sum()))
                if drafter is not None:
                    source = self.forest.number_of[drafter.source]
                    verified, accepted, _ = counts[mine, :, source].sum(axis=0).tolist()
                    report.count("paceline:drafter_verified_tokens", *labels, by=verified)
                    report.count("paceline:drafter_accepted_tokens", *labels, by=accepted)

    def update(self, links: Sequence[SessionLink], now_s: float) -> None:
        """Queues what the drafters of sessions do not know yet."""
        rows = rows_of([each.tree.row for each in links])
        opens, num_told = self._links.due(rows, now_s)
        if num_told:
            self._told.append(rows)
        for place in opens.nonzero()[0].tolist():
            self.queue(links[place].address, links[place].open())

    def queue(self, address: str, message: ToDrafter | None) -> None:
        """Queues a message for a drafter, if there is one to send."""
        if message is not None:
            self._outgoing.setdefault(address, []).append(message)

    def take(self) -> tuple[dict[str, list[ToDrafter]], dict[str, RemoteProtocolError]]:
        """Messages to send after a step, and the links that are to be reset."""
        told, self._told = self._told, []
        if told:
            # As a rule a step sends each session once.
            self._tell(told[0] if len(told) == 1 else np.unique(np.concatenate(told)))
        to_drafters, self._outgoing = self._outgoing, {}
        broken, self._broken = self._broken, {}
        self._answered.clear()
        self._num_resent.clear()
        return to_drafters, broken

    def _tell(self, rows: Ints) -> None:
        """Queues what sessions in some rows have committed: one message a drafter."""
        for address, drafter in self._drafters.items():
            numbers, base_lens, prices, rooms = self._links.drain_commits(rows, drafter.number)
            if not len(numbers):
                continue
            links = [self._by_number[number] for number in numbers.tolist()]
            tokens = [each.tokens[since:] for each, since in zip(links, base_lens.tolist(), strict=True)]
            commits = Commits(
                numbers=numbers,
                base_lens=base_lens,
                ends=np.cumsum([len(each) for each in tokens], dtype=np.int32),
                tokens=rows_of(chain.from_iterable(tokens)),
                prices=prices,
                rooms=rooms,
            )
            self.queue(address, commits)
