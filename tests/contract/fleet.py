"""Verifier sessions against drafter sessions over an in-memory link that loses, doubles, reorders and delays.

The models are toys: the target's next token is a hash of the prefix, the drafter guesses it right most of the time.
Everything is driven by explicit calls, so every story is repeatable.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.link import ConnectedDrafter, SessionLink, commit, merge
from paceline.core.messages import (
    CloseSession,
    Commit,
    Commits,
    Drafts,
    GenerateRequest,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pages import BlockPool
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.core.target_events import SpeculationTally
from paceline.engine.draft_session import DraftSession
from paceline.forest import Calls, Gathered, Ints, Links, rows_of
from tests.support.guesses import NodeGuess, SessionDrafts, to_commits, to_drafts
from tests.support.slow_trees import SlowNode, SlowTree
from tests.support.trees import allot, new_tree, walk

VOCAB_SIZE = 5
MODEL = ModelIdentity(name="toy", vocab_hash="toy", vocab_size=VOCAB_SIZE, context_len=4096)


def target_token(prefix: list[int], seed: int) -> int:
    """The one right continuation of a prefix."""
    return zlib.crc32(bytes(prefix) + seed.to_bytes(2, "little")) % VOCAB_SIZE


def plain_text(prompt: list[int], seed: int, length: int) -> list[int]:
    """What decoding without drafts gives."""
    tokens = list(prompt)
    while len(tokens) < length:
        tokens.append(target_token(tokens, seed))
    return tokens


@dataclass
class Link:
    """Messages under way; the test decides which is delivered, doubled or lost."""

    to_drafter: list[ToDrafter] = field(default_factory=list)
    to_verifier: list[ToVerifier] = field(default_factory=list)


class ToySession(DraftSession):
    """One session at the toy drafter, and the tree that it grows."""

    def __init__(self, opened: OpenSession) -> None:
        super().__init__(opened, MODEL, BlockPool(1))
        self.tree = SlowTree(self.tokens)
        self.unsent: list[SlowNode] = []
        self._next_id = 1

    def receive(self, commit: Commit) -> list[int] | LaggingSession:
        outcome = super().receive(commit)
        if isinstance(outcome, list):
            self.tree.commit(outcome)
            self.unsent = [node for node in self.unsent if node.alive]
        return outcome

    def grow(self, parent: SlowNode, guesses: list[tuple[int, float]]) -> None:
        for token_id, confidence in guesses:
            if token_id not in parent.children:
                node = self.tree.add(parent, token_id, confidence)
                node.node_id, self._next_id = self._next_id, self._next_id + 1
                self.unsent.append(node)

    def drain(self) -> Drafts | None:
        unsent, self.unsent = self.unsent, []
        parents = [0 if node.parent is self.tree.root else node.parent.node_id for node in unsent]
        nodes = [
            NodeGuess(node.node_id, parent, node.token, node.guesses[0])
            for node, parent in zip(unsent, parents, strict=True)
        ]
        return to_drafts(SessionDrafts(self.number, len(self.tokens), nodes)) if nodes else None


class ToyDrafter:
    """Holds drafter sessions; `skill` out of 10 guesses are right."""

    def __init__(self, seed: int, skill: int = 7, width: int = 2) -> None:
        self.seed = seed
        self.skill = skill
        self.width = width
        self.sessions: dict[int, ToySession] = {}

    def receive(self, message: ToDrafter) -> list[ToVerifier]:
        match message:
            case OpenSession():
                self.sessions[message.number] = ToySession(message)
            case Commits():
                answers = [self._commit(each) for each in message]
                return [each for each in answers if isinstance(each, LaggingSession)]
            case CloseSession():
                self.sessions.pop(message.number, None)
        return []

    def _commit(self, commit: Commit) -> list[int] | LaggingSession:
        known = self.sessions.get(commit.number)
        return LaggingSession(number=commit.number, have_len=0) if known is None else known.receive(commit)

    def grow(self) -> list[ToVerifier]:
        """Expands the best leaf of every session and pushes the new nodes."""
        pushed: list[ToVerifier] = []
        for session in self.sessions.values():
            tree = session.tree
            leaves = [node for node in [tree.root, *tree.nodes()] if not node.children]
            if len(tree.nodes()) < session.room and leaves:
                leaf = max(leaves, key=lambda node: node.log_weight)
                session.grow(leaf, self._guesses([*session.tokens, *leaf.path()]))
            message = session.drain()
            pushed += [message] if message else []
        return pushed

    def _guesses(self, prefix: list[int]) -> list[tuple[int, float]]:
        right = target_token(prefix, self.seed)
        skilled = zlib.crc32(bytes([*prefix, 1])) % 10 < self.skill
        first = right if skilled else (right + 1) % VOCAB_SIZE
        return [((first + rank) % VOCAB_SIZE, 0.7 / (rank + 1)) for rank in range(self.width)]


class ToyFleet:
    """One verifier, one drafter, one session at a time, and the link between them."""

    def __init__(self, *, seed: int = 1, length: int = 40, policy: Goodput | None = None) -> None:
        self.seed = seed
        self.length = length
        self.prompt = [1, 2, 3]
        self.policy = policy or FixedGamma(gamma=4)
        self.link = Link()
        self.drafter = ToyDrafter(seed)
        self._begin(epoch=1, committed=[])

    def _begin(self, epoch: int, committed: list[int]) -> None:
        request = GenerateRequest(
            session_id="s",
            epoch=epoch,
            prompt_token_ids=tuple(self.prompt),
            committed_token_ids=tuple(committed),
            sampling=SamplingParams(max_tokens=self.length, seed=self.seed),
            speculation=SpeculationParams(),
        )
        tokens = [*self.prompt, *committed]
        self.session = SessionLink(request, epoch, tokens, new_tree(tokens), {}, address="drafter")
        self.tally = SpeculationTally()
        self.reopen()

    def _tell(self) -> None:
        (opens,), num_told = self._links.due(self._rows, 0.0)
        assert opens or num_told
        if opens:
            self.link.to_drafter.append(self.session.open())
        else:
            self._tell_commits()

    def _tell_commits(self) -> None:
        drafter = self.session.drafter
        assert drafter is not None
        [news] = zip(
            *(column.tolist() for column in self._links.drain_commits(self._rows, drafter.number)), strict=True
        )
        number, since_len, price, room = news
        commit = Commit(number, since_len, self.session.tokens[since_len:], price, room)
        self.link.to_drafter.append(to_commits(commit))

    @property
    def mirror(self) -> ToySession:
        """The drafter's end of the session."""
        return self.drafter.sessions[self.session.number]

    @property
    def _rows(self) -> Ints:
        return rows_of([self.session.tree.row])

    @property
    def _links(self) -> Links:
        return self.session.tree.forest.links

    @property
    def done(self) -> bool:
        return len(self.session.tokens) >= self.length

    def verify(self) -> None:
        """One verifier step."""
        if self.done:
            return
        session = self.session
        guesses = self._choose(self.length - len(session.tokens))
        tokens = walk(
            guesses.tokens.tolist(),
            guesses.parents.tolist(),
            lambda path: target_token([*session.tokens, *path], self.seed),
        )[: self.length - len(session.tokens)]
        done = commit(session.tree.forest, [session], [len(tokens)], tokens)
        self.tally.count(len(guesses.tokens), int(done.accepted[0]), 1, hit=bool(done.hits[0]))
        self._tell()

    def _choose(self, cap: int) -> Gathered:
        tree = self.session.tree
        (slots,) = allot(self.policy, [tree], [cap])
        rows = rows_of([tree.row])
        taken = tree.forest.gather(rows, np.array([slots], np.int32).reshape(1, -1), rows_of([len(slots)]))
        tree.forest.set_kv(Calls(rows.repeat(len(slots)), taken.slots), taken.slots)
        return taken

    def grow(self) -> None:
        """One drafter step."""
        self.link.to_verifier += self.drafter.grow()

    def deliver_to_drafter(self, index: int = 0, *, keep: bool = False) -> None:
        """Delivers one message under way; `keep` leaves a copy behind (a duplicate)."""
        message = self.link.to_drafter[index] if keep else self.link.to_drafter.pop(index)
        self.link.to_verifier += self.drafter.receive(message)

    def deliver_to_verifier(self, index: int = 0, *, keep: bool = False) -> None:
        """The other direction."""
        message = self.link.to_verifier[index] if keep else self.link.to_verifier.pop(index)
        match message:
            case Drafts() if message.numbers[0] == self.session.number:
                base_len = int(message.base_lens[0])
                self.session.check(base_len, has_distributions=False)
                merged = merge(self.session.tree.forest, DRAFT_MODEL, rows_of([self.session.tree.row]), message)
                self._links.drafts_arrived(self._rows, message.base_lens, message.sizes, merged.firsts, np.zeros(1))
            case LaggingSession() if message.number == self.session.number:
                opened = self.session.catch_up(message)
                if opened is not None:
                    self.link.to_drafter.append(opened)
                else:
                    self._tell_commits()

    def kill(self) -> None:
        """The drafter dies with all it knew and all that was under way; another one starts empty."""
        self.drafter = ToyDrafter(self.seed)
        self.link = Link()

    def reopen(self) -> None:
        """The verifier dials again and opens the session anew."""
        self.session.connect(ConnectedDrafter(self._links))
        self._links.look_ahead(self._rows, rows_of([2]), prices=np.zeros(1), step_s=1.0)
        self._tell()

    def migrate(self) -> None:
        """Another verifier takes over with the committed tokens; messages of the old epoch stay under way."""
        committed = self.session.tokens[len(self.prompt) :]
        self._begin(self.session.number + 1, committed)

    def exchange(self) -> None:
        """Delivers everything under way, both directions, until nothing is."""
        while self.link.to_drafter or self.link.to_verifier:
            while self.link.to_drafter:
                self.deliver_to_drafter()
            while self.link.to_verifier:
                self.deliver_to_verifier()
