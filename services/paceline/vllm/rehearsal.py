"""The helper's end of `paceline rehearse`: a command decides whether steps draft, while it sends vLLM a load.

Each line that comes is JSON, `{"drafts": true, false or null, "over": bool}`. The answer is what the command cannot
know: the vocabulary, and the rates of both modes at each load so far.
"""

from __future__ import annotations

import asyncio
import json
import logging

from paceline.core.draft_policy import Goodput

# A command says the same again several times a second, while it lives.
SILENCE_S = 10.0

_log = logging.getLogger(__name__)


class Rehearsal:
    """Lets one command at a time decide for a policy; what it said is void once its connection ends, or is silent.

    Args:
        policy: Decides otherwise.
        vocab_size: Of the target.
    """

    def __init__(self, policy: Goodput, vocab_size: int) -> None:
        self._policy = policy
        self._vocab_size = vocab_size
        self._drafts: bool | None = None
        self._taken = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Does what a command says, until it ends."""
        if self._taken:
            writer.write(_line({"error": "another rehearsal is under way"}))
            writer.close()
            return
        self._taken = True
        try:
            while line := await asyncio.wait_for(reader.readline(), SILENCE_S):
                writer.write(self._answer(line))
                await asyncio.wait_for(writer.drain(), SILENCE_S)
        except (OSError, TimeoutError, ValueError) as error:
            _log.warning("a rehearsal has broken off: %r", error)
        finally:
            self._taken = False
            self._go_on(None)
            writer.close()

    def _answer(self, line: bytes) -> bytes:
        try:
            order = json.loads(line)
            drafts, over = order["drafts"], order["over"]
        except (ValueError, TypeError, KeyError):
            return _line({"error": f"{line!r} is not understood"})
        if not (drafts is None or isinstance(drafts, bool)) or not isinstance(over, bool):
            return _line({"error": f"drafts must be true, false or null, and over true or false, got {order}"})
        self._go_on(drafts, over=over)
        return _line({"vocab_size": self._vocab_size, "rates": self._policy.mode.learned()})

    def _go_on(self, drafts: bool | None, *, over: bool = False) -> None:
        """Has steps draft or not from now on; None: what was seen decides. What was seen before counts for little."""
        if drafts is self._drafts:
            return
        changes_hands = drafts is None or self._drafts is None
        self._drafts = drafts
        self._policy.rehearse(drafts, over=over)
        if changes_hands:
            for load in self._policy.mode.loads.values():
                load.begin_again()


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"
