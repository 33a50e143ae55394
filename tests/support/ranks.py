"""A second rank as a process of its own that follows one model after another, for tests in the place of rank 0."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.core.errors import UnavailableError
from paceline.engine.ranks import Ranks
from paceline.engine.rendezvous import RankFacts, Rendezvous, listen

HOST = "127.0.0.1"
FACTS = RankFacts(size=2, model="as the test says", device="cpu")


class RankZero:
    """This process's place beside that rank.

    Attributes:
        process: The other rank.
        models: Where it is told what to load.
        ranks: Both.
        losses: What was said of a lost rank.
        lost: Set when something was.
    """

    def __init__(self, silence_s: float) -> None:
        self.losses: list[UnavailableError] = []
        self.lost = threading.Event()
        listener = listen(HOST, 0)
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "tests.support.ranks", str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self.process.stdin is not None
        self.models = self.process.stdin
        rendezvous = Rendezvous(HOST, port, 0, listener)
        rendezvous.meet(FACTS)
        self.ranks = Ranks(
            rendezvous, rank=0, size=2, device=torch.device("cpu"), on_lost=self._on_lost, silence_s=silence_s
        )
        self._loaded = False

    def _on_lost(self, error: UnavailableError) -> None:
        self.losses.append(error)
        self.lost.set()

    def load(self, folder: Path, dtype: str = "float32"):
        """Both ranks go on with this model; the one before is done with."""
        from paceline.engine.loading import load_decoder

        self.dismiss()
        print(folder, dtype, file=self.models, flush=True)
        self._loaded = True
        return load_decoder(folder, dtype, ranks=self.ranks)

    def dismiss(self) -> None:
        """The model, if any, is done with."""
        from paceline.engine.sharded_backend import dismiss

        if self._loaded:
            dismiss(self.ranks)
        self._loaded = False


@contextmanager
def rank_zero(*, silence_s: float = 60.0) -> Iterator[RankZero]:
    """A place beside a second rank, which is gone afterwards."""
    place = RankZero(silence_s)
    try:
        yield place
        if not place.lost.is_set():
            place.dismiss()
            place.models.close()
            place.ranks.stop()
            assert place.process.wait(30) == 0
    finally:
        place.models.close()
        place.process.kill()
        place.process.wait()


def main() -> None:
    """Is rank 1, and follows the models named on standard input."""
    torch.set_num_threads(1)
    rendezvous = Rendezvous(HOST, int(sys.argv[1]), 1)
    rendezvous.meet(FACTS)
    ranks = Ranks(rendezvous, rank=1, size=2, device=torch.device("cpu"), on_lost=lambda _: None, silence_s=60.0)
    for line in sys.stdin:
        from paceline.engine.loading import load_decoder
        from paceline.engine.sharded_backend import follow

        folder, dtype = line.split()
        follow(load_decoder(Path(folder), dtype, ranks=ranks), ranks)
    ranks.stop()


if __name__ == "__main__":
    main()
