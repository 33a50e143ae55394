"""How the text of an answer becomes a message: the readers for it, chosen by the model's family and by the request.

Flags name the families, or the model's chat template shows them. Also where a message ends before its text does: at a
stop string in its content, or after its only call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from paceline.core.errors import ConfigError
from paceline.gateway.message.reader import CallArguments, CallBegin, Content, Part, StatefulReader, joined
from paceline.gateway.message.reasoning import (
    ANALYSIS,
    CHANNEL_TOKENS,
    GEMMA4_THOUGHT,
    GEMMA4_THOUGHT_END,
    MESSAGE_END,
    MISTRAL_THINK,
    MISTRAL_THINK_END,
    THINK,
    THINK_END,
    ChannelReader,
    ReasoningCount,
    ThinkReader,
)
from paceline.gateway.message.tool_calls import json_formats, pythonic
from paceline.gateway.message.tool_calls.json_call import BracketScanner, ListOnly, NamedCall
from paceline.gateway.message.tool_calls.marked_json import DEEPSEEK_MARKS, GEMMA4_MARKS, KIMI_MARKS, MarkedJsonCalls
from paceline.gateway.message.tool_calls.tagged import (
    DSML,
    DSML_TAGS,
    FUNCTION,
    GLM_TAGS,
    OUTER,
    OUTER_END,
    QWEN3_CODER_TAGS,
    TaggedCalls,
    Types,
)
from paceline.gateway.text.streaming import StopMatcher

AUTO, NONE = "auto", "none"
HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, PYTHONIC = "hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic"
DEEPSEEK, DEEPSEEK_V32, GEMMA4, GLM, KIMI_K2 = "deepseek", "deepseek_v32", "gemma4", "glm", "kimi_k2"
QWEN3, DEEPSEEK_R1, GPT_OSS = "qwen3", "deepseek_r1", "gpt_oss"
# Strings in the template of a family; the first family that fits is taken.
_TOOL_SIGNS = (
    (MISTRAL, (json_formats.MISTRAL_BEGIN,)),
    (GLM, ("<arg_key>",)),
    (DEEPSEEK_V32, (DSML,)),
    (DEEPSEEK, (DEEPSEEK_MARKS.begin,)),
    (KIMI_K2, (KIMI_MARKS.begin,)),
    (GEMMA4, (GEMMA4_MARKS.begin,)),
    (QWEN3_CODER, (FUNCTION,)),
    (HERMES, (json_formats.HERMES_BEGIN,)),
    (PYTHONIC, ("[func_name1(", pythonic.BEGIN)),
    (LLAMA3_JSON, (json_formats.LLAMA3_BEGIN, '{"name": function name, "parameters":')),
)
_REASONING_SIGNS = (
    (GPT_OSS, ("<|channel|>",)),
    (GEMMA4, (GEMMA4_THOUGHT,)),
    (MISTRAL, (MISTRAL_THINK,)),
    (DEEPSEEK_R1, ("<｜Assistant｜>",)),  # noqa: RUF001 - its own spelling
    (QWEN3, (THINK_END,)),
)
# By family, the pairs of tags around reasoning; the first one is that of today's models.
THINK_TAGS: Mapping[str, tuple[tuple[str, str], ...]] = {
    QWEN3: ((THINK, THINK_END),),
    DEEPSEEK_R1: ((THINK, THINK_END),),
    MISTRAL: ((MISTRAL_THINK, MISTRAL_THINK_END), (THINK, THINK_END)),
    GEMMA4: ((GEMMA4_THOUGHT, GEMMA4_THOUGHT_END),),
}
# Text behind the first tag that belongs to it.
THINK_LABELS: Mapping[str, str] = {GEMMA4: "thought"}
GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# Families whose arguments are written bare: a tool's schema gives their types.
TYPED = frozenset({QWEN3_CODER, GLM})
# Special tokens that a reader of calls must see.
_SHOWN: Mapping[str, tuple[str, ...]] = {
    HERMES: (json_formats.HERMES_BEGIN, json_formats.HERMES_END),
    LLAMA3_JSON: (json_formats.LLAMA3_BEGIN,),
    MISTRAL: json_formats.MISTRAL_MARKS.tokens,
    QWEN3_CODER: (OUTER, OUTER_END),
    PYTHONIC: (pythonic.BEGIN, pythonic.END),
    DEEPSEEK: DEEPSEEK_MARKS.tokens,
    KIMI_K2: KIMI_MARKS.tokens,
    GEMMA4: GEMMA4_MARKS.tokens,
    GLM: GLM_TOKENS,
    DEEPSEEK_V32: (DSML,),
}
# Markers with which a call may begin amid text.
CALL_MARKERS: Mapping[str, str] = {
    HERMES: json_formats.HERMES_BEGIN,
    MISTRAL: json_formats.MISTRAL_BEGIN,
    QWEN3_CODER: OUTER,
    GEMMA4: GEMMA4_MARKS.begin,
}
TOOL_FAMILIES = tuple(name for name, _ in _TOOL_SIGNS)
REASONING_FAMILIES = tuple(name for name, _ in _REASONING_SIGNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """How a model writes calls and reasoning; empty: unknown, or not at all."""

    tool_calls: str = ""
    reasoning: str = ""

    @classmethod
    def of(cls, tool_calls: str, reasoning: str, template: str) -> Families:
        """Returns the families that flags name, or that a template shows where a flag is `auto`.

        Args:
            tool_calls: A family, `auto`, or `none`.
            template: Source of the chat template; empty: there is none.
        """
        return cls(
            tool_calls=_family(tool_calls, _TOOL_SIGNS, template),
            reasoning=_reasoning_family(reasoning, template),
        )


NO_FAMILIES = Families()


def check_families(tool_calls: str, reasoning: str) -> None:
    """Checks the values of the two flags.

    Raises:
        ConfigError: A name is of no family.
    """
    for flag, given, known in (
        ("--tool-call-parser", tool_calls, TOOL_FAMILIES),
        ("--reasoning-parser", reasoning, REASONING_FAMILIES),
    ):
        if given not in (AUTO, NONE, *known):
            raise ConfigError(f"{flag} must be {', '.join((AUTO, NONE, *known))}, got {given!r}")


def _reasoning_family(given: str, template: str) -> str:
    family = _family(given, _REASONING_SIGNS, template)
    # DeepSeek V3 has R1's marks of turns, and does not reason.
    return "" if given == AUTO and family == DEEPSEEK_R1 and THINK_END not in template else family


def _family(given: str, signs: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    if given != AUTO:
        return "" if given == NONE else given
    return next((family for family, found in signs if any(sign in template for sign in found)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """How the text of one answer is to be read.

    Attributes:
        reasoning: Family of its reasoning; empty: it is content.
        thinks: Whether the text begins within reasoning.
        tool_calls: Family of its calls; empty: they are content.
        enforced: Whether a grammar enforces calls, as JSON of a form that no family has.
        named: The one tool that is called then; empty: any.
        types: Types of parameters by tool, for the family that needs them.
        short_ids: Whether ids of calls have nine letters or digits, as the model's template takes no others back.
        parallel: Whether it may hold several calls; otherwise the message ends after its first one.
        only: Tools that alone are called, as a grammar writes calls, where other text may look like a call; empty: any.
    """

    reasoning: str = ""
    thinks: bool = False
    tool_calls: str = ""
    enforced: bool = False
    named: str = ""
    types: Types = field(default_factory=dict)
    short_ids: bool = False
    parallel: bool = True
    only: Sequence[str] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """Special tokens that belong to the text."""
        marks = CHANNEL_TOKENS if self.reasoning == GPT_OSS else chain(*THINK_TAGS.get(self.reasoning, ()))
        return (*marks, *_SHOWN.get(self.tool_calls, ()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> MessageForm | None:
        """Returns the form that `to_json` wrote.

        Raises:
            TypeError: The values are of something else.
        """
        return None if values is None else cls(**values)

    def reader(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> MessageReader:
        """Returns a reader for an answer of this form that ends with one of these strings; see `MessageReader`."""
        reasoning, calls = self._reasoning_reader(), self._call_reader()
        return MessageReader(reasoning, calls, stops, include_stop=include_stop, one_call=not self.parallel)

    def reasoning_count(self, decode: Callable[[Sequence[int]], str]) -> ReasoningCount | None:
        """Returns a count of its reasoning tokens; None: it has no reasoning.

        Args:
            decode: Text of tokens, special ones spelled out.
        """
        if not self.reasoning:
            return None
        if self.reasoning == GPT_OSS:
            return ReasoningCount((ANALYSIS,), (MESSAGE_END,), decode, begun=self.thinks)
        begins, ends = zip(*THINK_TAGS[self.reasoning], strict=True)
        call = call_in_reasoning(self.reasoning, self.tool_calls)
        return ReasoningCount(begins, (*ends, *([call] if call else [])), decode, begun=self.thinks)

    def _reasoning_reader(self) -> StatefulReader | None:
        if self.reasoning == GPT_OSS:
            return ChannelReader()
        if not self.reasoning:
            return None
        call = call_in_reasoning(self.reasoning, self.tool_calls)
        if call and self.tool_calls == QWEN3_CODER:
            calls: StatefulReader | None = TaggedCalls(replace(QWEN3_CODER_TAGS, begins=(call,)), self.types)
        else:
            calls = self._call_reader() if call else None
        tags, label = THINK_TAGS[self.reasoning], THINK_LABELS.get(self.reasoning, "")
        return ThinkReader(tags, open_already=self.thinks, label=label, call=call, calls=calls)

    def _call_reader(self) -> StatefulReader | None:
        if self.enforced:
            return NamedCall(self.named) if self.named else ListOnly()
        if self.tool_calls in _TAGS:
            return TaggedCalls(_TAGS[self.tool_calls], self.types)
        if self.tool_calls == LLAMA3_JSON:
            return json_formats.Llama3Calls(self.only)
        made = _CALL_READERS.get(self.tool_calls)
        return None if made is None else made()


_TAGS = {GLM: GLM_TAGS, DEEPSEEK_V32: DSML_TAGS, QWEN3_CODER: QWEN3_CODER_TAGS}
_CALL_READERS: Mapping[str, Callable[[], StatefulReader]] = {
    HERMES: json_formats.HermesCalls,
    MISTRAL: json_formats.MistralCalls,
    PYTHONIC: pythonic.PythonicCalls,
    DEEPSEEK: partial(MarkedJsonCalls, DEEPSEEK_MARKS),
    KIMI_K2: partial(MarkedJsonCalls, KIMI_MARKS),
    GEMMA4: partial(MarkedJsonCalls, GEMMA4_MARKS),
}


def call_id(session_id: str, index: int, *, short: bool) -> str:
    """Returns the id of a call; it is the same wherever and however often the session runs."""
    digest = hashlib.sha256(f"{session_id}/{index}".encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"


def call_in_reasoning(reasoning: str, tool_calls: str) -> str:
    """Returns the marker of a call that ends reasoning; empty: none does. Mistral's models only mention calls there."""
    return "" if reasoning == MISTRAL else CALL_MARKERS.get(tool_calls, "")


