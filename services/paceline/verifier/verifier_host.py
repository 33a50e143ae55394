"""Joins the engine thread, the drafters' streams and the requests under way, in the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from paceline.core.errors import (
    EngineDiedError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.grammar import GrammarState
from paceline.core.messages import CommittedTokens, GenerateRequest, ModelIdentity, ToVerifier
from paceline.core.params import EAGLE3, TIER_METHODS
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    DraftsArrived,
    LinkChanged,
    Paired,
    Submit,
    TargetEvent,
    TargetOutput,
)
from paceline.engine.admission import QueueClock, check_wait, num_ahead
from paceline.engine.bridge import EngineThread
from paceline.engine.grammar import NICENESS
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.steps import record_output
from paceline.obs.tracing import OFF, Tracer
from paceline.service.credentials import FleetTls
from paceline.service.fair_threads import FairThreads
from paceline.service.supervision import Work
from paceline.store.base import Store
from paceline.tier.drafters import Drafters
from paceline.verifier.outbox import Outbox, Outboxes
from paceline.verifier.served import ServedEngine, TargetStepper
from paceline.verifier.tracing import SessionTrace, traced_session
from paceline.wire import size_of

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
# Sessions whose grammars wait to be compiled, and for how long at most.
MOST_GRAMMARS, LONGEST_WAIT_S = 64, 60.0
# Pause between two looks for sessions that have been silent.
LIFE_S = 0.5


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    """A session that runs here; `methods` are those of the drafter tier.

    `begun` is False while its grammar is not compiled.
    """

    serial: int
    epoch: int
    tenant: str
    priority: int
    methods: frozenset[str]
    drafter_address: str
    begun: bool = False


class TargetHost:
    """Everything of a verifier that runs in the event loop, except the gRPC server.

    Args:
        served: The engine, and what is promised with it.
        max_queue: Most sessions that wait or run.
        grace_s: Time that sessions get to finish when the verifier stops.
        stream_interval_s: Longest time for which tokens of a session gather while many sessions run.
        metrics: Where steps are counted.
        zone: Where it runs; empty: not known.
        tls: Certificate to show to drafters; None: plain text.
        tracer: Records spans of sessions, if it does.
    """

    def __init__(
        self,
        served: ServedEngine,
        *,
        max_queue: int,
        grace_s: float,
        stream_interval_s: float,
        metrics: VerifierMetrics,
        zone: str = "",
        tls: FleetTls | None = None,
        tracer: Tracer = OFF,
    ) -> None:
        self.identity = served.identity
        self._served = served
        self._max_queue = max_queue
        # Sessions that have places: the engine's bound, or what its pages hold.
        self.max_sessions = self._num_places = served.max_num_seqs
        self._queue_clock = QueueClock()
        self._compiling = FairThreads(
            1,
            "grammars being compiled",
            most_waiting=MOST_GRAMMARS,
            longest_wait_s=LONGEST_WAIT_S,
            niceness=NICENESS,
        )
        self._grace_s = grace_s
        self._metrics = metrics
        self._tracer = tracer
        self.engine: EngineThread[TargetEvent, DrafterNews] = EngineThread(self._make_stepper, self._deliver, "target")
        self.drafters = Drafters(
            self.identity,
            own=served.own_drafter,
            on_change=self._link_changed,
            on_messages=self._drafts_arrived,
            metrics=metrics,
            zone=zone,
            tls=tls,
        )
        self._stepper: TargetStepper | None = None
        # By serial: a session id may come back while outputs of its cancelled namesake are under way.
        self._outboxes = Outboxes(stream_interval_s)
        self._traces: dict[int, SessionTrace] = {}
        self._serials = itertools.count(1)
        self._under_way: dict[str, _UnderWay] = {}
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_sessions(self) -> int:
        return len(self._outboxes)

    def _make_stepper(self) -> TargetStepper:
        self._stepper = self._served.make()
        return self._stepper

    def engine_died(self, problem: str) -> None:
        """Ends every session and takes no new one; those of the last step end as its possible cause."""
        self._draining = True
        for serial in () if self._stepper is None else self._stepper.at_stake:
            self._outboxes.fail(serial, EngineDiedError(f"{problem}, in a step of this session"))
        self._outboxes.fail_all(UnavailableError(problem))

    async def wind_down(self) -> None:
        """Refuses new sessions, waits `grace_s` seconds for those under way, then ends the rest with a status."""
        self._draining = True
        waits = {asyncio.create_task(self._empty.wait()), asyncio.create_task(self.engine.ended())}
        await asyncio.wait(waits, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        self._outboxes.fail_all(UnavailableError("this verifier shuts down"))

    async def close(self) -> None:
        """Ends the streams to drafters, and the engine."""
        self._compiling.close()
        await self.drafters.close()
        await self.engine.close()

    def background(self, store: Store) -> Mapping[str, Work]:
        """Names the tasks that show life to gateways, keep what is learned and look after drafters."""
        own = {"life": self._show_life, "learned": self._keep_learned}
        return own if self._served.own_drafter else {**own, **self.drafters.background(self._pair_all, store)}

    async def _keep_learned(self) -> None:
        assert self._stepper is not None, "tasks begin once the engine is loaded"
        await self._served.learned.keep(self._stepper.learned)

    def _pair_all(self) -> None:
        for session_id, each in self._under_way.items():
            self._pair_anew(session_id, each)

    def _pair_anew(self, session_id: str, session: _UnderWay) -> None:
        """Gives a session another drafter if its own has gone, or its first one."""
        before, address = session.drafter_address, self.drafters.choose(session.methods, session.drafter_address)
        if address == before:
            return
        session.drafter_address = address
        self.drafters.count(before, -1)
        self.drafters.count(address, +1)
        if before:
            self._metrics.fallbacks.labels("drafter_changed").inc()
        if session.serial in self._traces:
            self._traces[session.serial].paired(address)
        with suppress(UnavailableError):
            self.engine.post(Paired(session_id=session_id, serial=session.serial, address=address), always=True)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[CommittedTokens, None]:
        """Runs one session; closing the generator frees it within one step.

        If the session already runs here, the newer epoch takes it over, and the older stream ends.

        Raises:
            InvalidRequestError: The request exceeds a limit of this verifier.
            StaleEpochError: The session runs under the same epoch, or a newer one.
            OverloadedError: Too many sessions are under way.
            UnavailableError: The verifier shuts down, or its engine has died.
        """
        with traced_session(self._tracer, request) as trace:
            self._served.check(request)
            self._admit(request)
            request = trace.hand_on(request)
            with self._running(request, trace) as outbox:
                while True:
                    committed = await outbox.take()
                    if committed.result is not None:
                        trace.ended(committed.result)
                    yield committed
                    if committed.result is not None:
                        return

    async def _compile(self, request: GenerateRequest, mine: _UnderWay) -> None:
        """Compiles the grammar of a session, then begins it; its gateway sees signs of life meanwhile."""
        try:
            if self._served.grammars is None:
                raise InvalidRequestError("grammar", "is not served with this model's tokenizer")
            # What a session has used up may be why it was placed anew.
            alone = bool(request.committed_token_ids)
            compiling = partial(self._served.grammars.compile, request.sampling.grammar, request.tenant, alone=alone)
            grammar = await self._compiling.run(compiling, request.tenant)
            if self._under_way.get(request.session_id) is mine:
                self._begin(request, mine, grammar)
        except PacelineError as error:
            self._outboxes.fail(mine.serial, error)
        except Exception as error:
            logger.exception("a grammar could not be compiled", extra={"session_id": request.session_id})
            self._outboxes.fail(mine.serial, PacelineError(f"grammar: cannot be compiled ({type(error).__name__})"))

    def _begin(self, request: GenerateRequest, mine: _UnderWay, grammar: GrammarState | None = None) -> None:
        self.engine.post(
            Submit(
                request=request,
                serial=mine.serial,
                drafter_address=mine.drafter_address,
                arrived_s=time.monotonic(),
                grammar=grammar,
            )
        )
        mine.begun = True

    def _admit(self, request: GenerateRequest) -> None:
        if self._draining:
            raise UnavailableError("this verifier shuts down")
        if self.num_sessions >= self._max_queue:
            raise OverloadedError(f"{self._max_queue} sessions are under way", retry_after_s=RETRY_AFTER_S)
        known = self._under_way.get(request.session_id)
        if known is not None and known.epoch >= request.epoch:
            raise StaleEpochError(
                f"epoch: session {request.session_id!r} is under way here under epoch {known.epoch}, "
                f"a newer one is needed to take it over, got {request.epoch}"
            )
        # A session that continues here was admitted elsewhere; it is not sent away.
        if not request.committed_token_ids:
            others = [(each.tenant, each.priority) for each in self._under_way.values()]
            ahead = num_ahead(request.tenant, request.priority, others, num_places=self._num_places)
            check_wait(self._queue_clock.wait_s(time.monotonic(), ahead=ahead), request.max_wait_s)

    @contextmanager
    def _running(self, request: GenerateRequest, trace: SessionTrace) -> Iterator[Outbox]:
        serial = next(self._serials)
        self._fence(request)
        outbox = self._outboxes.open(serial, whole=request.whole, offset=len(request.committed_token_ids))
        if trace.recording:
            self._traces[serial] = trace
        mine = self._under_way[request.session_id] = self._taken_in(serial, request)
        trace.paired(mine.drafter_address)
        self.drafters.count(mine.drafter_address, +1)
        self._empty.clear()
        # Counted here, since an engine that hangs reports no steps.
        self._metrics.sessions.under_way.set(self.num_sessions)
        compiling: asyncio.Task[None] | None = None
        try:
            if request.sampling.grammar:
                compiling = asyncio.create_task(self._compile(request, mine))
            else:
                self._begin(request, mine)
            yield outbox
        finally:
            if compiling is not None:
                compiling.cancel()
            self._queue_clock.ended(time.monotonic(), num_waiting=max(0, self.num_sessions - self._num_places))
            self._outboxes.close(serial)
            self._traces.pop(serial, None)
            if self._under_way.get(request.session_id) is mine:
                del self._under_way[request.session_id]
            self.drafters.count(mine.drafter_address, -1)
            self._metrics.sessions.under_way.set(self.num_sessions)
            if not self.num_sessions:
                self._empty.set()
            # If the session ended by itself, the engine has dropped it, and this does nothing.
            with suppress(UnavailableError):
                self.engine.post(Cancel(session_id=request.session_id, serial=serial), always=True)

    def _taken_in(self, serial: int, request: GenerateRequest) -> _UnderWay:
        """Returns a session with its first drafter, or none if it wants no drafts of the tier."""
        wanted = frozenset(request.speculation.methods or self.identity.methods) & frozenset(TIER_METHODS)
        methods = wanted if request.speculation.cap else frozenset()
        return _UnderWay(
            serial=serial,
            epoch=request.epoch,
            tenant=request.tenant,
            priority=request.priority,
            methods=methods,
            drafter_address=self.drafters.choose(methods),
        )

    def _fence(self, request: GenerateRequest) -> None:
        """Ends the stream of an owner that has lost the session; its last tokens are dropped."""
        known = self._under_way.get(request.session_id)
        if known is None:
            return
        self.engine.post(Cancel(session_id=request.session_id, serial=known.serial), always=True)
        error = StaleEpochError(f"session {request.session_id!r} goes on under epoch {request.epoch}")
        self._outboxes.fail(known.serial, error)

    async def _show_life(self) -> None:
        """Sends signs of life for silent sessions; never returns.

        Those that the engine has are alive while it makes progress, the others while they wait for their grammars.
        """
        num_calls = self.engine.num_calls
        while True:
            await asyncio.sleep(LIFE_S)
            works = self.engine.num_calls != num_calls
            self._outboxes.show_life(each.serial for each in self._under_way.values() if works or not each.begun)
            num_calls = self.engine.num_calls

    def _link_changed(self, address: str, draft: ModelIdentity | None) -> None:
        wants_states = draft is not None and draft.draft_method == EAGLE3
        change = LinkChanged(address=address, up=draft is not None, wants_states=wants_states)
        with suppress(UnavailableError):
            self.engine.post(change, always=True)

    async def _drafts_arrived(self, address: str, messages: Sequence[ToVerifier]) -> None:
        arrived = DraftsArrived(address=address, messages=messages, arrived_s=time.monotonic())
        # Drafts that find no room are dropped; the next commit brings new ones.
        with suppress(UnavailableError, OverloadedError):
            await self.engine.post_from(address, arrived, size_of(*messages))

    def _deliver(self, output: DrafterNews) -> None:
        try:
            # Drafters first: they have nothing to do until they get the commit.
            self._tell_drafters(output)
            if isinstance(output, TargetOutput):
                self._hand_on(output)
        except Exception:
            # What did not reach the outboxes is lost; gateways notice the gap and ask again.
            logger.exception("a step could not be handed on")
            for serial, _ in output.committed if isinstance(output, TargetOutput) else ():
                self._outboxes.fail(serial, UnavailableError("tokens of the session could not be handed on"))

    def _tell_drafters(self, news: DrafterNews) -> None:
        for address, to_drafter in news.to_drafters.items():
            self.drafters.say(address, to_drafter)
        for address, error in news.broken_links.items():
            self.drafters.reset(address, str(error))

    def _hand_on(self, output: TargetOutput) -> None:
        report = output.report
        self._num_places = report.num_running if report.num_waiting else self.max_sessions
        for seen in report.traced:
            if seen.serial in self._traces:
                self._traces[seen.serial].saw(seen)
        self._outboxes.deliver(output.committed)
        asyncio.get_running_loop().call_soon(record_output, self._metrics, output)
