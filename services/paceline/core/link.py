"""What a verifier knows of a session's drafter: how fast it answers, what it was told, and what it has said.

Time comes in as an argument; nothing here reads a clock. A drafter is told of every commit while it works. At rest it
is told that, and no more, until it is called again: then of all at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.core.messages import CloseSession, Commit, DraftNodes, LaggingSession, OpenSession, ToDrafter
from paceline.core.params import DRAFT_MODEL, EAGLE3
from paceline.core.session import VerifierSession
from paceline.core.tree import GraftOutcome
from paceline.core.wait_for_drafts import CHILD_SHARE

# Weight of a new observation.
SMOOTHING = 0.2
# Nodes are overdue after so many times the usual delay.
OVERDUE = 3.0
# Commits whose answers are kept track of; with more on their way at once there is nothing to wait for.
MOST_ASKED = 64
# A drafter that was called back may leave so many tokens of a session unanswered while it reads what it was not told;
# after that it counts as one that has nothing to say.
MOST_UNANSWERED = 64
# Nodes that a drafter may have in a tree per node that may be verified in a step: for the branches that the text will
# not take.
ROOM_PER_NODE = 8
# Nothing is drafted for more steps ahead: one long silence would else have a drafter grow what nobody will verify.
MOST_STEPS_AHEAD = 4.0


def tree_room(cap: int, steps: float) -> int:
    """Nodes that a drafter may have in a session's tree when what it grows now is verified so many steps from now."""
    return round(ROOM_PER_NODE * cap * steps)


def price_ahead(price: float, steps: float) -> float:
    """Least survival worth drafting so many steps ahead: survival multiplies with every step, and 1 stays 1."""
    return float(price**steps)


@dataclass(slots=True)
class Drafter:
    """A drafter whose stream to a verifier is up; delays are smoothed, in seconds.

    Args:
        response_s: From a commit to the first nodes of a drafter that knew it.
        interval_s: Between two messages with nodes of one session.
        silent: A response was overdue; nobody waits for it until it is heard again.
        child_share: Survival that the best first guess after a commit has usually had: nobody waits for what is worth
            nothing.
        wants_states: Whether it drafts from hidden states.
    """

    response_s: float = 0.004
    interval_s: float = 0.002
    silent: bool = False
    child_share: float = CHILD_SHARE
    wants_states: bool = False

    @property
    def source(self) -> str:
        """The method that its guesses are known by."""
        return EAGLE3 if self.wants_states else DRAFT_MODEL

    def heard_guess(self, survival: float) -> None:
        """The best first guess after a commit has this survival."""
        self.child_share += SMOOTHING * (survival - self.child_share)

    def heard_response(self, delay_s: float) -> None:
        """First nodes that know a commit took `delay_s`."""
        self.response_s += SMOOTHING * (delay_s - self.response_s)

    def heard_next(self, delay_s: float) -> None:
        """Further nodes of the same session took `delay_s`."""
        self.interval_s += SMOOTHING * (delay_s - self.interval_s)

    def steps_ahead(self, step_s: float) -> float:
        """Steps of so many seconds until one verifies what is drafted now: the next one, and those an answer takes."""
        return min(1.0 + self.response_s / step_s, MOST_STEPS_AHEAD)


