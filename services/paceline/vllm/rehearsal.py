"""The helper's end of a rehearsal: `paceline rehearse`, or a verifier around vLLM, decides whether steps draft.

Each line that comes is JSON: `drafts` (true, false, or null: as pays) and `over` (all that was to be seen has been);
`unasked` where no user has asked for what vLLM does meanwhile; `learned` with what another helper has learned. The
answer is what only the helper knows; see `Rehearsal.state`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.core.draft_policy import Goodput
from paceline.service.learned import Learner, resume

# The client resends its command as a heartbeat, several times a second; and the longest line: learned tuning
# has some thousand bytes.
SILENCE_S, LINE_BYTES = 10.0, 1 << 20

_log = logging.getLogger(__name__)


class Rehearsal:
    """Lets one at a time decide for a policy; what it said is void once its connection ends, or is silent.

    Args:
        policy: Decides otherwise.
        learner: Learns of drafts and steps.
        vocab_size: The target's vocabulary size.

    Attributes:
        drafter: Hash of the draft model's weights; empty: no drafter was reached yet.
        unasked: Whether no user has asked for what vLLM does now.
    """

    def __init__(self, policy: Goodput, learner: Learner, vocab_size: int) -> None:
        self._policy = policy
        self._learner = learner
        self._vocab_size = vocab_size
        self._drafts: bool | None = None
        self._taken = False
        self.drafter, self.unasked = "", False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Does what one says, until it ends."""
        if self._taken:
            # Unread, its order would tear down the answer.
            with suppress(OSError, TimeoutError, ValueError):
                await asyncio.wait_for(reader.readline(), SILENCE_S)
            writer.write(_line({"error": "another rehearsal is under way"}))
            writer.close()
            return
        self._taken = True
        try:
            while line := await asyncio.wait_for(reader.readline(), SILENCE_S):
                writer.write(_line(self._answer(line)))
                await asyncio.wait_for(writer.drain(), SILENCE_S)
        except (OSError, TimeoutError, ValueError) as error:
            _log.warning("a rehearsal has broken off: %r", error)
        finally:
            self._taken = False
            self._obey(drafts=None, over=False)
            writer.close()

    def _answer(self, line: bytes) -> Mapping[str, Any]:
        try:
            self._obey(**json.loads(line))
        except (ValueError, TypeError, RecursionError) as error:
            return {"error": f"{line[:200]!r} is not understood: {error}"}
        return self.state()

    def state(self) -> Mapping[str, Any]:
        """State that only the helper has: the vocabulary, rates by load, whether drafters answer, learned tuning."""
        return {
            "vocab_size": self._vocab_size,
            "rates": self._policy.mode.learned(),
            "responded": self._policy.responded,
            "drafter": self.drafter,
            "learned": self._learner.learned(),
        }

    def _obey(self, *, drafts: object, over: object, unasked: object = False, learned: object = None) -> None:
        """Has steps draft or not from now on. Earlier measurements count for little.

        Raises:
            ValueError: The command in a line is not understood.
        """
        if not (isinstance(drafts, bool | None) and isinstance(over, bool) and isinstance(unasked, bool)):
            raise ValueError("drafts must be true, false or null, over and unasked true or false")
        self.unasked = unasked
        if learned is not None:
            resume(self._learner, json.dumps(learned).encode(), "another verifier")
        if drafts is self._drafts:
            return
        self._drafts = drafts
        self._policy.rehearse(drafts, over=self.drafter if over else "")


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"
