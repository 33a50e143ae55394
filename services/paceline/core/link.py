"""What a verifier knows of a session's drafter: how fast it answers, what was sent to it, and what it has sent.

Time comes in as an argument; nothing here reads a clock. A drafter at work receives every commit. An idle one receives
none, but for the one that makes it idle; when it is called again, it receives all that it missed in one message.
"""

from __future__ import annotations

from collections import deque

from paceline.core.messages import CloseSession, Commit, LaggingSession, OpenSession, ToDrafter
from paceline.core.moving_average import MovingAverage
from paceline.core.params import DRAFT_MODEL, EAGLE3
from paceline.core.session import VerifierSession

# Share of a promising leaf's survival that its best child keeps, until a drafter's first guesses show what it is: the
# mean confidence of a fair one.
CHILD_SHARE = 0.75
# Weight of a new observation.
SMOOTHING = 0.2
# Nodes are overdue after this many times the usual delay.
OVERDUE = 3.0
# Commits whose answers are kept track of; with more on their way at once there is nothing to wait for.
MOST_TRACKED = 64
# A drafter that was called back may leave this number of tokens of a session unanswered while it reads what it missed;
# after that it counts as one that has answered with nothing.
MOST_UNANSWERED = 64
# Nodes that a drafter may have in a tree per node that may be verified in a step: for the branches that the text will
# not take.
ROOM_PER_NODE = 8
# Nothing is drafted for more steps ahead: after one long silence a drafter would otherwise grow what no step verifies.
MOST_STEPS_AHEAD = 4.0


def tree_room(cap: int, steps: float) -> int:
    """Nodes that a drafter may have in a session's tree when what it grows now is verified `steps` steps from now."""
    return round(ROOM_PER_NODE * cap * steps)


def price_ahead(price: float, steps: float) -> float:
    """Least survival worth drafting `steps` steps ahead: survival multiplies with every step, and 1 stays 1."""
    return float(price**steps)


class ConnectedDrafter:
    """A drafter whose stream to a verifier is up.

    Args:
        response_s: Expected seconds from a commit to the first nodes of a drafter that knew it.
        wants_states: Whether it drafts from hidden states.

    Attributes:
        response: These seconds, as measured.
        interval: Seconds between two messages with nodes of one session.
        child_share: Survival of the best first guess after a commit: no step waits for what is worth nothing.
        silent: A response was overdue; no step waits for this drafter until it sends nodes again.
    """

    def __init__(self, *, response_s: float = 0.004, wants_states: bool = False) -> None:
        self.response = MovingAverage(response_s, SMOOTHING)
        self.interval = MovingAverage(0.002, SMOOTHING)
        self.child_share = MovingAverage(CHILD_SHARE, SMOOTHING)
        self.silent = False
        self.wants_states = wants_states

    @property
    def source(self) -> str:
        """The method that its guesses are known by."""
        return EAGLE3 if self.wants_states else DRAFT_MODEL

    def steps_ahead(self, step_s: float) -> float:
        """Steps of `step_s` seconds until what is drafted now is verified: the next, and those that an answer takes."""
        return min(1.0 + self.response.value / step_s, MOST_STEPS_AHEAD)