class Answers:
    """Which commits a session's drafter has not answered yet; where the way is long, several are on it at once."""

    __slots__ = ("_asked", "_heard_s")

    def __init__(self) -> None:
        # Committed tokens, and when the drafter was told.
        self._asked: deque[tuple[int, float]] = deque(maxlen=MOST_ASKED)
        # When nodes last came from a drafter that knew of the last commit.
        self._heard_s: float | None = None

    def stop(self) -> None:
        """The drafter is at rest, or starts anew: no answers are to come."""
        self._asked.clear()
        self._heard_s = None

    def ask(self, committed_len: int, now_s: float) -> None:
        """The drafter is told of a commit."""
        self._asked.append((committed_len, now_s))
        self._heard_s = None

    def heard(self, base_len: int, now_s: float, drafter: Drafter) -> float | None:
        """Nodes came from a drafter that knew so many committed tokens; updates its delays.

        Returns:
            Seconds since that commit, for the first nodes that know it.
        """
        asked_len, asked_s = 0, 0.0
        while self._asked and self._asked[0][0] <= base_len:
            asked_len, asked_s = self._asked.popleft()
        heard_s = self._heard_s
        if not self._asked:
            self._heard_s = now_s
        if asked_len == base_len:
            delay_s = max(0.0, now_s - asked_s)
            drafter.heard_response(delay_s)
            return delay_s
        if heard_s is not None:
            drafter.heard_next(max(0.0, now_s - heard_s))
        return None

    def wait_s(self, now_s: float, drafter: Drafter) -> float | None:
        """Expected seconds until the next nodes: the answer to the oldest commit without one, or some beyond the last.

        Returns:
            A positive time; None when they are overdue, none are to come, or the drafter is silent.
        """
        if drafter.silent:
            return None
        if self._heard_s is not None:
            return _left_s(now_s - self._heard_s, drafter.interval_s)
        # A drafter whose tree was full had nothing to say to a commit.
        while len(self._asked) > 1 and now_s - self._asked[0][1] > OVERDUE * drafter.response_s:
            self._asked.popleft()
        return _left_s(now_s - self._asked[0][1], drafter.response_s) if self._asked else None

    def silences(self, now_s: float, drafter: Drafter) -> bool:
        """Marks the drafter as silent when an answer is overdue; says whether it was not before."""
        if drafter.silent or not self._asked or now_s - self._asked[-1][1] <= OVERDUE * drafter.response_s:
            return False
        drafter.silent = True
        return True


def _left_s(elapsed_s: float, usual_s: float) -> float | None:
    return None if elapsed_s > OVERDUE * usual_s else max(usual_s - elapsed_s, 0.25 * usual_s)


