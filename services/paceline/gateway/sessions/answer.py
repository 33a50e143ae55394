"""The answer of one session as it grows: its text, and what the client has of it already.

Pure but for the codec. Its output does not depend on how tokens were grouped into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from paceline.core.messages import (
    FinishReason,
    GenerateResult,
    PositionLogprobs,
    SessionEvent,
    SpeculationRecord,
    Timings,
    TokenOrigin,
)
from paceline.gateway.message.form import MessageForm
from paceline.gateway.message.reader import Content, Part, content_of, joined
from paceline.gateway.sessions.known_tokens import KnownTokens
from paceline.gateway.sessions.output import Ending, Piece
from paceline.gateway.sessions.recorded import RecordedSession
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.text.streaming import Detokenizer, TokenText, TokenTexts


class Delta(NamedTuple):
    """A step's additions.

    Attributes:
        parts: New parts that are certain to belong to the answer.
        num_tokens: Tokens of the step that belong to the answer; fewer than were fed only when `stopped`.
        stopped: The text has reached its end; the session is over for the client.
        tokens: Where the request asks for them, the tokens behind the text.
    """

    parts: tuple[Part, ...] = ()
    num_tokens: int = 0
    stopped: bool = False
    tokens: tuple[TokenText, ...] = ()

    def joined(self, rest: Delta) -> Delta:
        """Returns this and what followed as one."""
        parts = tuple(joined([*self.parts, *rest.parts]))
        return Delta(parts, self.num_tokens + rest.num_tokens, rest.stopped, self.tokens + rest.tokens)


class OutputStream:
    """The answer of one session, in tokens and text; stop tokens count as tokens, and have text if the request asks so.

    If the request asks for tokens, text waits for the end of its token, and the texts of tokens join to it. The tokens
    of a message with a form are whole, as the model wrote them.

    Attributes:
        stopped: Whether its text has ended it: by a stop string, or after the only call that it may have.
    """

    def __init__(self, request: SessionRequest) -> None:
        """Starts an empty answer."""
        self.stopped = False
        self._request = request
        self._client = KnownTokens(request.offset, request.digest)
        self._num_generated = 0
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._result: GenerateResult | None = None
        self._lossy = False
        self._last_token_id: int | None = None
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else request.model.identity.eos_token_ids
        include_stop = request.include_stop_str_in_output
        hidden = () if include_stop else (*sampling.stop_token_ids, *eos_token_ids)
        self._hidden_ids = frozenset(hidden)
        codec = request.model.codec
        form = request.form or MessageForm()
        self._has_form = request.form is not None
        shown = codec.special_ids(form.shown if request.skip_special_tokens else None)
        self._detokenizer = Detokenizer(codec, request.prompt_token_ids, shown)
        self._reader = form.reader(request.stops, include_stop=include_stop)
        self._token_texts = TokenTexts() if request.token_origins else None
        self._reasoning = form.reasoning_count(partial(codec.decode, special_tokens=True))
        self._one_by_one = request.may_stop_early or request.token_origins
        self._min_tokens = sampling.min_tokens
        self._num_fed = 0

    def take(self, token_ids: tuple[int, ...], origins: bytes, event: SessionEvent) -> Piece | None:
        """Takes what a verifier has committed; returns what the client lacks of it, None if there is nothing to report.

        Args:
            origins: A `TokenOrigin` a token; none: unknown.

        Raises:
            ResumeMismatchError: The client has other tokens than these.
        """
        self._lossy |= event.lossy
        if event.prompt_logprobs:
            # A verifier that continues for another one sends all of them again.
            self._prompt_logprobs[event.prompt_offset - 1 :] = event.prompt_logprobs
        if not token_ids and event.result is None:
            return None
        self._result = event.result
        offset, num_known = self._num_generated, self._client.take(token_ids)
        known = self.feed(token_ids[:num_known]) if num_known else Delta()
        new = Delta()
        if not (known.stopped or self._request.prompt_only):
            new = self.feed(token_ids[num_known:], origins[num_known:])
            if event.result is not None and not new.stopped:
                new = new.joined(self.finish())
        self.stopped = known.stopped or new.stopped
        self._num_generated += known.num_tokens + new.num_tokens
        taken = slice(num_known, num_known + new.num_tokens)
        self._client.add(token_ids[taken])
        if token_ids:
            self._last_token_id = token_ids[-1]
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return Piece(
            parts=new.parts,
            token_ids=token_ids[taken],
            logprobs=event.logprobs[taken],
            tokens=new.tokens,
            offset=offset + num_known,
            digest=self._client.digest,
            known_parts=known.parts,
            prompt_logprobs=prompt_logprobs,
        )

    def ending(self, recorded: RecordedSession) -> Ending:
        """Returns how the session ended.

        Raises:
            ResumeMismatchError: The client has more tokens than the session.
        """
        self._client.end(self._num_generated)
        parts = self.end_of_message()
        self.stopped |= self._reader.over
        result, record = self._result, recorded.speculation
        if record is None and result is not None:
            record = result.speculation
        if record is not None or self._lossy or recorded.mixed or recorded.distribution_only:
            record = record or SpeculationRecord()
            record = record._replace(
                lossy=self._lossy, mixed=recorded.mixed, distribution_only=recorded.distribution_only
            )
        reason = FinishReason.STOP if self.stopped or result is None else result.finish_reason
        return Ending(
            finish_reason=FinishReason.LENGTH if self._request.prompt_only else reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=0 if result is None else result.num_cached_tokens,
            num_generated_tokens=self._num_generated,
            num_reasoning_tokens=0 if self._reasoning is None else self._reasoning.num_tokens,
            speculation=record,
            timings=Timings() if result is None else result.timings,
            stop=self._reader.stop,
            stop_token_id=self._stop_token_id if reason is FinishReason.STOP and not self.stopped else None,
            parts=parts,
        )

    @property
    def _stop_token_id(self) -> int | None:
        """The last token, if the request alone makes it one that ends the text."""
        sampling = self._request.sampling
        own = () if sampling.ignore_eos else self._request.model.identity.eos_token_ids
        return self._last_token_id if {self._last_token_id} & {*sampling.stop_token_ids}.difference(own) else None

    def feed(self, token_ids: Sequence[int], origins: bytes = b"") -> Delta:
        """Takes the tokens of one step, and their origins if these are known: one per token, or none."""
        parts: list[Part] = []
        num_tokens = 0
        for group in [(each,) for each in token_ids] if self._one_by_one else [token_ids]:
            num_tokens += len(group)
            self._num_fed += len(group)
            decoded = self._detokenizer.feed([each for each in group if each not in self._hidden_ids])
            found = self._reader.feed(decoded, may_stop=self._may_stop)
            parts += found
            if self._token_texts is not None:
                self._token_texts.add(
                    TokenOrigin(origins[num_tokens - 1]) if origins else None, decoded, self._shown(decoded, found)
                )
            if self._reader.over:
                break
        if self._reasoning is not None:
            self._reasoning.take(token_ids[:num_tokens])
        tokens: tuple[TokenText, ...] = ()
        if self._token_texts is not None and self._reader.over:
            tokens = self._token_texts.finish("", "")
        elif self._token_texts is not None:
            tokens = self._token_texts.take(keep_last=self._detokenizer.holds_text)
        return self._delta(parts, tokens, num_tokens)

    def finish(self) -> Delta:
        """Returns what was held back; the verifier has ended the session."""
        decoded = self._detokenizer.flush()
        parts = self._reader.feed(decoded, may_stop=self._may_stop)
        if not self._reader.over and not self._has_form:
            parts += self._reader.finish()
        shown = self._shown(decoded, parts)
        return self._delta(parts, () if self._token_texts is None else self._token_texts.finish(decoded, shown))

    def end_of_message(self) -> tuple[Part, ...]:
        """Returns what was uncertain up to the end of a message with a form; it comes after all tokens."""
        if self._reader.over or not self._has_form:
            return ()
        return tuple(self._reader.finish(may_stop=self._may_stop))

    @property
    def _may_stop(self) -> bool:
        """Like stop tokens, stop strings do not end a text of fewer than `min_tokens` tokens."""
        return self._num_fed >= self._min_tokens

    def _shown(self, decoded: str, parts: Sequence[Part]) -> str:
        """Returns the text that has become certain; see `TokenTexts`."""
        return decoded if self._has_form else content_of(parts)

    def _delta(self, parts: list[Part], tokens: tuple[TokenText, ...], num_tokens: int = 0) -> Delta:
        if self._token_texts is not None and not self._has_form:
            parts = [Content("".join(each.text for each in tokens))]
        return Delta(tuple(joined(parts)), num_tokens, self._reader.over, tokens)
