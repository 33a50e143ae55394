"""Builds the response objects of the OpenAI API, whole and in chunks.

Pure: ids and times are passed in. It knows events of sessions and the tokenizer, no transport. A list with an entry for
each token is an iterator, made while it is written: there may be half a million of them.
"""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from paceline.core.messages import FinishReason, PositionLogprobs, SpeculationRecord
from paceline.core.prediction import PredictedText
from paceline.gateway.api.endpoints.request_trace import TOOL_CALLS
from paceline.gateway.message.growing import Message
from paceline.gateway.message.reader import Content, Part
from paceline.gateway.sessions.output import Ending, Piece, sum_of_records
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.text.codec import TextCodec
from paceline.gateway.text.streaming import TokenText

Json = dict[str, Any]

# JSON has no infinity; vLLM writes this for a token that cannot be.
LEAST_LOGPROB = -9999.0
# A token, and how likely it was; None: not known, as it is the first of the prompt.
Judged = tuple[int, PositionLogprobs | None]


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """A choice as it grows.

    Attributes:
        decoder: Decodes the bytes of judged tokens; a broken character counts once it is complete.
        num_characters: Characters that it has decoded.
    """

    request: SessionRequest
    texts: list[str] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    begun: bool = False
    tokens: list[TokenText] = field(default_factory=list)
    num_generated_tokens: int = 0
    decoder: IncrementalDecoder = field(default_factory=partial(getincrementaldecoder("utf-8"), errors="replace"))
    num_characters: int = 0
    ending: Ending | None = None
    message: Message | None = None
    predicted: PredictedText | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words; it has ended."""
        assert self.ending is not None
        calls = self.message is not None and self.message.calls and self.ending.finish_reason is FinishReason.STOP
        return TOOL_CALLS if calls else self.ending.finish_reason.value

    @property
    def end(self) -> Json:
        """Why it ended, as fields of a choice; nulls while it runs."""
        if self.ending is None:
            return {"finish_reason": None, "stop_reason": None}
        stop = self.ending.stop_token_id if self.ending.stop is None else self.ending.stop
        return {"finish_reason": self.finish_reason, "stop_reason": stop}

    def count(self, token_ids: Sequence[int]) -> None:
        """Counts generated tokens."""
        self.num_generated_tokens += len(token_ids)
        if self.predicted is not None:
            self.predicted.take(token_ids)

    def read(self, piece: Piece) -> Sequence[Part]:
        """Returns the parts of a piece that belong to the message; it is there."""
        assert self.message is not None
        self.message.take(piece.known_parts)
        return self.message.take(piece.parts)

    def begin(self, piece: Piece) -> tuple[str, list[Judged]]:
        """Adds a piece; returns the text and the tokens of the prompt, where the answer begins with them."""
        if self.begun:
            return "", []
        self.begun, self.prompt_logprobs = True, piece.prompt_logprobs
        request = self.request
        if request.echo is None or request.resumed:
            return "", []
        first: list[Judged] = [] if request.sampling.logprobs is None else [(request.prompt_token_ids[0], None)]
        return request.echo, [*first, *((each.token_id, each) for each in piece.prompt_logprobs if first)]


class CompletionAnswer:
    """The response to one request: takes events, gives chunks, or the whole at the end."""

    def __init__(
        self,
        *,
        chat: bool,
        request_id: str,
        created_s: int,
        model_name: str,
        requests: Sequence[SessionRequest],
        samples_per_prompt: int,
    ) -> None:
        """Starts with choices as far as the client has them, in the order of the sessions: samples side by side."""
        self._chat = chat
        self._samples_per_prompt = samples_per_prompt
        self._head: Json = {"id": request_id, "created": created_s, "model": model_name}
        self._choices = [
            ChoiceState(
                request=each,
                num_generated_tokens=each.offset,
                message=None if each.form is None else Message(each.form, each.session_id),
                predicted=PredictedText(predicted) if (predicted := each.speculation.predicted_token_ids) else None,
            )
            for each in requests
        ]

    def finish_reason(self, index: int) -> str:
        """Why a choice has ended, in OpenAI's words."""
        return self._choices[index].finish_reason

    def add_piece(self, index: int, piece: Piece) -> None:
        """Takes a piece of a choice for the whole."""
        choice = self._choices[index]
        echo, judged = choice.begin(piece)
        if choice.message is None:
            choice.texts.append(echo + piece.text)
        else:
            choice.read(piece)
        choice.judged += judged + _judged(piece)
        choice.token_ids += piece.token_ids
        choice.tokens += piece.tokens
        choice.count(piece.token_ids)

    def add_ending(self, index: int, ending: Ending) -> Json:
        """Takes the end of a choice; returns what it adds to the message."""
        choice = self._choices[index]
        delta = {} if choice.message is None else choice.message.delta(choice.message.take(ending.parts))
        choice.ending = ending
        return delta

    def opening_chunks(self) -> list[Json]:
        """Returns what a stream begins with: the role, for a chat; a resumed stream has sent it already."""
        if not self._chat or any(choice.request.resumed for choice in self._choices):
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(len(self._choices))]

    def text_alone(self, index: int, piece: Piece) -> str | None:
        """Takes a piece whose chunk is `text_chunk`, as nearly all are; returns its text, None if it is another one."""
        choice = self._choices[index]
        if (
            not choice.begun
            or len(piece.parts) != 1
            or not isinstance(part := piece.parts[0], Content)
            or piece.logprobs
            or piece.tokens
            or piece.known_parts
            or choice.request.return_token_ids
        ):
            return None
        choice.count(piece.token_ids)
        if choice.message is not None:
            choice.message.take(piece.parts)
        return part.text

    def text_chunk(self, index: int, text: str) -> Json:
        """Returns the chunk of a piece that has text alone, and is not the first."""
        return self._chunk(index, {"content": text}, None)

    def piece_chunk(self, index: int, piece: Piece) -> Json | None:
        """Returns the chunk of a piece; None if there is nothing to show."""
        choice = self._choices[index]
        choice.count(piece.token_ids)
        first = not choice.begun
        echo, judged = choice.begin(piece)
        text, logprobs = echo + piece.text, self._logprobs(choice, judged + _judged(piece))
        if logprobs is not None and "text_offset" in logprobs:
            # Counted now: the chunk may be written in slices, after later ones.
            logprobs["text_offset"] = iter(list(logprobs["text_offset"]))
        delta = {"content": text} if text else {}
        if choice.message is not None:
            delta = choice.message.delta(choice.read(piece))
        shows_ids = choice.request.return_token_ids and bool(piece.token_ids)
        if not delta and not piece.tokens and logprobs is None and not shows_ids:
            return None
        chunk = self._chunk(index, delta or {"content": ""}, logprobs)
        chunk["choices"][0] |= _origins(choice, piece.tokens) | _token_ids(choice, piece.token_ids)
        if first:
            self._add_prompt(chunk["choices"][0], chunk, choice)
        return chunk

    def ending_chunk(self, index: int, ending: Ending) -> Json:
        """Returns the last chunk of a choice, with its speculation record."""
        delta = self.add_ending(index, ending)
        chunk = self._chunk(index, delta, None)
        chunk["metrics"] = metrics(ending.speculation)
        return chunk

    def usage_chunk(self) -> Json:
        """Returns the last chunk of a stream with usage."""
        return {
            **self._head,
            "object": self._object_name(chunk=True),
            "choices": [],
            "usage": self.usage(),
            "metrics": self._metrics(),
        }

    def whole(self) -> Json:
        """Returns the response in one piece; all choices have ended."""
        whole: Json = {
            **self._head,
            "object": self._object_name(chunk=False),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "usage": self.usage(),
            "metrics": self._metrics(),
        }
        for shown, choice in zip(whole["choices"], self._choices, strict=True):
            self._add_prompt(shown, whole, choice)
        return whole

    def _add_prompt(self, shown: Json, answer: Json, choice: ChoiceState) -> None:
        """Adds what the request wants of the prompt: to the choice, or to the answer of a chat."""
        request = choice.request
        place = answer if self._chat else shown
        if request.return_token_ids and not request.resumed:
            place["prompt_token_ids"] = iter(request.prompt_token_ids)
        if choice.ending is not None and request.sampling.prompt_logprobs is not None:
            codec = request.model.codec
            place["prompt_logprobs"] = chain([None], (_by_token_id(codec, each) for each in choice.prompt_logprobs))

    def usage(self) -> Json:
        """Returns the token counts; a prompt counts once, however many samples it has."""
        prompts = self._choices[:: self._samples_per_prompt]
        num_prompt_tokens = sum(len(choice.request.prompt_token_ids) for choice in prompts)
        num_generated = sum(choice.num_generated_tokens for choice in self._choices)
        num_cached = sum(c.ending.num_cached_tokens for c in prompts if c.ending is not None)
        num_reasoning = sum(c.ending.num_reasoning_tokens for c in self._choices if c.ending is not None)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning, **self._predicted()},
        }

    def _predicted(self) -> Json:
        """Returns how much of the prediction was in the output, if there is one."""
        texts = [choice.predicted for choice in self._choices if choice.predicted is not None]
        if not texts:
            return {}
        return {
            "accepted_prediction_tokens": sum(text.num_accepted for text in texts),
            "rejected_prediction_tokens": sum(text.num_rejected for text in texts),
        }

    def _metrics(self) -> Json:
        records = [choice.ending.speculation for choice in self._choices if choice.ending is not None]
        return metrics(sum_of_records(records))

    def _object_name(self, *, chunk: bool) -> str:
        if not self._chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"

    def _chunk(self, index: int, delta: Json, logprobs: Json | None) -> Json:
        body = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        choice = {"index": index, **body, "logprobs": logprobs, **self._choices[index].end}
        return {**self._head, "object": self._object_name(chunk=True), "choices": [choice]}

    def _whole_choice(self, index: int, choice: ChoiceState) -> Json:
        assert choice.ending is not None
        text = "".join(choice.texts)
        message = {"content": text} if choice.message is None else choice.message.whole()
        body: Json = {"message": {"role": "assistant", **message}} if self._chat else {"text": text}
        return {
            "index": index,
            **body,
            "logprobs": self._logprobs(choice, choice.judged),
            **choice.end,
            **_origins(choice, choice.tokens),
            **_token_ids(choice, iter(choice.token_ids)),
        }

    def _logprobs(self, choice: ChoiceState, judged: Sequence[Judged]) -> Json | None:
        if not judged:
            return None
        codec = choice.request.model.codec
        if self._chat:
            return {"content": (_chat_position(codec, each) for _, each in judged if each is not None)}
        return _completion_logprobs(codec, choice, judged)


