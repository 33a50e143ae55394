"""Joins the engine thread, the drafters' streams and the requests under way, in the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from paceline.core.acceptance_rules import Rules
from paceline.core.admission import QueueClock, check_wait, num_ahead
from paceline.core.errors import (
    EngineDiedError,
    InvalidRequestError,
    OverloadedError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.grammar import GrammarState
from paceline.core.messages import DRAFTER, CommittedTokens, GenerateRequest, ModelIdentity, ToVerifier
from paceline.core.params import EAGLE3, TIER_METHODS
from paceline.core.target_events import (
    Cancel,
    DraftsArrived,
    LinkChanged,
    Paired,
    Submit,
    SuspectAnnounced,
    TargetEvent,
    TargetOutput,
)
from paceline.engine.bridge import EngineThread, Stepper
from paceline.engine.grammar import Grammars
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.tracing import OFF, Tracer
from paceline.service.credentials import FleetTls
from paceline.service.learned import FORGOTTEN, Learned, LearnedFile
from paceline.service.supervision import Work
from paceline.store.base import Store
from paceline.store.probe import Probe
from paceline.store.view import RegistryView
from paceline.tier.drafters import Drafters
from paceline.verifier.checks import check_request
from paceline.verifier.metrics import record_output
from paceline.verifier.outbox import Outbox, Outboxes
from paceline.verifier.tracing import SessionTrace, traced_session

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
# Pause between two readings of the registry.
REFRESH_S = 1.0
# Pause between two looks at the drafters of all sessions.
PAIRING_S = 0.1
# Pause between two looks for sessions that have been silent.
LIFE_S = 0.5


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    """A session that runs here: under which epoch, by which methods of the drafter tier, and for which drafter."""

    serial: int
    epoch: int
    priority: int
    methods: frozenset[str]
    drafter_address: str


class TargetStepper(Stepper[TargetEvent, TargetOutput], Protocol):
    """What runs the target model."""

    def learned(self) -> Learned:
        """What a successor may begin with."""
        ...

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Serials of the sessions that a failure now is laid on; read from the event loop once the engine is dead."""
        ...