class Answers:
    """Which commits a session's drafter has not answered yet; over a long way, several are under way at once."""

    __slots__ = ("_received_s", "_unanswered")

    def __init__(self) -> None:
        # Committed tokens, and when they were sent.
        self._unanswered: deque[tuple[int, float]] = deque(maxlen=MOST_TRACKED)
        # When nodes last came from a drafter that knew of the last commit.
        self._received_s: float | None = None

    def stop(self) -> None:
        """The drafter idles, or starts anew: no answers are expected."""
        self._unanswered.clear()
        self._received_s = None

    def sent(self, committed_len: int, now_s: float) -> None:
        """A commit goes out to the drafter."""
        self._unanswered.append((committed_len, now_s))
        self._received_s = None

    def received(self, base_len: int, now_s: float, drafter: ConnectedDrafter) -> float | None:
        """Nodes came from a drafter that knew `base_len` committed tokens; updates its delays.

        Returns:
            Seconds since that commit, for the first nodes that know it.
        """
        sent_len, sent_s = 0, 0.0
        while self._unanswered and self._unanswered[0][0] <= base_len:
            sent_len, sent_s = self._unanswered.popleft()
        received_s = self._received_s
        if not self._unanswered:
            self._received_s = now_s
        if sent_len == base_len:
            delay_s = max(0.0, now_s - sent_s)
            drafter.response.add(delay_s)
            return delay_s
        if received_s is not None:
            drafter.interval.add(max(0.0, now_s - received_s))
        return None

    def wait_s(self, now_s: float, drafter: ConnectedDrafter) -> float | None:
        """Expected seconds until the next nodes: the answer to the oldest commit without one, or some beyond the last.

        Returns:
            A positive time; None when they are overdue, none are to come, or the drafter is silent.
        """
        if drafter.silent:
            return None
        if self._received_s is not None:
            return _left_s(now_s - self._received_s, drafter.interval.value)
        # A drafter whose tree was full does not answer a commit.
        while len(self._unanswered) > 1 and now_s - self._unanswered[0][1] > OVERDUE * drafter.response.value:
            self._unanswered.popleft()
        return _left_s(now_s - self._unanswered[0][1], drafter.response.value) if self._unanswered else None

    def mark_silent(self, now_s: float, drafter: ConnectedDrafter) -> bool:
        """Marks the drafter as silent when an answer is overdue; returns whether it was not before."""
        if (
            drafter.silent
            or not self._unanswered
            or now_s - self._unanswered[-1][1] <= OVERDUE * drafter.response.value
        ):
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
        price: Least survival worth drafting for; 1: its drafter idles.
        room: Nodes that its drafter may have in the tree.
        sent_len: Committed tokens that its drafter knows, 0: it does not know the session.
        number: The session's name in what drafters send; 0: it has none yet.
    """

    def __init__(self, session: VerifierSession, address: str = "", *, price: float = 0.0) -> None:
        self.address = address
        self.price, self.room = price, 0
        self.sent_len = 0
        self.number = 0
        self._session = session
        self._drafter: ConnectedDrafter | None = None
        self._sent_price = 1.0
        self._answers = Answers()
        self._answered_len = session.committed_len
        # Committed tokens when the drafter was called to work, and whether it has answered since.
        self._called_len, self._answered = session.committed_len, False
        # Committed positions whose hidden states were sent.
        self._num_states_sent = 0

    # Who drafts

    @property
    def drafter(self) -> ConnectedDrafter | None:
        """Its drafter, while the stream to it is up."""
        return self._drafter

    def connect(self, drafter: ConnectedDrafter) -> None:
        """The stream to its drafter is up, anew: it knows nothing of the session."""
        self._drafter, self.sent_len = drafter, 0

    def disconnect(self) -> None:
        """The stream to its drafter is lost."""
        self._drafter = None

    def pair(self, address: str, drafter: ConnectedDrafter | None) -> CloseSession | None:
        """Another drafter takes over; what the first may still send is dropped.

        Returns:
            What to send to the first.
        """
        closed = self.close()
        self.address, self._drafter = address, drafter
        return closed

    # To the drafter

    def look_ahead(self, price: float, cap: int, step_s: float) -> None:
        """What is drafted now is verified by a later step, as many on as an answer takes.

        Args:
            price: Least survival worth verifying in the next step.
            cap: Most nodes of the session in a step.
            step_s: Seconds of a step.
        """
        steps = 1.0 if self._drafter is None else self._drafter.steps_ahead(step_s)
        self.price, self.room = price_ahead(price, steps), tree_room(cap, steps)

    def idle(self) -> None:
        """Nothing is drafted until `look_ahead`."""
        self.price = 1.0

    def next_message(self, now_s: float) -> ToDrafter | None:
        """What opens the session at its drafter, or what was committed since the last message; None: nothing."""
        if self._drafter is None:
            return None
        idles = self.price >= 1.0
        if idles or not self.sent_len:
            self._answered, self._called_len = False, self._session.committed_len
            self._answers.stop()
        if idles and (self._sent_price >= 1.0 or not self.sent_len):
            return None
        if not idles:
            self._answers.sent(self._session.committed_len, now_s)
        return self._commit(self.sent_len) if self.sent_len else self._open()

    def close(self) -> CloseSession | None:
        """The session is over for its drafter; returns what to send to it, if it knows the session."""
        known, self.sent_len = self.sent_len, 0
        if not known or self._drafter is None:
            return None
        return CloseSession(session_id=self._session.session_id, epoch=self._session.epoch)

    def catch_up(self, lagging: LaggingSession) -> OpenSession | Commit | None:
        """Answers a drafter that misses commits; None when the question is of another epoch."""
        if lagging.epoch != self._session.epoch:
            return None
        known = 1 <= lagging.have_len <= self._session.committed_len
        return self._commit(lagging.have_len) if known else self._open()

    def next_states(self, num_computed: int, limit: int) -> range:
        """Positions whose hidden states are computed, of use to the drafter, and not sent yet; at most `limit`."""
        # A state is of use once the token after it is known.
        stop = min(num_computed, self.sent_len - 1, self._num_states_sent + limit)
        positions = range(self._num_states_sent, max(self._num_states_sent, stop))
        self._num_states_sent = positions.stop
        return positions

    def _open(self) -> OpenSession:
        self._num_states_sent = 0
        self._mark_sent()
        return self._session.open(self.number, price=self.price, room=self.room)

    def _commit(self, since_len: int) -> Commit:
        self._mark_sent()
        return self._session.commit_message(since_len, price=self.price, room=self.room)

    def _mark_sent(self) -> None:
        self.sent_len, self._sent_price = self._session.committed_len, self.price

    # From the drafter

    def take_in(self, base_len: int, first: float, arrived_s: float) -> float | None:
        """Guesses have come, and are in the tree.

        Args:
            base_len: Committed tokens that the drafter knew.
            first: Best survival of a guess below the root; below 0: they know other tokens than those committed.
            arrived_s: When they came.

        Returns:
            Seconds since the commit that they answer, if they are the first that do.
        """
        assert self._drafter is not None, "only a drafter whose stream is up sends anything"
        self._answered_len = max(self._answered_len, base_len)
        # What it guessed from the first of what it had missed came late.
        self._answered = self._answered or base_len > self._called_len
        round_trip_s = self._answers.received(base_len, arrived_s, self._drafter)
        if round_trip_s is not None and first >= 0.0:
            self._drafter.child_share.add(first)
        return round_trip_s

    @property
    def has_answered(self) -> bool:
        """Whether the drafter has answered since it was called, or should have."""
        waited = self._session.committed_len - self._called_len
        return self._drafter is not None and (self._answered or waited > MOST_UNANSWERED)

    @property
    def lag_tokens(self) -> int:
        """Committed tokens since it was called that the drafter has not answered; none while it idles."""
        if self._drafter is None or self.price >= 1.0:
            return 0
        return self._session.committed_len - max(self._answered_len, self._called_len)

    def wait_s(self, now_s: float) -> float | None:
        """Expected seconds until the next nodes; None: none are expected."""
        return None if self._drafter is None else self._answers.wait_s(now_s, self._drafter)

    def mark_silent(self, now_s: float) -> bool:
        """Marks its drafter as silent when an answer is overdue; returns whether it was not before."""
        return self._drafter is not None and self._answers.mark_silent(now_s, self._drafter)
