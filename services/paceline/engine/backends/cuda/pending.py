"""A step on the device: its tokens or guesses are chosen there, and the host waits once, when it asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.calibration import NUM_RANKED, confidences
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.backends.cuda.choose import Questions, choose, rank
from paceline.engine.backends.cuda.plan import choice_words
from paceline.engine.backends.cuda.stream import Stream
from paceline.engine.backends.interface import memory_errors
from paceline.engine.batch import Batch
from paceline.engine.pending import HostPending, Longs, Rankings, Ranks, VerifyRequest, VerifyResult, follow_known
from paceline.engine.sampler import Logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests to a step: logit rows from which the device chooses, and the others, which the host judges.

    Attributes:
        wanted: The rows' requests it was made from.
        rows: int64 [n], of `Batch.logit_rows`.
        positions: int64 [n], absolute, of the tokens.
        choices: `CHOICE` [n].
        others: int64 [m], rows that come as logits; of a prompt that is judged, too many would come at once.
        places: int64 [all rows], where each is among the others; -1: it is not.
    """

    wanted: VerifyRequest | Ranks | None
    rows: Longs
    positions: Longs
    choices: npt.NDArray[Any]
    others: Longs
    places: Longs

    @classmethod
    def of(cls, batch: Batch, wanted: VerifyRequest | Ranks | None) -> Asked:
        """A token at each row of the walks, since none knows yet which are on the path."""
        rows, positions, choices = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, step_kernels.CHOICE)
        if isinstance(wanted, Ranks):
            rows, positions, choices = wanted
        elif wanted is not None:
            counts = 1 + wanted.stops - wanted.starts
            rows = np.repeat(wanted.rows - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            of_rows = batch.positions[batch.logit_rows]
            positions = np.repeat(wanted.positions - of_rows[wanted.rows], counts) + of_rows[rows]
            choices = np.repeat(wanted.choices, counts)
        places, others = (
            np.full(len(batch.logit_rows), -1),
            wanted.others if isinstance(wanted, VerifyRequest) else None,
        )
        if others is None:
            others = np.setdiff1d(np.arange(len(places)), rows)
        places[others] = np.arange(len(others))
        return cls(wanted=wanted, rows=rows, positions=positions, choices=choices, others=others, places=places)

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that the device needs."""
        return {
            "asked_rows": self.rows,
            "asked_positions": self.positions,
            "choices": choice_words(self.choices),
            "others": self.others,
        }


class CudaPending:
    """A step that was launched; see `paceline.engine.model.Pending`.

    Args:
        logits: Returns the step's, float32 [rows, vocab], when its turn comes.
        sent: `asked.arrays` on the device.
        vocab_size: Ids of a row.
    """

    runs_ahead = True

    def __init__(
        self,
        stream: Stream,
        logits: Callable[[], torch.Tensor],
        asked: Asked,
        sent: Mapping[str, torch.Tensor],
        vocab_size: int,
    ) -> None:
        self._stream, self._logits, self._asked, self._vocab_size = stream, logits, asked, vocab_size
        self._chosen = list[torch.Tensor]()
        self._answers = self._ask(sent) if len(asked.rows) else None
        self._others = self._fetch(lambda: sent["others"], len(asked.others))
        self._done = stream.mark()

    def _ask(self, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Has tokens or guesses chosen, and copied to the host: 4 bytes a row, or 128."""
        ranks = isinstance(self._asked.wanted, Ranks)
        questions = Questions(rows=sent["asked_rows"], positions=sent["asked_positions"], choices=sent["choices"])
        self._stream.run(lambda: self._chosen.append((rank if ranks else choose)(self._logits(), questions)))
        host = self._stream.host_buffer(len(self._asked.rows), *((2, NUM_RANKED) if ranks else ()), kind=torch.int32)
        self._stream.copy(host, self.chosen)
        return host

    def _fetch(self, rows: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
        """Has rows of logits copied to the host."""
        host = self._stream.host_buffer(count, self._vocab_size, kind=torch.float32)
        if count:
            self._stream.copy(host, lambda: self._logits()[rows()])
        return host

    def wait(self) -> None:
        """Returns once the step is over."""
        self._done.wait()

    def chosen(self) -> torch.Tensor:
        """Tokens, or guesses, at the rows asked about, as `choose` and `rank` give them, once their turn has come."""
        return self._chosen[0]

    @memory_errors()
    def follow(self, walks: VerifyRequest) -> VerifyResult:
        if walks is not self._asked.wanted:
            return self._on_host().follow(walks)
        tokens = np.empty(len(self._asked.places), np.int64)
        if len(walks.rows):
            self._done.wait()
            assert self._answers is not None, "sessions have rows"
            tokens[self._asked.rows] = self._answers.numpy()
        return follow_known(tokens, walks)

    @memory_errors()
    def rank(self, rows: Longs, positions: Longs, choices: npt.NDArray[Any]) -> Rankings:
        wanted = self._asked.wanted
        if not isinstance(wanted, Ranks) or wanted.rows is not rows or self._answers is None:
            return self._on_host().rank(rows, positions, choices)
        self._done.wait()
        return rankings(self._answers, choices)

    @memory_errors()
    def logits(self, rows: Sequence[int]) -> Logits:
        wanted = np.asarray(rows, np.int64)
        places = self._asked.places[wanted]
        if (places >= 0).all():
            self._done.wait()
            copied: Logits = self._others.numpy()[places]
            return copied
        # Tokens were chosen there on the device and log probabilities are read, or a prompt is judged.
        fetched = self._fetch(lambda: torch.from_numpy(wanted).to(self._stream.device), len(wanted))
        self._stream.mark().wait()
        found: Logits = fetched.numpy()
        return found

    def _on_host(self) -> HostPending:
        """Answers what was not announced."""
        return HostPending(self.logits(range(len(self._asked.places))))


def rankings(found: torch.Tensor, choices: npt.NDArray[Any]) -> Rankings:
    """Rankings on the host, from what `rank` found, once copied to it."""
    token_ids, shares = found[:, 0].numpy().copy(), found[:, 1].contiguous().view(torch.float32).numpy()
    sharpened = confidences(shares.astype(np.float64), greedy=choices["greedy"])
    return Rankings(token_ids, sharpened, token_ids[:, 0] != step_kernels.NOTHING)
