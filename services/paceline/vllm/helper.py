"""The helper process of a proposer: drafters, sessions and controller, outside vLLM's process.

`python -m paceline.vllm.helper --fd N --board M`: its end of a socket pair, and memory that it shares with the
proposer; the first message is its job. It ends when the other end is closed, so it never outlives its vLLM. A failure
in here costs guesses, never a token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from prometheus_client import CollectorRegistry

from paceline.checkpoints.identity import vocab_hash
from paceline.core.addresses import is_local
from paceline.core.draft_policy import Goodput
from paceline.core.messages import VERIFIER, ModelIdentity, ToVerifier
from paceline.core.params import DRAFT_MODEL
from paceline.core.target_events import DraftsArrived, LinkChanged
from paceline.obs.log import setup_logging
from paceline.obs.metrics import VerifierMetrics, service_registry
from paceline.obs.metrics_page import metrics_server
from paceline.service.credentials import load_tls, show_days_left
from paceline.service.learned import TunedState, kept_in
from paceline.service.process import GARBAGE_OF_STEPS, run, settle_heap
from paceline.service.supervision import TaskSupervisor, Work
from paceline.store.base import Store
from paceline.store.redis import open_store
from paceline.tier.drafters import Drafters
from paceline.vllm.board import SharedTrees
from paceline.vllm.chain_scheduler import ChainScheduler
from paceline.vllm.rehearsal import LINE_BYTES, Rehearsal
from paceline.vllm.settings import HelperJob
from paceline.vllm.step_message import NO_STEP, ChainsMessage, StepMessage

logger = logging.getLogger(__name__)

PROG = "paceline vllm helper"
# Drafters that share this host's cores are tried at once with up to so many sessions. A trial with 8 gave 1.8 times the
# speed in its first 128 steps, and one with 32 cost nothing that could be measured (two cores, 98 M target).
MAX_EAGER_BATCH = 32

ToProposer: TypeAlias = "Connection[ChainsMessage, StepMessage]"


class Helper:
    """Answers a proposer.

    Args:
        job: Settings and target.
        to_proposer: The helper's end of the connection.
        board: Where the proposer finds guesses by itself.
        registry: Registry of its metrics.

    Attributes:
        rehearsal: For `paceline rehearse`, and a verifier around vLLM.
    """

    def __init__(
        self, job: HelperJob, to_proposer: ToProposer, board: SharedTrees, registry: CollectorRegistry
    ) -> None:
        self._job = job
        self._proposer = to_proposer
        self._board = board
        identity = _identity(job)
        self._metrics = VerifierMetrics(registry, identity.name)
        tls = load_tls(Path(job.settings.tls_dir) if job.settings.tls_dir else None, VERIFIER)
        show_days_left(registry, {} if tls is None else tls.files)
        self._drafters = Drafters(
            identity,
            on_change=self._link_changed,
            on_messages=self._drafts_arrived,
            metrics=self._metrics,
            zone=job.settings.zone,
            tls=tls,
        )
        self._drafters.verifier = metrics_address_of(job)
        self._metrics.tell_address(self._drafters.verifier)
        policy = Goodput(max_nodes=job.max_chain, max_eager_batch=max_eager_batch(job.settings.drafters))
        self._scheduler = ChainScheduler(
            name=uuid.uuid4().hex,
            policy=policy,
            drafters=self._drafters,
            methods=(DRAFT_MODEL,),
            vocab_size=job.vocab_size,
            max_model_len=job.max_model_len,
            max_chain=job.max_chain,
        )
        self.rehearsal = Rehearsal(policy, self._scheduler, job.vocab_size)
        facts = ("vllm", identity.vocab_hash, str(job.model), job.vocab_size, job.max_chain)
        self._learned: TunedState = kept_in(job.settings.learned_dir, os.environ, *facts)
        self._learned.load_into(self._scheduler)
        # The step whose chains the proposer waits for, and the timer that ends our wait for guesses.
        self._awaited: int | None = None
        # The step whose commit is on its way to drafters, and of which nothing else is done yet.
        self._unanswered: StepMessage | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Last `ChainsMessage.awaits` sent to the proposer.
        self._awaits = False
        self.ended = asyncio.Event()

    def begin(self) -> None:
        """Reads from the proposer from now on, and says so."""
        asyncio.get_running_loop().add_reader(self._proposer.fileno(), self._read)
        self._send(ChainsMessage(NO_STEP, self._awaits))

    async def close(self) -> None:
        """Ends the streams to drafters."""
        asyncio.get_running_loop().remove_reader(self._proposer.fileno())
        await self._drafters.close()

    def background(self, store: Store | None) -> Mapping[str, Work]:
        """Names the tasks that look after drafters and keep what is learned."""
        learned = partial(self._learned.keep, self._scheduler.learned)
        return {"learned": learned, **self._drafters.background(self._pair_all, store, self._job.settings.drafters)}

    def _pair_all(self) -> None:
        num_changed = self._scheduler.pair_anew(time.monotonic())
        self._metrics.fallbacks.labels("drafter_changed").inc(num_changed)
        self._send_to_drafters()

    # The proposer

    def _read(self) -> None:
        with self._ends_if_lost():
            self._step_ended(self._proposer.recv())

    @contextlib.contextmanager
    def _ends_if_lost(self) -> Iterator[None]:
        """Ends this helper where a block does not understand the proposer: a new one starts from a clean state."""
        try:
            yield
        except (EOFError, ConnectionError):
            self.ended.set()
        except (OSError, KeyError, ValueError) as error:
            logger.error("the proposer is not understood; this helper ends", extra={"error": repr(error)})
            self.ended.set()

    def _step_ended(self, message: StepMessage) -> None:
        # Answers a step that came just before.
        self._answer()
        self._stop_waiting()
        self._scheduler.commit(message, time.monotonic())
        # At once: drafters have nothing to do until they get the commit. Their streams write it before the rest.
        self._send_to_drafters()
        self._unanswered = message
        asyncio.get_running_loop().call_soon(self._answer)

    def _answer(self) -> None:
        message, self._unanswered = self._unanswered, None
        if message is not None:
            with self._ends_if_lost():
                self._go_on(message)

    def _go_on(self, message: StepMessage) -> None:
        """Finishes a step once drafters have its commit."""
        if message.awaited:
            self._awaited = message.step
            self._answer_or_wait()
        else:
            if message.taken:
                self._scheduler.take(message.taken)
            else:
                self._scheduler.chains()
            self._send_if_awaits_changes(message.step)
        self._scheduler.show(self._board)
        self._count()

    def _answer_or_wait(self) -> None:
        """Sends the chains of the awaited step, unless it pays to wait for more guesses."""
        if self._awaited is None:
            return
        patience_s = self._scheduler.patience_s(time.monotonic())
        if patience_s > 0.0:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(patience_s, self._answer_or_wait)
            return
        step, chains = self._awaited, self._scheduler.chains()
        self._stop_waiting()
        self._awaits = self._scheduler.drafts
        self._send(ChainsMessage(step, self._awaits, chains))

    def _stop_waiting(self) -> None:
        self._awaited = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_if_awaits_changes(self, step: int) -> None:
        if self._scheduler.drafts != self._awaits:
            self._awaits = self._scheduler.drafts
            self._send(ChainsMessage(step, self._awaits))

    def _send(self, message: ChainsMessage) -> None:
        # An answer a step at most, which the proposer reads before its next one: the socket has room.
        with self._ends_if_lost():
            self._proposer.send(message)

    # Drafters

    def _link_changed(self, address: str, draft: ModelIdentity | None) -> None:
        if draft is not None:
            self.rehearsal.drafter = self.rehearsal.drafter or draft.weights_hash
        changed = LinkChanged(address=address, up=draft is not None, draft_model="" if draft is None else draft.name)
        self._scheduler.change_link(changed, time.monotonic())
        self._send_to_drafters()

    async def _drafts_arrived(self, address: str, messages: Sequence[ToVerifier]) -> None:
        self._scheduler.receive(DraftsArrived(address=address, messages=messages, arrived_s=time.monotonic()))
        self._send_to_drafters()
        self._answer_or_wait()
        self._scheduler.show(self._board)

    def _send_to_drafters(self) -> None:
        to_drafters, broken = self._scheduler.take_outgoing()
        for address, messages in to_drafters.items():
            self._drafters.say(address, messages)
        for address, error in broken.items():
            self._drafters.reset(address, str(error))

    def _count(self) -> None:
        report = self._scheduler.take_report()
        if not self.rehearsal.unasked:
            asyncio.get_running_loop().call_soon(self._metrics.steps.add, report)


async def serve(job: HelperJob, to_proposer: ToProposer, board: SharedTrees) -> None:
    """Answers a proposer until it closes its end.

    Raises:
        ConfigError: The target has no tokenizer, a certificate is missing, or the port of metrics is taken.
    """
    registry = service_registry(VERIFIER)
    helper = Helper(job, to_proposer, board, registry)
    store = open_store(job.settings.registry, "registry") if job.settings.registry else None
    async with contextlib.AsyncExitStack() as stack:
        if store is not None:
            await stack.enter_async_context(store)
        if job.settings.metrics_address:
            host, _, port = metrics_address_of(job).rpartition(":")
            stack.enter_context(metrics_server(registry, host.strip("[]"), int(port)))
        await stack.enter_async_context(_told_the_mode(job.mode_socket, helper.rehearsal))
        stack.push_async_callback(helper.close)
        await stack.enter_async_context(TaskSupervisor(registry).kept(helper.background(store)))
        settle_heap(GARBAGE_OF_STEPS)
        helper.begin()
        logger.info("the helper is ready", extra={"model": str(job.model), "drafters": ",".join(job.settings.drafters)})
        await helper.ended.wait()


def metrics_address_of(job: HelperJob) -> str:
    """Where a helper shows its metrics, a port for each engine; its drafters know it by this. Empty: nowhere."""
    host, _, port = job.settings.metrics_address.rpartition(":")
    return f"{host}:{int(port) + job.engine}" if port else ""


@contextlib.asynccontextmanager
async def _told_the_mode(path: Path, rehearsal: Rehearsal) -> AsyncIterator[None]:
    """Serves rehearsals while a block runs; the folder lets no other user in."""
    _make_way(path)
    server = await asyncio.start_unix_server(rehearsal.serve, path, limit=LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        _make_way(path)


def _make_way(path: Path) -> None:
    """Removes the socket that a killed helper may have left."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)


def max_eager_batch(drafters: Sequence[str]) -> float:
    """Sessions up to which drafting is tried at once: any number where all drafters are known to be elsewhere."""
    elsewhere = drafters and not any(map(is_local, drafters))
    return math.inf if elsewhere else MAX_EAGER_BATCH


def _identity(job: HelperJob) -> ModelIdentity:
    return ModelIdentity(
        name=job.model.name,
        vocab_hash=vocab_hash(job.model),
        vocab_size=job.vocab_size,
        context_len=job.max_model_len,
    )


def main() -> None:
    """Entry point of the helper process."""
    parser = argparse.ArgumentParser(PROG)
    parser.add_argument("--fd", required=True, type=int)
    parser.add_argument("--board", required=True, type=int)
    arguments = parser.parse_args()
    setup_logging("vllm-helper")
    to_proposer = Connection(arguments.fd)
    run(serve(to_proposer.recv(), to_proposer, SharedTrees(arguments.board)), prog=PROG)


if __name__ == "__main__":
    main()
