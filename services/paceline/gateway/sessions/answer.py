"""The answer of one session as it grows: its text, and what the client has of it already.

Pure but for the codec. What comes out does not depend on how tokens were grouped into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.messages import (
    CommittedTokens,
    FinishReason,
    GenerateResult,
    PositionLogprobs,
    SpeculationRecord,
    Timings,
    TokenFate,
)
from paceline.gateway.sessions.known_tokens import KnownTokens
from paceline.gateway.sessions.output import Ending, Piece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.trail import SessionTrail
from paceline.gateway.text.detokenizer import Detokenizer
from paceline.gateway.text.stops import StopMatcher
from paceline.gateway.text.token_texts import TokenText, TokenTexts


class Answer:
    """The answer of one session, in tokens and text.

    Attributes:
        stopped: Whether a stop string has ended it.
    """

    def __init__(self, request: SessionRequest) -> None:
        """Starts an empty answer."""
        self.stopped = False
        self._request = request
        self._stream = TextStream(request)
        self._client = KnownTokens(request.offset, request.digest)
        self._num_generated = 0
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._result: GenerateResult | None = None
        self._lossy = False

    def take(self, step: CommittedTokens) -> Piece | None:
        """Takes what a verifier has committed; returns what the client lacks of it, None if there is nothing to report.

        Raises:
            ResumeMismatchError: The client has other tokens than these.
        """
        self._lossy |= step.lossy
        if step.prompt_logprobs:
            # A verifier that continues for another one sends all of them again.
            self._prompt_logprobs[step.prompt_offset - 1 :] = step.prompt_logprobs
        if not step.token_ids and step.result is None:
            return None
        self._result = step.result
        offset, num_known = self._num_generated, self._client.take(step.token_ids)
        known = self._stream.feed(step.token_ids[:num_known])
        new = Fed(text="", num_tokens=0)
        if not (known.stopped or self._request.prompt_only):
            new = self._stream.feed(step.token_ids[num_known:], step.fates[num_known:])
            if step.result is not None and not new.stopped:
                new = new.joined(self._stream.finish())
        self.stopped = known.stopped or new.stopped
        self._num_generated += known.num_tokens + new.num_tokens
        taken = slice(num_known, num_known + new.num_tokens)
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return Piece(
            text=new.text,
            token_ids=step.token_ids[taken],
            logprobs=step.logprobs[taken],
            tokens=new.tokens,
            offset=offset + num_known,
            digest=self._client.digest,
            known_text=known.text if num_known else "",
            prompt_logprobs=prompt_logprobs,
        )

    def ending(self, trail: SessionTrail) -> Ending:
        """Returns how the session ended.

        Raises:
            ResumeMismatchError: The client has more tokens than the session.
        """
        self._client.end(self._num_generated)
        result, record = self._result, trail.speculation
        if record is None and result is not None:
            record = result.speculation
        if record is not None or self._lossy or trail.mixed or trail.law_only:
            record = record or SpeculationRecord()
            record = replace(record, lossy=self._lossy, mixed=trail.mixed, law_only=trail.law_only)
        reason = FinishReason.STOP if self.stopped or result is None else result.finish_reason
        return Ending(
            finish_reason=FinishReason.LENGTH if self._request.prompt_only else reason,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=0 if result is None else result.num_cached_tokens,
            num_generated_tokens=self._num_generated,
            num_reasoning_tokens=self._stream.num_reasoning_tokens,
            speculation=record,
            timings=Timings() if result is None else result.timings,
            stop=self._stream.stop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What one step added.

    Attributes:
        text: New text that is certain to belong to the answer.
        num_tokens: Tokens of the step that belong to the answer; fewer than were fed only when `stopped`.
        stopped: A stop string was completed; the session is over for the client.
        tokens: Where the request asks for them, the tokens behind `text`, whose texts join to it.
    """

    text: str
    num_tokens: int
    stopped: bool = False
    tokens: tuple[TokenText, ...] = ()

    def joined(self, rest: Fed) -> Fed:
        """Returns this and what followed as one."""
        return Fed(
            text=self.text + rest.text,
            num_tokens=self.num_tokens + rest.num_tokens,
            stopped=rest.stopped,
            tokens=self.tokens + rest.tokens,
        )


class TextStream:
    """Text of one session; stop tokens count as tokens but have no text, unless the request asks for it.

    Attributes:
        stop: The stop string that ended it; None if there is none so far.
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
        decodes = codec.showing(shown if request.skip_special_tokens else None)
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
        """Takes the tokens of one step, and their fates if these are known: one per token, or none."""
        pieces: list[str] = []
        num_tokens, stopped = 0, False
        for group in [(each,) for each in token_ids] if self._one_by_one else [token_ids]:
            num_tokens += len(group)
            self._num_tokens += len(group)
            decoded = self._detokenizer.feed([each for each in group if each not in self._hidden_ids])
            text, stopped = self._pass(decoded)
            pieces.append(text)
            if self._token_texts is not None:
                self._token_texts.add(fates[num_tokens - 1] if fates else None, decoded, text)
            if stopped:
                break
        if self._reasoning is not None:
            self._reasoning.take(token_ids[:num_tokens])
        tokens: tuple[TokenText, ...] = ()
        if self._token_texts is not None and stopped:
            tokens = self._token_texts.finish("", "")
        elif self._token_texts is not None:
            tokens = self._token_texts.take(keep_last=self._detokenizer.holds_text)
        return self._fed("".join(pieces), tokens, num_tokens=num_tokens, stopped=stopped)

    def finish(self) -> Fed:
        """Returns what was held back; the verifier has ended the session."""
        decoded = self._detokenizer.flush()
        text, stopped = self._pass(decoded)
        if not stopped:
            text += self._matcher.flush()
        tokens = () if self._token_texts is None else self._token_texts.finish(decoded, text)
        return self._fed(text, tokens, num_tokens=0, stopped=stopped)

    def _fed(self, text: str, tokens: tuple[TokenText, ...], *, num_tokens: int, stopped: bool = False) -> Fed:
        # If the request asks for tokens, text waits for the end of its token.
        shown = text if self._token_texts is None else "".join(each.text for each in tokens)
        return Fed(text=shown, num_tokens=num_tokens, stopped=stopped, tokens=tokens)

    def _pass(self, text: str) -> tuple[str, bool]:
        # Like stop tokens, stop strings have no effect before min_tokens tokens.
        if self._num_tokens < self._min_tokens:
            return text, False
        passed, stop = self._matcher.feed(text)
        if stop is None:
            return passed, False
        self.stop = stop
        return passed + (stop if self._include_stop else ""), True