class TargetHost:
    """Everything of a verifier that lives in the event loop, save the gRPC server.

    Args:
        identity: The target model.
        max_model_len: Most tokens of a session.
        max_queue: Most sessions that wait or run.
        max_num_seqs: Most sessions that run at once.
        methods: Ways to draft that are served.
        own_drafter: What names a drafter inside the engine; empty: drafters of the tier draft.
        rules: Acceptance rules that are served.
        grammars: Compiles the grammars of requests; None: none are served.
        learned: Where it keeps what its engine learns.
        grace_s: Time that sessions get to finish when the verifier stops.
        stream_interval_s: Longest time for which tokens of a session gather while many sessions run.
        make_engine: Builds the engine; called in the engine thread.
        metrics: Where steps are counted.
        zone: Where it runs; empty: not known.
        tls: Certificate to show to drafters; None: plain text.
        tracer: Records spans of sessions, if it does.
    """

    def __init__(
        self,
        *,
        identity: ModelIdentity,
        max_model_len: int,
        max_queue: int,
        max_num_seqs: int,
        methods: Sequence[str],
        own_drafter: str = "",
        rules: Rules,
        grammars: Grammars | None = None,
        learned: LearnedFile = FORGOTTEN,
        grace_s: float,
        stream_interval_s: float,
        make_engine: Callable[[], TargetStepper],
        metrics: VerifierMetrics,
        zone: str = "",
        tls: FleetTls | None = None,
        tracer: Tracer = OFF,
    ) -> None:
        self.identity = identity
        self._max_model_len = max_model_len
        self._max_queue = max_queue
        # Sessions that have places: the engine's bound, or what its pages hold.
        self._num_places = max_num_seqs
        self._max_num_seqs = max_num_seqs
        self._queue_clock = QueueClock()
        self._methods = tuple(methods)
        self._rules = rules
        self._grammars = grammars
        # Of its own, as a grammar may take long and nobody else is to wait for it.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._learned = learned
        self._grace_s = grace_s
        self._own_drafter = own_drafter
        self._metrics = metrics
        self._tls = tls
        self._tracer = tracer
        self.engine: EngineThread[TargetEvent, TargetOutput] = EngineThread(self._make_stepper, self._deliver, "target")
        self.drafters = Drafters(
            identity,
            own=own_drafter,
            on_change=self._link_changed,
            on_messages=self._drafts_arrived,
            metrics=metrics,
            zone=zone,
            tls=tls,
        )
        self._make_engine = make_engine
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
        """Sessions under way."""
        return len(self._outboxes)

    def _make_stepper(self) -> TargetStepper:
        self._stepper = self._make_engine()
        return self._stepper

    def engine_died(self, problem: str) -> None:
        """Ends every session, takes no new one; those whose rows it died with learn that they may have caused it."""
        self._draining = True
        for serial in () if self._stepper is None else self._stepper.at_stake:
            self._outboxes.fail(serial, EngineDiedError(f"{problem}, in a step of this session"))
        self._outboxes.fail_all(UnavailableError(problem))

    async def wind_down(self) -> None:
        """Refuses new sessions, waits `grace_s` seconds for those under way, and ends what is left with a status."""
        self._draining = True
        waits = {asyncio.create_task(self._empty.wait()), asyncio.create_task(self.engine.ended())}
        await asyncio.wait(waits, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        self._outboxes.fail_all(UnavailableError("this verifier shuts down"))

    async def close(self) -> None:
        """Ends streams to drafters and the engine."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await self.drafters.close()
        await self.engine.close()

    def background(self, store: Store) -> Mapping[str, Work]:
        """Names the tasks that keep sessions with drafters that are there, streams to few, and gateways in the know."""
        own = {"life": self._show_life, "learned": self._keep_learned}
        if self._own_drafter:
            return own
        view = RegistryView(store, DRAFTER, answers=Probe(self._tls))
        return own | {
            "registry": partial(view.keep_fresh, REFRESH_S),
            # Apart from the registry, which must not delay what streams tell when it does not answer.
            "pairing": partial(self._keep_paired, view),
            "links": self.drafters.sweep,
        }

    async def _keep_learned(self) -> None:
        assert self._stepper is not None, "tasks begin once the engine stands"
        await self._learned.keep(self._stepper.learned)

    async def _keep_paired(self, view: RegistryView) -> None:
        while True:
            self.drafters.know(view.replicas)
            for session_id, each in self._under_way.items():
                self._pair_anew(session_id, each)
            await asyncio.sleep(PAIRING_S)

    def _pair_anew(self, session_id: str, session: _UnderWay) -> None:
        """Gives a session another drafter if its own is gone, or its first if there was none."""
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
        """Runs one session; leaving early frees it within one step.

        A session that runs here already goes to the newer epoch; its older stream ends.

        Raises:
            InvalidRequestError: The request is beyond a limit of this verifier.
            StaleEpochError: The session runs, or goes on, under an epoch at least as new.
            OverloadedError: Too many sessions.
            UnavailableError: The verifier shuts down or its engine died.
        """
        with traced_session(self._tracer, request) as trace:
            check_request(
                request, self.identity, max_model_len=self._max_model_len, methods=self._methods, rules=self._rules
            )
            grammar = await self._compiled(request.sampling.grammar)
            self._admit(request)
            request = trace.hand_on(request)
            with self._running(request, grammar, trace) as outbox:
                while True:
                    committed = await outbox.take()
                    if committed.result is not None:
                        trace.ended(committed.result)
                    yield committed
                    if committed.result is not None:
                        return
                    if committed.running and request.suspect:
                        self._tell_heard_of(request)

    async def _compiled(self, grammar: str) -> GrammarState | None:
        if not grammar:
            return None
        if self._grammars is None:
            raise InvalidRequestError("grammar", "is not served with this model's tokenizer")
        return await asyncio.wrap_future(self._compiling.submit(self._grammars.compile, grammar))

    def _tell_heard_of(self, request: GenerateRequest) -> None:
        known = self._under_way.get(request.session_id)
        if known is not None:
            with suppress(UnavailableError):
                self.engine.post(SuspectAnnounced(session_id=request.session_id, serial=known.serial), always=True)

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
        # One that goes on here was taken long ago; it is never sent away.
        if not request.committed_token_ids:
            others = [each.priority for each in self._under_way.values()]
            ahead = num_ahead(request.priority, others, num_places=self._num_places)
            check_wait(self._queue_clock.wait_s(time.monotonic(), ahead=ahead), request.max_wait_s)

    @contextmanager
    def _running(self, request: GenerateRequest, grammar: GrammarState | None, trace: SessionTrace) -> Iterator[Outbox]:
        serial = next(self._serials)
        self._fence(request)
        outbox = self._outboxes.open(serial, whole=request.whole, offset=len(request.committed_token_ids))
        if trace.recording:
            self._traces[serial] = trace
        mine = self._under_way[request.session_id] = self._taken_in(serial, request)
        trace.paired(mine.drafter_address)
        self.drafters.count(mine.drafter_address, +1)
        self._empty.clear()
        # Told here and not with a step: an engine that hangs makes none.
        self._metrics.sessions.under_way.set(self.num_sessions)
        try:
            self.engine.post(
                Submit(
                    request=request,
                    serial=serial,
                    drafter_address=mine.drafter_address,
                    arrived_s=time.monotonic(),
                    grammar=grammar,
                )
            )
            yield outbox
        finally:
            self._queue_clock.ended(time.monotonic(), num_waiting=max(0, self.num_sessions - self._num_places))
            self._outboxes.close(serial)
            self._traces.pop(serial, None)
            if self._under_way.get(request.session_id) is mine:
                del self._under_way[request.session_id]
            self.drafters.count(mine.drafter_address, -1)
            self._metrics.sessions.under_way.set(self.num_sessions)
            if not self.num_sessions:
                self._empty.set()
            # A session that ended by itself is gone from the engine already; cancelling it again does nothing.
            with suppress(UnavailableError):
                self.engine.post(Cancel(session_id=request.session_id, serial=serial), always=True)

    def _taken_in(self, serial: int, request: GenerateRequest) -> _UnderWay:
        """A session with its first drafter; one that wants no drafts of the tier gets none."""
        wanted = frozenset(request.speculation.methods or self._methods) & frozenset(TIER_METHODS)
        methods = wanted if request.speculation.cap else frozenset()
        return _UnderWay(
            serial=serial,
            epoch=request.epoch,
            priority=request.priority,
            methods=methods,
            drafter_address=self.drafters.choose(methods),
        )

    def _fence(self, request: GenerateRequest) -> None:
        """Ends the stream of an owner that has lost the session; its last tokens reach nobody."""
        known = self._under_way.get(request.session_id)
        if known is None:
            return
        self.engine.post(Cancel(session_id=request.session_id, serial=known.serial), always=True)
        error = StaleEpochError(f"session {request.session_id!r} goes on under epoch {request.epoch}")
        self._outboxes.fail(known.serial, error)

    async def _show_life(self) -> None:
        """Lets gateways hear of silent sessions while the engine gets things done, for ever."""
        num_calls = self.engine.num_calls
        while True:
            await asyncio.sleep(LIFE_S)
            if self.engine.num_calls != num_calls:
                self._outboxes.show_life()
            num_calls = self.engine.num_calls

    def _link_changed(self, address: str, draft: ModelIdentity | None) -> None:
        wants_states = draft is not None and draft.draft_method == EAGLE3
        change = LinkChanged(address=address, up=draft is not None, wants_states=wants_states)
        with suppress(UnavailableError):
            self.engine.post(change, always=True)

    def _drafts_arrived(self, address: str, messages: Sequence[ToVerifier]) -> None:
        # Drafts that find no place are lost; the next commit brings new ones.
        with suppress(UnavailableError, OverloadedError):
            self.engine.post(DraftsArrived(address=address, messages=messages, arrived_s=time.monotonic()))

    def _deliver(self, output: TargetOutput) -> None:
        try:
            self._hand_on(output)
        except Exception:
            # Whatever did not get into their outboxes is lost: gateways ask again for what they lack.
            logger.exception("a step could not be handed on")
            for serial, _ in output.committed:
                self._outboxes.fail(serial, UnavailableError("tokens of the session could not be handed on"))

    def _hand_on(self, output: TargetOutput) -> None:
        report = output.report
        self._num_places = report.num_running if report.num_waiting else self._max_num_seqs
        for seen in report.traced:
            if seen.serial in self._traces:
                self._traces[seen.serial].saw(seen)
        # Drafters first: they are at rest until they hear of the commit, and clients are not.
        for address, to_drafter in output.to_drafters.items():
            self.drafters.say(address, to_drafter)
        self._outboxes.deliver(output.committed)
        for address, error in output.broken_links.items():
            self.drafters.reset(address, str(error))
        asyncio.get_running_loop().call_soon(record_output, self._metrics, output)
