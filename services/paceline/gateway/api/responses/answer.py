"""An answer of /v1/responses: items of reasoning, text and calls, whole or as events.

An event counts as one, a delta as the number of its characters. So the same place of an answer has the same number
however its tokens were grouped, at any gateway, and a stream can be resumed after any event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.core.messages import FinishReason
from paceline.gateway.api.openai.answer import metrics
from paceline.gateway.api.responses.requests import joined, names_within
from paceline.gateway.message.reader import CallArguments, CallBegin, Content, Part, Reasoning
from paceline.gateway.sessions.output import Ending

Json = dict[str, Any]

TEXT_DELTA = "response.output_text.delta"
REASONING_DELTA = "response.reasoning_text.delta"
ARGUMENTS_DELTA = "response.function_call_arguments.delta"
DELTAS = (TEXT_DELTA, REASONING_DELTA, ARGUMENTS_DELTA)
# Prefix of response ids.
RESPONSE = "resp_"
_ITEM = re.compile(r"(?:fc|msg|rs)_(.+)[0-9a-f]{4}", re.ASCII)
_ENDINGS: Mapping[str, str] = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ResponseAnswer:
    """A response.

    Args:
        response: As it is before the first token; ids of items are derived from its own.
        call_id: Returns the id of the call with that index.
        after: Number of the last event that the client has; -1: none.

    Attributes:
        response: As it is now.
    """

    def __init__(self, response: Json, call_id: Callable[[int], str], after: int = -1) -> None:
        self.response = response
        self._call_id = call_id
        self._after = after
        self._number = -1
        self._num_calls = 0
        self._output: list[Json] = response["output"]
        self._names_within = names_within(response["tools"])

    def opening(self) -> list[Json]:
        """The response, still empty."""
        kinds = ("response.created", "response.in_progress")
        return self._numbered({"type": kind, "response": {**self.response, "output": []}} for kind in kinds)

    def further(self, parts: Sequence[Part]) -> list[Json]:
        """Items begin, grow and end."""
        return self._numbered(event for part in parts for event in self._events(part))

    def ending(self, ending: Ending) -> list[Json]:
        """The last item ends, and so does the response."""
        cut = ending.finish_reason is FinishReason.LENGTH
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": ending.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": ending.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": ending.num_generated_tokens,
                "output_tokens_details": {"reasoning_tokens": ending.num_reasoning_tokens},
                "total_tokens": ending.num_prompt_tokens + ending.num_generated_tokens,
            },
            "metrics": metrics(ending.speculation),
        }
        return self.closing()

    def closing(self) -> list[Json]:
        """The last events of a response that has its status already."""
        status = self.response["status"]
        last = {"type": _ENDINGS.get(status, "response.failed"), "response": self.response}
        return self._numbered([*self._done("incomplete" if status == "incomplete" else "completed"), last])

    def break_off(self, fields: Json) -> None:
        """Its session will not end here; the response gets these fields."""
        for _ in self._done("incomplete"):
            continue
        self.response |= fields

    def whole(self) -> Json:
        return self.response

    def _numbered(self, events: Iterator[Json] | Sequence[Json]) -> list[Json]:
        """Returns events with their numbers, without those that the client has already."""
        out: list[Json] = []
        for event in events:
            is_delta = event["type"] in DELTAS
            begin = self._number
            self._number += len(event["delta"]) if is_delta else 1
            if self._number <= self._after:
                continue
            if is_delta:
                event = {**event, "delta": event["delta"][max(0, self._after - begin) :]}
            out.append({**event, "sequence_number": self._number})
        return out

    def _events(self, part: Part) -> Iterator[Json]:
        match part:
            case CallBegin():
                made, named = self._call_id(self._num_calls), self._named(part.name)
                yield from self._begin({"type": "function_call", "call_id": made, **named, "arguments": ""}, "fc")
                self._num_calls += 1
            case CallArguments():
                self._output[-1]["arguments"] += part.text
                yield {"type": ARGUMENTS_DELTA, **self._place(), "delta": part.text}
            case Reasoning():
                yield from self._text("reasoning", "rs", {"type": "reasoning_text", "text": ""})
                yield self._grown(REASONING_DELTA, part.text)
            case Content():
                yield from self._text("message", "msg", _output_text(""))
                yield {**self._grown(TEXT_DELTA, part.text), "logprobs": []}

    def _named(self, name: str) -> Json:
        """Returns the members of an item that name a function."""
        if name not in self._names_within:
            return {"name": name}
        namespace, own = self._names_within[name]
        return {"name": own, "namespace": namespace}

    def _text(self, kind: str, prefix: str, content: Json) -> Iterator[Json]:
        """Begins an item with text, unless the last one is of its kind."""
        if self._output and self._output[-1]["type"] == kind:
            return
        beside: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._begin({"type": kind, **beside, "content": []}, prefix)
        self._output[-1]["content"].append(dict(content))
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": content}

    def _grown(self, kind: str, text: str) -> Json:
        self._output[-1]["content"][0]["text"] += text
        return {"type": kind, **self._place(), "content_index": 0, "delta": text}

    def _begin(self, item: Json, prefix: str) -> Iterator[Json]:
        yield from self._done("completed")
        name = f"{prefix}_{self.response['id'].removeprefix(RESPONSE)}{len(self._output):04x}"
        self._output.append({"id": name, **item, "status": "in_progress"})
        shown = {**self._output[-1], **({"content": []} if "content" in item else {})}
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": shown}

    def _done(self, status: str) -> Iterator[Json]:
        """Ends the last item, if there is one."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(), **called}
        else:
            part = dict(item["content"][0])
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs: Json = {"logprobs": []} if kind == "output_text" else {}
            place = {**self._place(), "content_index": 0}
            yield {"type": f"response.{kind}.done", **place, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": dict(item)}

    def _place(self) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}


def response_of(item_id: str) -> str | None:
    """Returns the id of the response whose answer has an item; None: it is the id of no such item."""
    match = _ITEM.fullmatch(item_id)
    return match and f"{RESPONSE}{match[1]}"


def parts_of(output: Sequence[Json]) -> list[Part]:
    """Returns the parts that items were made of."""
    parts: list[Part] = []
    for item in output:
        if item["type"] == "function_call":
            parts += [CallBegin(joined(item.get("namespace"), item["name"])), CallArguments(item["arguments"])]
        else:
            kind = Content if item["type"] == "message" else Reasoning
            parts += [kind(each["text"]) for each in item["content"]]
    return parts


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
