"""An answer in Anthropic's words: blocks of text, thinking and tool use, whole or as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.core.messages import FinishReason
from paceline.gateway.api.openai.answer import metrics
from paceline.gateway.message.growing import Message
from paceline.gateway.message.reader import CallArguments, CallBegin, Content, Part, Reasoning
from paceline.gateway.sessions.output import Ending

Json = dict[str, Any]


class MessageAnswer:
    """A message.

    Args:
        message_id: The answer's id.
        message: The message's content so far.
    """

    def __init__(self, message_id: str, model: str, num_prompt_tokens: int, message: Message) -> None:
        self._message = message
        self._whole: Json = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(num_prompt_tokens, 0, 0),
        }
        self._blocks: list[Json] = []
        self._inputs: dict[int, list[str]] = {}
        self._num_calls = 0

    def opening(self) -> list[Json]:
        """The message, still empty."""
        return [{"type": "message_start", "message": dict(self._whole)}, {"type": "ping"}]

    def further(self, parts: Sequence[Part]) -> list[Json]:
        """Blocks begin, grow and end."""
        return [event for part in parts for event in self._events(part)]

    def _events(self, part: Part) -> list[Json]:
        match part:
            case CallBegin():
                call = self._message.calls[self._num_calls]
                self._num_calls += 1
                return self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            case CallArguments():
                at = len(self._blocks) - 1
                self._inputs.setdefault(at, []).append(part.text)
                return [_delta(at, {"type": "input_json_delta", "partial_json": part.text})]
            case Reasoning():
                begun = self._continued("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += part.text
                return [*begun, _delta(len(self._blocks) - 1, {"type": "thinking_delta", "thinking": part.text})]
            case Content():
                begun = self._continued("text", {"type": "text", "text": ""})
                self._blocks[-1]["text"] += part.text
                return [*begun, _delta(len(self._blocks) - 1, {"type": "text_delta", "text": part.text})]

    def _continued(self, kind: str, block: Json) -> list[Json]:
        """Returns what begins a block, unless the last one is of its kind."""
        return [] if self._blocks and self._blocks[-1]["type"] == kind else self._begin(block)

    def _begin(self, block: Json) -> list[Json]:
        ended = self._stop()
        self._blocks.append(dict(block))
        return [*ended, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _stop(self) -> list[Json]:
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if self._blocks else []

    def ending(self, ending: Ending) -> list[Json]:
        """The last block ends, and so does the message."""
        for at, pieces in self._inputs.items():
            self._blocks[at]["input"] = _input("".join(pieces))
        reason = {"stop_reason": self._stop_reason(ending), "stop_sequence": ending.stop}
        usage = _usage(ending.num_prompt_tokens, ending.num_generated_tokens, ending.num_cached_tokens)
        self._whole |= {**reason, "usage": usage, "content": self._blocks, "metrics": metrics(ending.speculation)}
        delta = {"type": "message_delta", "delta": reason, "usage": usage}
        return [*self._stop(), delta, {"type": "message_stop"}]

    def _stop_reason(self, ending: Ending) -> str:
        if ending.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if ending.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._message.calls else "end_turn"

    def whole(self) -> Json:
        return self._whole


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _usage(num_prompt: int, num_generated: int, num_cached: int) -> Json:
    # As the API counts: what was cached is no input.
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_generated,
    }


def _input(text: str) -> Json:
    """Returns arguments as an object; broken ones are wrapped in an object, under the API's name for that."""
    try:
        value = json.loads(text or "{}")
        # Python reads NaN and the like, which JSON lacks; one of them would make the whole answer unreadable.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}
