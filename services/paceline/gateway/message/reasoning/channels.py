"""Reasoning, calls and content in channels, as gpt-oss writes them: the harmony format, read from its text.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`; a call of a tool is a
message to it: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

from __future__ import annotations

import re

from paceline.gateway.message.held_text import StatefulReader, first_marker
from paceline.gateway.message.parts import CallArguments, CallBegin, Content, Part, Reasoning
from paceline.gateway.text.stops import certain_len

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
MESSAGE_END = "<|end|>"
ENDS = (MESSAGE_END, "<|call|>", "<|return|>")
ANALYSIS = f"{CHANNEL}analysis"
SPECIAL = (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:-]+)")
MAX_HEAD_CHARS = 512


class ChannelReader(StatefulReader):
    """Reads messages; an answer that has no channels is content."""

    def __init__(self) -> None:
        super().__init__(self._head)
        self._kind: type[Content | Reasoning | CallArguments] = Content

    def _head(self) -> bool:
        """Between messages: who speaks, and where."""
        known = any(self.held.startswith(each) or each.startswith(self.held) for each in (START, CHANNEL))
        at = self.held.find(MESSAGE)
        if at < 0 and known and len(self.held) <= MAX_HEAD_CHARS and not self.final:
            return False
        if at < 0 or not known:
            self._kind = Content
            self.state = self._body
            return bool(self.held)
        self._begin(self.take(at))
        self.take(len(MESSAGE))
        self.state = self._body
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
        if found is not None:
            self._give(self.take(found[0]))
            self.take(len(found[1]))
            self.state = self._head
            return True
        self._give(self.take(len(self.held) if self.final else certain_len(self.held, ENDS)))
        return False

    def _give(self, text: str) -> None:
        part: Part = self._kind(text)
        self.parts.append(part)