class SessionLink:
    """One session's link to its drafter: all that is kept of it, and every change of that.

    Args:
        session: The verifier's end of the session.
        address: Of its drafter; empty: it has none.

    Attributes:
        price: Least survival that its drafter is told to draft for; 1: it rests.
        room: Nodes that its drafter may have in the tree.
        told_len: Committed tokens that its drafter knows, 0: it does not know the session.
    """

    def __init__(self, session: VerifierSession, address: str = "", *, price: float = 0.0) -> None:
        self.address = address
        self.price, self.room = price, 0
        self.told_len = 0
        self._session = session
        self._drafter: Drafter | None = None
        self._told_price = 1.0
        self._answers = Answers()
        self._heard_len = session.committed_len
        # Committed tokens when the drafter was called to work, and whether it has answered since.
        self._called_len, self._answered = session.committed_len, False
        # Committed positions whose hidden states it was told.
        self._told_states = 0

    # Who drafts

    @property
    def drafter(self) -> Drafter | None:
        """Its drafter, while the stream to it is up."""
        return self._drafter

    def connect(self, drafter: Drafter) -> None:
        """The stream to its drafter is up, anew: it knows nothing of the session."""
        self._drafter, self.told_len = drafter, 0

    def disconnect(self) -> None:
        """The stream to its drafter is lost."""
        self._drafter = None

    def pair(self, address: str, drafter: Drafter | None) -> CloseSession | None:
        """Another drafter takes over; what the first may still send is not heard.

        Returns:
            What to tell the first.
        """
        closed = self.close()
        self.address, self._drafter = address, drafter
        return closed

    # What it is told

    def look_ahead(self, price: float, cap: int, step_s: float) -> None:
        """What is drafted now is verified by a later step, as many on as an answer takes.

        Args:
            price: Least survival worth verifying in the next step.
            cap: Most nodes of the session in a step.
            step_s: Seconds of a step.
        """
        steps = 1.0 if self._drafter is None else self._drafter.steps_ahead(step_s)
        self.price, self.room = price_ahead(price, steps), tree_room(cap, steps)

    def tell(self, now_s: float) -> ToDrafter | None:
        """What the drafter is to be told that it does not know yet; None where that is nothing."""
        if self._drafter is None:
            return None
        rests = self.price >= 1.0
        if rests or not self.told_len:
            self._answered, self._called_len = False, self._session.committed_len
            self._answers.stop()
        if rests and (self._told_price >= 1.0 or not self.told_len):
            return None
        if not rests:
            self._answers.ask(self._session.committed_len, now_s)
        return self._commit(self.told_len) if self.told_len else self._open()

    def close(self) -> CloseSession | None:
        """The session is over for its drafter; returns what to tell it, if it knows of it."""
        told, self.told_len = self.told_len, 0
        if not told or self._drafter is None:
            return None
        return CloseSession(session_id=self._session.session_id, epoch=self._session.epoch)

    def catch_up(self, lagging: LaggingSession) -> OpenSession | Commit | None:
        """Answers a drafter that misses commits; None when the question is of another epoch."""
        if lagging.epoch != self._session.epoch:
            return None
        known = 1 <= lagging.have_len <= self._session.committed_len
        return self._commit(lagging.have_len) if known else self._open()

    def next_states(self, num_computed: int, limit: int) -> range:
        """Positions whose hidden states are computed and of use to the drafter, which was not told; at most `limit`."""
        # A state is of use once the token after it is known.
        stop = min(num_computed, self.told_len - 1, self._told_states + limit)
        positions = range(self._told_states, max(self._told_states, stop))
        self._told_states = positions.stop
        return positions

    def _open(self) -> OpenSession:
        self._told_states = 0
        self._told()
        return self._session.open(price=self.price, room=self.room)

    def _commit(self, since_len: int) -> Commit:
        self._told()
        return self._session.commit_message(since_len, price=self.price, room=self.room)

    def _told(self) -> None:
        self.told_len, self._told_price = self._session.committed_len, self.price

    # What it says

    def receive(self, message: DraftNodes, arrived_s: float) -> tuple[GraftOutcome, float | None]:
        """Takes in guesses.

        Returns:
            What became of them, and the seconds since the commit that they answer, if they are the first that do.

        Raises:
            RemoteProtocolError: See `VerifierSession.receive`.
        """
        assert self._drafter is not None, "only a drafter whose stream is up is heard"
        outcome = self._session.receive(message, self._drafter.source)
        if message.epoch != self._session.epoch or not message.nodes:
            return outcome, None
        self._heard_len = max(self._heard_len, message.base_len)
        self._answered = True
        round_trip_s = self._answers.heard(message.base_len, arrived_s, self._drafter)
        if round_trip_s is not None and message.base_len == self._session.committed_len:
            tree = self._session.tree
            self._drafter.heard_guess(max(map(tree.survival, tree.root.children.values()), default=0.0))
        return outcome, round_trip_s

    @property
    def has_answered(self) -> bool:
        """Whether the drafter has answered since it was called, or should have."""
        waited = self._session.committed_len - self._called_len
        return self._drafter is not None and (self._answered or waited > MOST_UNANSWERED)

    @property
    def lag_tokens(self) -> int:
        """Committed tokens since it was called that the drafter has not answered; none while it rests."""
        if self._drafter is None or self.price >= 1.0:
            return 0
        return self._session.committed_len - max(self._heard_len, self._called_len)

    def wait_s(self, now_s: float) -> float | None:
        """See `Answers.wait_s`; None without a drafter."""
        return None if self._drafter is None else self._answers.wait_s(now_s, self._drafter)

    def silences(self, now_s: float) -> bool:
        """See `Answers.silences`."""
        return self._drafter is not None and self._answers.silences(now_s, self._drafter)
