"""Readers of reasoning, one for each way in which models set it apart, and the count of its tokens.

* `ThinkReader`: between `<think>` and `</think>` at the beginning of an answer, as Qwen3 and DeepSeek-R1 write it.
* `ChannelReader`: reasoning, calls and content in channels, the harmony format of gpt-oss, read from its text:
  `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; a call of a tool is a
  message to it: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from paceline.gateway.message.parts import CallArguments, CallBegin, Content, Reasoning
from paceline.gateway.message.reader import StatefulReader, first_marker
from paceline.gateway.text.stops import certain_len

THINK, THINK_END = "<think>", "</think>"
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
MESSAGE_END = "<|end|>"
ENDS = (MESSAGE_END, "<|call|>", "<|return|>")
ANALYSIS = f"{CHANNEL}analysis"
CHANNEL_TOKENS = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
MAX_HEAD_CHARS = 512
# Tokens that the end of reasoning may spread over, each a byte at least.
MARKER_TOKENS = 24
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:-]+)")


class ThinkReader(StatefulReader):
    """Separates reasoning from content; line breaks at the edges of both belong to the tags.

    Args:
        open_already: Whether the answer begins within the reasoning, because the prompt ends with its tag.
        call: Marker with which a call may begin before the end of reasoning, which it ends; empty: none may.
        calls: Makes a reader that tells whether what begins with the marker is a call.
    """

    def __init__(
        self, *, open_already: bool, call: str = "", calls: Callable[[], StatefulReader | None] = lambda: None
    ) -> None:
        super().__init__(self._inside_begin if open_already else self._begin)
        self._ends = (THINK_END, call) if call else (THINK_END,)
        self._calls = calls
        self._trial: StatefulReader | None = None
        self._num_tried = 0

    def _begin(self) -> bool:
        bare = self.held.lstrip()
        if bare.startswith(THINK):
            self.held = bare[len(THINK) :]
            self.state = self._inside
            return True
        if THINK.startswith(bare) and not self.final:
            return False
        self.state = self.rest_is_content
        return True

    def _inside_begin(self) -> bool:
        """A model may repeat the tag that the prompt ends with."""
        return self.pass_marker(THINK, self._inside)

    def _inside(self) -> bool:
        self.held = self.held.lstrip("\n")
        self.state = self._reasoning if self.held else self.state
        return bool(self.held)

    def _reasoning(self) -> bool:
        found = first_marker(self.held, self._ends)
        if found is None:
            length = len(self.held)
            if not self.final:
                length = len(self.held[: certain_len(self.held, self._ends)].rstrip("\n"))
            self.parts.append(Reasoning(self.take(length)))
            return False
        bare = self.held[: found[0]].rstrip("\n")
        self.parts.append(Reasoning(self.take(len(bare))))
        if found[1] == THINK_END:
            self.held = self.held.lstrip("\n")
            self.take(len(THINK_END))
            self.state = self._after
        else:
            self._trial, self._num_tried = self._calls(), len(self.held) - len(self.held.lstrip("\n"))
            self.state = self._maybe_call
        return True

    def _maybe_call(self) -> bool:
        """Behind the marker of a call, which is kept until it is clear whether a call follows."""
        assert self._trial is not None, "it is there before this state"
        parts = self._trial.feed(self.held[self._num_tried :])
        self._num_tried = len(self.held)
        if parts and isinstance(parts[0], CallBegin):
            self.held = self.held.lstrip("\n")
            self.state = self.rest_is_content
        elif parts or self.final:
            self.parts.append(Reasoning(self.take(self.held.index(self._ends[-1]) + len(self._ends[-1]))))
            self.state = self._reasoning
        else:
            return False
        return True

    def _after(self) -> bool:
        self.held = self.held.lstrip("\n")
        self.state = self.rest_is_content if self.held else self.state
        return bool(self.held)


class ChannelReader(StatefulReader):
    """Reads messages; an answer that has no channels is content."""

    def __init__(self) -> None:
        super().__init__(self._head)
        self._kind: type[Content | Reasoning | CallArguments] = Content

    def _head(self) -> bool:
        """Between messages: the head names the channel and the recipient."""
        known = any(self.held.startswith(each) or each.startswith(self.held) for each in (START, CHANNEL))
        at = self.held.find(MESSAGE)
        if at < 0 and known and len(self.held) <= MAX_HEAD_CHARS and not self.final:
            return False
        self.state = self._body
        if at < 0 or not known:
            self._kind = Content
            return bool(self.held)
        self._begin(self.take(at))
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
        begin: What it begins with.
        ends: What may end it.
        decode: Text of tokens, special ones spelled out.
        begun: Whether the answer begins within it.
    """

    def __init__(self, begin: str, ends: Sequence[str], decode: Callable[[Sequence[int]], str], *, begun: bool) -> None:
        self._begin = begin
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
        self._begun = text.startswith(self._begin)
        self._over = not self._begun and (not self._begin.startswith(text) or len(self._last) > MARKER_TOKENS)
        return self._begun

    def _ends(self, count: int) -> bool:
        text = self._decode(self._last[:count])
        return any(mark in text for mark in self._end_marks)
