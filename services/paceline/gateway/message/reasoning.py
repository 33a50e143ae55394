"""Readers of reasoning, one for each way in which models set it apart, and the count of its tokens.

* `ThinkReader`: between two tags at the beginning of an answer: `<think>` and `</think>`, as Qwen3 and DeepSeek-R1
  write it, `[THINK]` and `[/THINK]`, as Mistral does, or `<|channel>thought` and `<channel|>`, as Gemma 4 does.
* `ChannelReader`: reasoning, calls and content in channels, the harmony format of gpt-oss, read from its text:
  `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; a call of a tool is a
  message to it: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or with the
  recipient before the channel, with which an answer may begin, as the prompt ends with the role.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from paceline.gateway.message.reader import (
    MAX_HEAD_CHARS,
    CallArguments,
    CallBegin,
    Content,
    MarkedCalls,
    Reasoning,
    StatefulReader,
    content_of,
    first_marker,
)
from paceline.gateway.text.streaming import certain_len

THINK, THINK_END = "<think>", "</think>"
MISTRAL_THINK, MISTRAL_THINK_END = "[THINK]", "[/THINK]"
GEMMA4_THOUGHT, GEMMA4_THOUGHT_END = "<|channel>", "<channel|>"
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
MESSAGE_END = "<|end|>"
ENDS = (MESSAGE_END, "<|call|>", "<|return|>")
ANALYSIS = f"{CHANNEL}analysis"
CHANNEL_TOKENS = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
# Tokens that the end of reasoning may spread over, each a byte at least.
MARKER_TOKENS = 24
TO = " to="
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:-]+)")


class ThinkReader(StatefulReader):
    """Separates reasoning from content; line breaks at the edges of both belong to the tags.

    Args:
        tags: Pairs of tags of which an answer may have one.
        open_already: Whether the answer begins within the reasoning, because the prompt ends with its first tag.
        label: Text behind the first tag that belongs to it, and may be missing.
        call: Marker with which a call may begin before the end of reasoning, which it ends.
        calls: Finds such a call in the reasoning; what is no call is content to it.
    """

    def __init__(
        self,
        tags: Sequence[tuple[str, str]] = ((THINK, THINK_END),),
        *,
        open_already: bool,
        label: str = "",
        call: str = "",
        calls: StatefulReader | None = None,
    ) -> None:
        super().__init__(self._inside_begin if open_already else self._begin)
        self._tags = tags
        self._open, self._close = tags[0]
        self._label = label
        self._call = call
        self._calls = MarkedCalls(()) if calls is None else calls
        # Text that the call reader has taken and not given back.
        self._tried = ""

    def _begin(self) -> bool:
        begun = self.held[:MAX_HEAD_CHARS]
        bare = begun.lstrip()
        for pair in self._tags:
            if bare.startswith(pair[0]):
                self._open, self._close = pair
                self.take(len(begun) - len(bare) + len(self._open))
                self.state = self._inside
                return True
        if any(tag.startswith(bare) for tag, _ in self._tags) and len(begun) < MAX_HEAD_CHARS and not self.final:
            return False
        self.state = self.rest_is_content
        return True

    def _inside_begin(self) -> bool:
        """A model may repeat the tag that the prompt ends with."""
        return self.pass_marker(self._open + self._label, self._inside_text)

    def _inside(self) -> bool:
        begins = self.begins(self._label)
        if begins is not None:
            self.take(len(self._label) if begins else 0)
            self.state = self._inside_text
        return begins is not None

    def _inside_text(self) -> bool:
        self.held = self.held.lstrip("\n")
        self.state = self._reasoning if self.held else self.state
        return bool(self.held)

    def _reasoning(self) -> bool:
        end = self.held.find(self._close)
        certain = len(self.held) if self.final else certain_len(self.held, (self._close,))
        text = self.take(end if end >= 0 else certain)
        self._tried += text
        parts = self._calls.feed(text)
        if end >= 0 or self.final:
            parts += self._calls.finish()
        begin = next((at for at, part in enumerate(parts) if isinstance(part, CallBegin)), None)
        given = content_of(parts[:begin])
        self._tried = self._tried[len(given) :]
        if begin is not None:
            return self._to_call(given)
        self.parts.append(Reasoning(given.rstrip("\n") if end >= 0 else given))
        if end >= 0:
            self.take(len(self._close))
            self.state = self._after
        return end >= 0

    def _to_call(self, given: str) -> bool:
        """Ends the reasoning with a call, which is content to the next reader."""
        before, marker, behind = self._tried.partition(self._call)
        self.parts.append(Reasoning(f"{given}{before}".rstrip("\n")))
        self.held = f"{marker}{behind}{self.held}"
        self.state = self.rest_is_content
        return True

    def _after(self) -> bool:
        self.held = self.held.lstrip("\n")
        self.state = self.rest_is_content if self.held else self.state
        return bool(self.held)


class ChannelReader(StatefulReader):
    """Reads messages; an answer that has no channels is content. A head that breaks off with the answer is nothing."""

    def __init__(self) -> None:
        super().__init__(self._head)
        # Markers that a head may begin with.
        self._heads: tuple[str, ...] = (START, CHANNEL, TO)
        self._kind: type[Content | Reasoning | CallArguments] = Content

    def _head(self) -> bool:
        """Between messages: the head names the channel and the recipient."""
        begun = self.held[:MAX_HEAD_CHARS]
        known = any(begun.startswith(each) or each.startswith(begun) for each in self._heads)
        at = begun.find(MESSAGE)
        if at < 0 and known and len(begun) < MAX_HEAD_CHARS and not self.final:
            return False
        if at < 0 and self.final and CHANNEL in begun:
            self.take_all()
        self.state = self._body
        if at < 0 or not known:
            self._kind = Content
            return bool(self.held)
        self._begin(self.take(at))
        self._heads = (START, CHANNEL)
        self.take(len(MESSAGE))
        return True

    def _begin(self, head: str) -> None:
        recipient = _RECIPIENT.search(head)
        channel = head.rpartition(CHANNEL)[2].split(maxsplit=1)[:1]
        if recipient is not None:
            self.parts.append(CallBegin(recipient[1]))
            self._kind = CallArguments
        else:
            self._kind = Reasoning if channel == ["analysis"] else Content

    def _body(self) -> bool:
        found = first_marker(self.held, ENDS)
        if found is None:
            length = len(self.held) if self.final else certain_len(self.held, ENDS)
            self.parts.append(self._kind(self.take(length)))
            return False
        self.parts.append(self._kind(self.take(found[0])))
        self.take(len(found[1]))
        self.state = self._head
        return True


class ReasoningCount:
    """Counts the tokens up to the end of reasoning, its marks included.

    Args:
        begins: Markers that it may begin with.
        ends: Markers that may end it.
        decode: Text of tokens, special ones spelled out.
        begun: Whether the answer begins within it.
    """

    def __init__(
        self, begins: tuple[str, ...], ends: Sequence[str], decode: Callable[[Sequence[int]], str], *, begun: bool
    ) -> None:
        self._begin_marks = begins
        self._end_marks = ends
        self._decode = decode
        self._begun = begun
        self._over = False
        # The last tokens, in which the end mark may have begun; before reasoning begins, all of them.
        self._last: list[int] = []
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        if self._over:
            return
        known = len(self._last) if self._begun else 0
        self._last = [*self._last, *token_ids]
        if not self._begun and not self._begins():
            return
        ids = self._last
        self._over = self._ends(len(ids))
        end = bisect_left(range(len(ids)), True, lo=known, key=self._ends) if self._over else len(ids)
        self.num_tokens += end - known
        self._last = ids[-MARKER_TOKENS:]

    def _begins(self) -> bool:
        """Tells whether it has begun; an answer that begins otherwise has none."""
        text = self._decode(self._last).lstrip()
        self._begun = text.startswith(self._begin_marks)
        may_begin = any(mark.startswith(text) for mark in self._begin_marks) and len(self._last) <= MARKER_TOKENS
        self._over = not self._begun and not may_begin
        return self._begun

    def _ends(self, count: int) -> bool:
        text = self._decode(self._last[:count])
        return any(mark in text for mark in self._end_marks)
