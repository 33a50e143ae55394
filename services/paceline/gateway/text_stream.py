"""The text of one session as it grows: detokenizer, stop tokens and stop strings in one place.

Pure but for the codec. What comes out does not depend on how tokens were grouped into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.gateway.detokenizer import Detokenizer
from paceline.gateway.requests import SessionRequest
from paceline.gateway.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What one step added.

    Attributes:
        text: New text that is certain to belong to the answer.
        num_tokens: Tokens of the step that belong to the answer; fewer than were fed only when `stopped`.
        stopped: A stop string was completed; the session is over for the client.
    """

    text: str
    num_tokens: int
    stopped: bool = False


class TextStream:
    """Text of one session; stop tokens count as tokens but have no text."""

    def __init__(self, request: SessionRequest) -> None:
        """Starts an empty answer."""
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else request.model.identity.eos_token_ids
        self._stop_token_ids = frozenset((*sampling.stop_token_ids, *eos_token_ids))
        self._detokenizer = Detokenizer(request.model.codec, request.prompt_token_ids)
        self._matcher = StopMatcher(request.stops)
        self._one_by_one = bool(request.stops)
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> Fed:
        """Takes the tokens of one step."""
        if not self._one_by_one:
            self._num_tokens += len(token_ids)
            return Fed(text=self._text_of(token_ids), num_tokens=len(token_ids))
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            text, stopped = self._pass(self._text_of((token_id,)))
            pieces.append(text)
            if stopped:
                return Fed(text="".join(pieces), num_tokens=index + 1, stopped=True)
        return Fed(text="".join(pieces), num_tokens=len(token_ids))

    def finish(self) -> Fed:
        """Gives out what was held back; the verifier has ended the session."""
        text, stopped = self._pass(self._detokenizer.flush())
        return Fed(text=text if stopped else text + self._matcher.flush(), num_tokens=0, stopped=stopped)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.feed([t for t in token_ids if t not in self._stop_token_ids])

    def _pass(self, text: str) -> tuple[str, bool]:
        # Like the stop tokens, stop strings are not looked for before min_tokens tokens.
        if self._num_tokens < self._min_tokens:
            return text, False
        passed = self._matcher.feed(text)
        return passed.text, passed.stop is not None
