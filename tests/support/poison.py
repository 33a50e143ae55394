"""Prompts that a target engine does not survive: a step that computes one of these tokens dies, or never comes back."""

from __future__ import annotations

import threading
import time

from paceline.engine.batch import Batch
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.model import Pending
from paceline.engine.pending import Ranks, VerifyRequest

DIES, HANGS = 240, 241
# Whatever hangs here goes on in the end: a thread that never ends would keep the test's process.
MOST_S = 60.0


class Poison:
    """What makes a decoder die or hang, and lets it go on.

    Args:
        step_s: What each step takes at least.
        deadly: Whether it does more than to slow steps down.
    """

    def __init__(self, step_s: float = 0.0, *, deadly: bool = True) -> None:
        self.cure = threading.Event()
        self._step_s = step_s
        self._deadly = deadly

    def into(self, decoder: Decoder) -> Decoder:
        """Returns the decoder, poisoned."""
        launch = decoder.launch

        def poisoned(batch: Batch, cache: KVCache, wanted: VerifyRequest | Ranks | None) -> Pending:
            if self._deadly and DIES in batch.token_ids:
                raise RuntimeError("the poison works")
            if self._deadly and HANGS in batch.token_ids:
                self.cure.wait(MOST_S)
            if self._step_s:
                time.sleep(self._step_s)
            return launch(batch, cache, wanted)

        decoder.launch = poisoned  # type: ignore[method-assign]  # of this one alone
        return decoder