def metrics(record: SpeculationRecord | None) -> Json:
    """Returns the `metrics` object of a response: vLLM's record of speculation, and ours beside it."""
    if record is None:
        return {"speculative_decoding": None}
    return {
        "speculative_decoding": {
            "mean_acceptance_length": record.mean_acceptance_length,
            "draft_acceptance_rate": record.draft_acceptance_rate,
            "acceptance_histogram": list(record.acceptance_histogram),
            "num_spec_steps": record.num_spec_steps,
            "num_accepted_draft_tokens": record.num_accepted_draft_tokens,
            "num_draft_tokens": record.num_draft_tokens,
            "num_steps": record.num_steps,
            "mean_batch_size": record.mean_batch_size,
            "num_hits": record.num_hits,
            "num_misses": record.num_misses,
            "lossy": record.lossy,
            "exact": not record.distribution_only,
        }
    }


def _origins(choice: ChoiceState, tokens: Sequence[TokenText]) -> Json:
    """Returns how tokens came about, as a field of a choice, if the request wants it."""
    if not choice.request.token_origins:
        return {}
    return {
        "token_origins": (
            {"text": token.text, "origin": None if token.origin is None else token.origin.name.lower()}
            for token in tokens
        )
    }


def _token_ids(choice: ChoiceState, token_ids: Sequence[int] | Iterator[int]) -> Json:
    """Returns generated tokens, as a field of a choice, if the request wants them."""
    return {"token_ids": token_ids} if choice.request.return_token_ids else {}


