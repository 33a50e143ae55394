"""The text of one session as it grows: detokenizer, stop tokens and stop strings in one place.

Pure but for the codec. What comes out does not depend on how tokens were grouped into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from paceline.core.messages import TokenFate
from paceline.gateway.requests import SessionRequest
from paceline.gateway.text.detokenizer import Decodes, Detokenizer
from paceline.gateway.text.stops import StopMatcher
from paceline.gateway.text.token_texts import TokenText, TokenTexts


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What one step added.

    Attributes:
        text: New text that is certain to belong to the answer.
        num_tokens: Tokens of the step that belong to the answer; fewer than were fed only when `stopped`.
        stopped: A stop string was completed; the session is over for the client.
        tokens: Where the request asks for it, the tokens behind `text`, whose texts join to it.
    """

    text: str
    num_tokens: int
    stopped: bool = False
    tokens: tuple[TokenText, ...] = ()


class TextStream:
    """Text of one session; stop tokens count as tokens but have no text, unless the request asks for it.

    Attributes:
        stop: The stop string that ended it; None: none has.
    """

    def __init__(self, request: SessionRequest) -> None:
        """Starts an empty answer."""
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else request.model.identity.eos_token_ids
        self._include_stop = request.include_stop_str_in_output
        hidden = () if self._include_stop else (*sampling.stop_token_ids, *eos_token_ids)
        self._hidden_ids = frozenset(hidden)
        codec = request.model.codec
        shown = () if request.form is None else request.form.shown
        decodes: Decodes
        if not request.skip_special_tokens:
            decodes = codec.with_special_tokens
        else:
            decodes = codec.showing(shown) if shown else codec
        self._detokenizer = Detokenizer(decodes, request.prompt_token_ids)
        self._matcher = StopMatcher(request.stops)
        self._token_texts = TokenTexts() if request.token_fates else None
        decode = partial(codec.decode, special_tokens=True)
        self._reasoning = None if request.form is None else request.form.reasoning_count(decode)
        self._one_by_one = bool(request.stops) or request.token_fates
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self.stop: str | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning that the answer begins with."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def feed(self, token_ids: Sequence[int], fates: Sequence[TokenFate] = ()) -> Fed:
        """Takes the tokens of one step, and how they came about as far as that is known: a fate a token, or none."""
        fed = self._taken(token_ids, fates)
        if self._reasoning is not None:
            self._reasoning.take(token_ids[: fed.num_tokens])
        return fed

    def _taken(self, token_ids: Sequence[int], fates: Sequence[TokenFate]) -> Fed:
        if not self._one_by_one:
            self._num_tokens += len(token_ids)
            return Fed(text=self._text_of(token_ids), num_tokens=len(token_ids))
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            decoded = self._text_of((token_id,))
            text, stopped = self._pass(decoded)
            pieces.append(text)
            if self._token_texts is not None:
                self._token_texts.add(fates[index] if fates else None, decoded, text)
            if stopped:
                tokens = () if self._token_texts is None else self._token_texts.finish("", "")
                return self._fed("".join(pieces), tokens, num_tokens=index + 1, stopped=True)
        tokens = ()
        if self._token_texts is not None:
            tokens = self._token_texts.take(keep_last=self._detokenizer.holds_text)
        return self._fed("".join(pieces), tokens, num_tokens=len(token_ids))

    def finish(self) -> Fed:
        """Gives out what was held back; the verifier has ended the session."""
        decoded = self._detokenizer.flush()
        text, stopped = self._pass(decoded)
        if not stopped:
            text += self._matcher.flush()
        tokens = () if self._token_texts is None else self._token_texts.finish(decoded, text)
        return self._fed(text, tokens, num_tokens=0, stopped=stopped)

    def _fed(self, text: str, tokens: tuple[TokenText, ...], *, num_tokens: int, stopped: bool = False) -> Fed:
        # Text waits for the end of its token where tokens are asked for.
        shown = text if self._token_texts is None else "".join(each.text for each in tokens)
        return Fed(text=shown, num_tokens=num_tokens, stopped=stopped, tokens=tokens)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.feed([t for t in token_ids if t not in self._hidden_ids])

    def _pass(self, text: str) -> tuple[str, bool]:
        # Like the stop tokens, stop strings are not looked for before min_tokens tokens.
        if self._num_tokens < self._min_tokens:
            return text, False
        passed, stop = self._matcher.feed(text)
        if stop is None:
            return passed, False
        self.stop = stop
        return passed + (stop if self._include_stop else ""), True
