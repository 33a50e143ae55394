"""Shared part of vLLM's model runners: they report a step to the helper, and take its guesses for the next one.

Once it has started, no failure here ends vLLM's engine: the guesses are empty lists then.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.goodput import MovingAverage
from paceline.service.config import parse_cpus
from paceline.vllm.board import NO_DRAFTS, ReadyDrafts, SharedTrees, worth_waiting
from paceline.vllm.expansion import mend_expansion
from paceline.vllm.helper_process import HelperProcess, free_cpus
from paceline.vllm.places import mode_socket, tokenizer_folder
from paceline.vllm.requests import RequestSessions, RequestStep
from paceline.vllm.settings import (
    SECTION,
    HelperJob,
    TierSettings,
    check_version,
    installed_version,
    settings_of,
)
from paceline.vllm.step_message import Observed, RowTokens, StepMessage

HELPER_MODULE = "paceline.vllm.helper"
# Tokens of new sessions in one message; a helper reads so many in milliseconds.
MOST_OPENED_TOKENS = 1 << 20
LEAST_WAIT_S = 0.002
MOST_WAIT_S = 0.25
# The helper itself ends waits that do not pay; this bound is for one that does not answer.
WAIT_PER_STEP = 2.0

_log = logging.getLogger(__name__)


class TierClient:
    """Asks the drafter tier for guesses, on the rank whose guesses vLLM takes.

    Args:
        vllm_config: vLLM's whole configuration.

    Attributes:
        failures: How often each kind of exception was caught.

    Raises:
        ConfigError: A setting of the tier is wrong, or this version of vLLM was not tested.
    """

    def __init__(self, vllm_config: Any) -> None:
        settings = settings_of(vllm_config.additional_config)
        check_version(installed_version(), settings.untested)
        self.failures: Counter[str] = Counter()
        job = _job(vllm_config, settings)
        self._vocab_size = job.vocab_size
        self._max_model_len = job.max_model_len
        self._max_chain = job.max_chain
        self._sessions = RequestSessions()
        # vLLM's steps without the time spent here, of which a pause without requests is no part.
        self._vllm_s, self._ended_s = MovingAverage(LEAST_WAIT_S / WAIT_PER_STEP), time.monotonic()
        self._step = 0
        self._helper = _helper(job) if _is_first_rank(vllm_config.parallel_config) else None
        if self._helper is not None:
            self._end_helper = weakref.finalize(self, self._helper.close)

    def start(self) -> None:
        """Starts the helper, now that the target is loaded and vLLM's threads are bound to their CPUs."""
        mend_expansion()
        if self._helper is not None:
            self._helper.start()

    def close(self) -> None:
        """Ends the helper; it also ends with this object, and with the process."""
        if self._helper is not None:
            self._end_helper()

    def guesses(self, num_rows: int, step: Callable[[], RequestStep]) -> list[list[int]]:
        """Guesses for each row of vLLM's batch, after a step.

        Args:
            num_rows: Rows of the batch.
            step: Reads the step from vLLM, where there is a helper to tell.

        Returns:
            A list for each row, possibly empty.
        """
        began_s = time.monotonic()
        self._vllm_s.add(min(began_s - self._ended_s, MOST_WAIT_S / WAIT_PER_STEP))
        try:
            return self._guesses(num_rows, step, began_s)
        except Exception as error:  # noqa: BLE001 - an exception would end vLLM's engine
            self._failed(error)
            return [[] for _ in range(num_rows)]
        finally:
            self._ended_s = time.monotonic()

    def _guesses(self, num_rows: int, step: Callable[[], RequestStep], began_s: float) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in range(num_rows)]
        helper = self._helper
        if helper is None:
            return guesses
        helper.start()
        if helper.renewed():
            self._sessions.forget()
        helper.listen()
        if helper.board is None:
            return guesses
        observed = self._sessions.observe(step(), max(MOST_OPENED_TOKENS, self._max_model_len))
        self._step += 1
        chains = self._exchange(helper, helper.board, observed, began_s)
        if chains:
            self._fill(guesses, observed, chains)
        return guesses

    def _exchange(
        self, helper: HelperProcess, board: SharedTrees, observed: Observed, began_s: float
    ) -> Sequence[Sequence[int]]:
        """Tells a step; returns guesses for its rows, if there are any."""
        awaited = helper.awaits and any(row.takes_guesses for row in observed.rows)
        taken = self._at_hand(board, observed.rows) if awaited else []
        message = StepMessage(self._step, began_s, awaited and not taken, observed.rows, observed.closed, taken)
        answer = helper.exchange(message, began_s + max(LEAST_WAIT_S, WAIT_PER_STEP * self._vllm_s.value))
        return taken or (answer.chains if answer else ())

    def _at_hand(self, board: SharedTrees, rows: Sequence[RowTokens]) -> list[Sequence[int]]:
        """The guesses of all rows on the board; none if the helper must be asked, or waiting for more pays."""
        found: list[ReadyDrafts] = []
        for row in rows:
            if not row.most_guesses:
                found.append(NO_DRAFTS)
                continue
            tree = None if row.reads or not row.base_len else board.read(row.session)
            if tree is None:
                return []
            found.append(tree.at_hand(self._sessions.since(row.session, tree.committed_len), self._room(row)))
        return [] if worth_waiting(found) else [each.token_ids for each in found]

    def _fill(self, guesses: list[list[int]], observed: Observed, chains: Sequence[Sequence[int]]) -> None:
        """Puts chains in their places, as far as vLLM can take them."""
        if len(chains) != len(observed.rows):
            raise ValueError(f"{len(chains)} chains for {len(observed.rows)} rows")
        for row, place, chain in zip(observed.rows, observed.places, chains, strict=True):
            if row.takes_guesses and len(chain):
                guesses[place] = self._checked(chain)[: self._room(row)]

    def _room(self, row: RowTokens) -> int:
        """Most guesses of a row: a step commits one token more than it verifies."""
        return max(0, min(self._max_chain, row.most_guesses, self._max_model_len - row.length - 1))

    def _checked(self, chain: Sequence[int]) -> list[int]:
        if min(chain) < 0 or max(chain) >= self._vocab_size:
            raise ValueError(f"a guess beyond the vocabulary of {self._vocab_size} tokens")
        return list(chain)

    def _failed(self, error: Exception) -> None:
        """Counts an exception, logs the first of its kind, and continues with another helper."""
        kind = type(error).__name__
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            _log.warning("vLLM goes on without guesses for a while; told once: %s", kind, exc_info=error)
        if self._helper is not None:
            self._helper.abandon(f"{kind}: {error}")


def _job(vllm_config: Any, settings: TierSettings) -> HelperJob:
    model, engine = vllm_config.model_config, vllm_config.parallel_config.data_parallel_rank
    return HelperJob(
        settings=settings,
        model=tokenizer_folder(str(model.tokenizer or model.model), model.tokenizer_revision or model.revision),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        max_chain=vllm_config.speculative_config.num_speculative_tokens,
        engine=engine,
        mode_socket=mode_socket(vllm_config.instance_id, engine),
    )


def _helper(job: HelperJob) -> HelperProcess:
    chosen = parse_cpus(f"{SECTION}.cpus", job.settings.cpus) if job.settings.cpus else None
    return HelperProcess(HELPER_MODULE, job, lambda: free_cpus(os.environ) if chosen is None else chosen)


def _is_first_rank(parallel_config: Any) -> bool:
    """Whether vLLM takes the guesses of this rank: the first of those that hold the last layers."""
    ranks = parallel_config.tensor_parallel_size * parallel_config.prefill_context_parallel_size
    return bool(parallel_config.rank % ranks == 0)