def begins_thinking(reasoning: str, prompt_end: str) -> bool:
    """Tells whether an answer begins within reasoning.

    Args:
        reasoning: Family of the model.
        prompt_end: The end of its prompt, special tokens spelled out.
    """
    tags = THINK_TAGS.get(reasoning, ())
    opened = bool(tags) and prompt_end.rstrip().endswith(tags[0][0] + THINK_LABELS.get(reasoning, ""))
    if reasoning == DEEPSEEK_R1:
        return opened or not prompt_end.rstrip().endswith(THINK_END)
    return opened


class MessageReader:
    """Reads a message up to its end: reasoning, then calls in the content. How its text is cut changes nothing.

    Args:
        reasoning: Reads the text; None: all of it is content.
        calls: Reads the content; None: it has no calls.
        stops: Stop strings; none is searched within reasoning or a call, or across a call.
        include_stop: Whether the stop string belongs to the content.
        one_call: Whether the message ends with its first call: with the JSON object of its arguments, or where
            arguments that are none are followed by something else.

    Attributes:
        stop: The stop string that ended it; None: none so far.
        over: Whether it has ended.
    """

    def __init__(
        self,
        reasoning: StatefulReader | None,
        calls: StatefulReader | None,
        stops: Sequence[str],
        *,
        include_stop: bool,
        one_call: bool,
    ) -> None:
        self.stop: str | None = None
        self.over = False
        self._reasoning = reasoning
        self._calls = calls
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._one_call = one_call
        # Extent of the only call's arguments; None: it has not begun.
        self._extent: BracketScanner | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> list[Part]:
        """Takes further text; returns what is certain by now. Nothing may be fed once the message is over.

        Args:
            may_stop: Whether a stop string that this text completes ends the message.
        """
        if not text:
            return []
        parts = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._up_to_end(self._with_calls(parts), may_stop)

    def finish(self, *, may_stop: bool = True) -> list[Part]:
        """Returns what was held back; nothing may be fed afterwards."""
        parts = self._with_calls([] if self._reasoning is None else self._reasoning.finish())
        parts = self._up_to_end([*parts, *([] if self._calls is None else self._calls.finish())], may_stop)
        return parts if self.over else joined([*parts, Content(self._matcher.flush())])

    def _with_calls(self, parts: Sequence[Part]) -> list[Part]:
        """Returns parts with the calls in their content."""
        if self._calls is None:
            return list(parts)
        out: list[Part] = []
        for part in parts:
            out += self._calls.feed(part.text) if isinstance(part, Content) else [part]
        return out

    def _up_to_end(self, parts: list[Part], may_stop: bool) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if self._extent is not None and not isinstance(part, CallArguments):
                self.over = True
            if self.over:
                break
            out += self._content(part, may_stop) if isinstance(part, Content) else self._of_call(part)
        return joined(out)

    def _content(self, part: Content, may_stop: bool) -> list[Part]:
        passed, self.stop = self._matcher.feed(part.text, may_match=may_stop)
        self.over = self.stop is not None
        if self.stop is not None and self._include_stop:
            passed += self.stop
        return [Content(passed)]

    def _of_call(self, part: Part) -> list[Part]:
        if isinstance(part, CallBegin) and self._one_call:
            self._extent = BracketScanner()
        elif isinstance(part, CallArguments) and self._extent is not None:
            length = self._extent.scan(part.text)
            self.over = length is not None
            part = CallArguments(part.text[:length])
        return [Content(self._matcher.flush()), part]
