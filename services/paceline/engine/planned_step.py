"""The plan of a verifier's next step: made before it runs, so that messages to drafters go out first."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.target_session import TargetSession
from paceline.forest import NO_GUESSES, Guesses


@dataclass(slots=True)
class Part:
    """A session in a step.

    Attributes:
        session: Session of these rows.
        start: First committed position whose row is computed.
        stop: End of the rows, exclusive.
        num_guesses: Beyond the committed tokens that are verified.
        decodes: Whether only its last committed token is computed besides its guesses, and a first token is out.
    """

    session: TargetSession
    start: int
    stop: int
    num_guesses: int
    decodes: bool

    @property
    def commits(self) -> bool:
        """Whether the step gives the session a token: its last committed token, known or not, is among the rows."""
        return self.decodes or self.stop == self.session.committed_len

    @property
    def num_rows(self) -> int:
        return self.stop - self.start + self.num_guesses

    @property
    def judged(self) -> range:
        """Positions of the prompt whose rows give the probability of the token after them."""
        session = self.session
        if not session.judges_prompt:
            return range(0)
        return range(max(self.start, session.num_judged), min(self.stop, session.prompt_len - 1))


@dataclass(slots=True)
class StepPlan:
    """The plan of a step.

    Attributes:
        started_s: When it was planned.
        drafters_work: Whether drafters are at work meanwhile.
        decoding: Sessions that verify guesses, or decode plainly.
        reading: Sessions whose prompts are computed.
        guesses: Guesses of the decoding sessions.
        parts: All of them, those that decode first.
        num_rows: Rows to compute; 0: there is nothing to do.
        num_prefill_rows: Prompt rows among them.
        abandoned: Whether the device had no room for it.
    """

    started_s: float
    drafters_work: bool
    decoding: list[Part]
    reading: list[Part]
    guesses: Guesses
    parts: list[Part] = field(init=False)
    num_rows: int = field(init=False)
    num_prefill_rows: int = field(init=False)
    abandoned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.parts = self.decoding + self.reading
        self.num_prefill_rows = sum(part.num_rows for part in self.reading)
        self.num_rows = len(self.decoding) + len(self.guesses.tokens) + self.num_prefill_rows

    def guesses_of(self, place: int) -> Guesses:
        """Guesses of one of the `parts`."""
        return self.guesses.of(place) if place < len(self.decoding) else NO_GUESSES

    @property
    def is_mostly_prefill(self) -> bool:
        """Whether most rows are those of prompts."""
        return 2 * self.num_prefill_rows > self.num_rows