def _judged(piece: Piece) -> list[Judged]:
    return [(each.token_id, each) for each in piece.logprobs]


def _by_token_id(codec: TextCodec, position: PositionLogprobs) -> Json:
    """Returns the alternatives at a position of the prompt and its own token, by their ids."""
    ranked = [(*each, rank) for rank, each in enumerate(position.top, 1)]
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST_LOGPROB),
            "rank": rank,
            "decoded_token": codec.token_bytes(token_id).decode(errors="replace"),
        }
        for token_id, logprob, rank in ((position.token_id, position.logprob, position.rank), *ranked)
    }


def _chat_position(codec: TextCodec, position: PositionLogprobs) -> Json:
    top = [_chat_token(codec, token_id, logprob) for token_id, logprob in position.top]
    return {**_chat_token(codec, position.token_id, position.logprob), "top_logprobs": top}


def _chat_token(codec: TextCodec, token_id: int, logprob: float) -> Json:
    spelled = codec.token_bytes(token_id)
    return {
        "token": spelled.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(spelled),
    }


def _completion_logprobs(codec: TextCodec, choice: ChoiceState, judged: Sequence[Judged]) -> Json:
    return {
        "tokens": (codec.token_bytes(token_id).decode(errors="replace") for token_id, _ in judged),
        "token_logprobs": (None if each is None else max(each.logprob, LEAST_LOGPROB) for _, each in judged),
        "top_logprobs": (None if each is None else _top_by_text(codec, each) for _, each in judged),
        "text_offset": _offsets(codec, choice, judged),
    }


def _offsets(codec: TextCodec, choice: ChoiceState, judged: Sequence[Judged]) -> Iterator[int]:
    """Yields where the character begins that each token is part of; special tokens have no text."""
    for token_id, _ in judged:
        yield choice.num_characters
        if codec.is_visible(token_id):
            choice.num_characters += len(choice.decoder.decode(codec.token_bytes(token_id)))


def _top_by_text(codec: TextCodec, position: PositionLogprobs) -> dict[str, float]:
    """Returns the alternatives by their text, the chosen token among them; of equal texts the best stays."""
    best: dict[str, float] = {}
    for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
        best.setdefault(codec.token_bytes(token_id).decode(errors="replace"), max(logprob, LEAST_LOGPROB))
    return best
