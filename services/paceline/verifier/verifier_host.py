"""Joins the engine, the drafters' streams and the requests under way, in the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
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
from paceline.core.messages import GenerateRequest, ModelIdentity, ToVerifier
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
from paceline.engine.grammar import NICENESS
from paceline.engine.loop import SLICE_S, Device, EngineLoop, Stepper
from paceline.engine.rehearsing import RehearsalClient
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.tracing import OFF, Tracer
from paceline.rpc.v1 import verifier_pb2
from paceline.service.credentials import FleetTls
from paceline.service.fair_shares import FairThreads
from paceline.service.learned import Learned
from paceline.service.supervision import Work
from paceline.store.base import Store
from paceline.tier.drafters import Drafters
from paceline.verifier.commit_log import GatewayLog, Gathering, SessionLog
from paceline.verifier.config import BEFORE_READY, NEVER
from paceline.verifier.rehearsing import READY_S, Rehearser
from paceline.verifier.served import NUM_FULL_STEPS, ServedEngine, TargetStepper
from paceline.verifier.tracing import SessionTrace, traced_session
from paceline.wire import LogPart, log_to_pb, size_of
from paceline.wire.sessions import Start

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
# Sessions whose grammars wait to be compiled, and for how long at most.
LONGEST_WAIT_S = 60.0
# Pause between two looks for sessions that have been silent.
LIFE_S = 0.5
UNREAD = "the gateway does not read its log"


@dataclass(slots=True, kw_only=True, eq=False)
class _ActiveSession:
    """A session that runs here; `methods` are those of the drafter tier.

    `begun` is False while `compiling` its grammar. `closing` ends its trace.
    """

    number: int
    request: GenerateRequest
    log: SessionLog
    methods: frozenset[str]
    drafter_address: str
    trace: SessionTrace
    closing: ExitStack
    begun: bool = False
    compiling: asyncio.Task[None] | None = None


# A session's number, its generated tokens before these (None: any number), the tokens, and their origins.
_Tokens = tuple[int, int | None, Sequence[int], bytes | bytearray]
# Contents of a gateway's message: sessions that it wants to be run, and the numbers of those that it leaves.
Asked = tuple[Sequence[Start], Sequence[int]]


class TargetHost:
    """Everything of a verifier that runs in the event loop, except the gRPC server.

    Args:
        served: The engine, and what is promised with it.
        max_queue: Most sessions that wait or run.
        grace_s: Time that sessions get to finish when the verifier stops.
        stream_interval_s: Longest time for which tokens of a session gather while many sessions run.
        stall_s: Least time inside one step after which the engine counts as hung.
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
        stall_s: float,
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
        self._compiling = FairThreads(1, "grammars being compiled", longest_wait_s=LONGEST_WAIT_S, niceness=NICENESS)
        self._grace_s = grace_s
        self._stall_s = stall_s
        self._metrics = metrics
        self._tracer = tracer
        self.engine: EngineLoop[TargetEvent, DrafterNews] = EngineLoop(
            self._make_stepper, self._deliver, Device("target")
        )
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
        # By number: an id may come back while outputs of its cancelled namesake are under way.
        self._sessions: dict[int, _ActiveSession] = {}
        # Of those the one of each id: a session is fenced off before another of its id is added.
        self._by_id: dict[str, _ActiveSession] = {}
        self._gateways: set[GatewayLog] = set()
        self._gathering = Gathering(stream_interval_s, lambda: [each.log for each in self._sessions.values()])
        self._numbers = itertools.count(1)
        self._rehearsal = RehearsalClient(
            self.identity,
            max_sessions=served.max_num_seqs,
            numbers=self._numbers,
            post=self._post,
            busy=lambda: bool(self._sessions),
            drafter=served.own_drafter,
        )
        self._rehearser = Rehearser(served, self._rehearsal, post=self._post, learned=self._learned_now)
        self._draining = False
        # Why it takes no streams any more.
        self._over: PacelineError | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def stall_s(self) -> float:
        """Time inside one step after which the engine counts as hung; longer where steps have proved to be slow."""
        return (
            self._stall_s if self._stepper is None else max(self._stall_s, NUM_FULL_STEPS * self._stepper.full_step_s)
        )

    def _make_stepper(self) -> Stepper[TargetEvent, DrafterNews]:
        self._stepper = self._served.make()
        return self._stepper

    def announced_at(self, address: str) -> None:
        """Metrics, ours and drafters', have the address by which others know this verifier."""
        self.drafters.verifier = address
        self._metrics.tell_address(address)

    async def prepared(self) -> None:
        """Returns once a rehearsal that readiness waits for is over, or has taken too long."""
        if self._served.rehearsal == BEFORE_READY:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._rehearser.done.wait(), READY_S)

    def engine_died(self, problem: str) -> None:
        """Ends every session and takes no new one; those of the last step end as its possible cause."""
        self._draining = True
        for number in () if self._stepper is None else self._stepper.at_stake:
            if number in self._sessions:
                self._end(self._sessions[number], EngineDiedError(f"{problem}, in a step of this session"))
        self._end_all(UnavailableError(problem))

    async def wind_down(self) -> None:
        """Refuses new sessions, waits `grace_s` seconds for those under way, then ends the rest with a status."""
        self._draining = True
        waits = {asyncio.create_task(self._empty.wait()), asyncio.create_task(self.engine.ended())}
        await asyncio.wait(waits, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        self._end_all(UnavailableError("this verifier shuts down"))

    def _end_all(self, error: PacelineError) -> None:
        """Ends every session, and every stream once it has sent that."""
        self._over = error
        for session in [*self._sessions.values()]:
            self._end(session, error)
        for gateway in self._gateways:
            gateway.close()

    async def close(self) -> None:
        """Ends the streams to drafters, and the engine."""
        self._compiling.close()
        await self.drafters.close()
        await self.engine.close()

    def background(self, store: Store) -> Mapping[str, Work]:
        """Names the tasks that show life to gateways, keep what is learned and look after drafters."""
        own: dict[str, Work] = {"life": self._show_life, "learned": self._keep_learned}
        if self._served.rehearsal != NEVER:
            own["rehearsal"] = partial(self._rehearser.run, store)
            if self._served.helper is not None:
                own["helper"] = partial(self._served.helper.run, self._rehearser.linked)
        return own if self._served.own_drafter else {**own, **self.drafters.background(self._pair_all, store)}

    async def _keep_learned(self) -> None:
        await self._served.learned.keep(self._learned)

    def _learned(self) -> Learned:
        assert self._stepper is not None, "tasks begin once the engine is loaded"
        return self._stepper.learned()

    async def _learned_now(self) -> Learned:
        helper = self._served.helper
        return self._learned() if helper is None else await helper.learned()

    def _post(self, event: TargetEvent) -> None:
        """Hands the engine an event; one that has ended needs none."""
        with suppress(UnavailableError):
            self.engine.post(event)

    def _pair_all(self) -> None:
        for each in self._sessions.values():
            self._pair_anew(each)

    def _pair_anew(self, session: _ActiveSession) -> None:
        """Gives a session another drafter if its own has gone, or its first one."""
        before, address = session.drafter_address, self.drafters.choose(session.methods, session.drafter_address)
        if address == before:
            return
        session.drafter_address = address
        self.drafters.count(before, -1)
        self.drafters.count(address, +1)
        if before:
            self._metrics.fallbacks.labels("drafter_changed").inc()
        session.trace.paired(address, self.drafters.model_of(address))
        self._post(Paired(number=session.number, address=address))

    async def converse(self, asked: AsyncIterator[Asked]) -> AsyncGenerator[verifier_pb2.VerifyResponse, None]:
        """A gateway's stream: it starts sessions and leaves them, and receives their outcomes.

        Sessions end with it, within one step. If a session already runs here, the newer epoch takes it over, and the
        older one ends with an error.

        Raises:
            RemoteProtocolError: The gateway broke the protocol.
            UnavailableError: The verifier shuts down, its engine has died, or the gateway does not read.
        """
        if self._over is not None:
            raise self._over
        gateway = GatewayLog()
        self._gateways.add(gateway)
        reader = asyncio.create_task(self._read(gateway, asked))
        try:
            while (part := await gateway.take()) is not None:
                yield self._encoded(gateway, part)
        finally:
            reader.cancel()
            self._cut_off(gateway)
            self._gateways.remove(gateway)

    def _encoded(self, gateway: GatewayLog, part: LogPart) -> verifier_pb2.VerifyResponse:
        """A gateway's next message; a session whose message cannot be encoded ends alone."""
        try:
            return log_to_pb(part)
        except Exception:
            logger.exception("a message to a gateway could not be encoded")
        fit = LogPart(taken=part.taken, alive=part.alive, step_s=part.step_s)
        for number, alone in part.commit.by_session():
            try:
                log_to_pb(LogPart(commit=alone))
            except Exception as error:  # noqa: BLE001 - it was logged with the message
                if (session := self._session_of(gateway, number)) is not None:
                    self._forget(session, asyncio.CancelledError())
                fit.commit.errors[number] = _internal(error)
            else:
                fit.commit.extend(alone)
        return log_to_pb(fit)

    def _session_of(self, gateway: GatewayLog, number: int) -> _ActiveSession | None:
        """A session by its gateway's number."""
        return self._sessions.get(gateway.sessions.get(number, 0))

    async def _read(self, gateway: GatewayLog, asked: AsyncIterator[Asked]) -> None:
        try:
            async for starts, leaves in asked:
                if gateway.closed:
                    return
                begun_s = time.monotonic()
                for number, request in starts:
                    if time.monotonic() - begun_s > SLICE_S:
                        # Each may have a long prompt.
                        await asyncio.sleep(0)
                        begun_s = time.monotonic()
                    if gateway.closed:
                        return  # type: ignore[unreachable]  # while others had their turn
                    gateway.accept(number)
                    # Its trace is named in its own log lines alone.
                    copy_context().run(self._start, gateway, number, request)
                for number in leaves:
                    self._leave(gateway, number)
                if gateway.is_full:
                    self._cut_off(gateway, UnavailableError(UNREAD))
            gateway.close()
        except PacelineError as error:
            gateway.close(error)
        except Exception as error:
            logger.exception("reading a gateway's stream failed")
            gateway.close(UnavailableError(f"the stream cannot be read ({type(error).__name__})"))

    def _cut_off(self, gateway: GatewayLog, error: PacelineError | None = None) -> None:
        """Frees all sessions of a gateway that has left, or that does not read."""
        for number in [*gateway.sessions.values()]:
            self._forget(self._sessions[number], asyncio.CancelledError())
        if error is not None:
            gateway.close(error)

    def _start(self, gateway: GatewayLog, number: int, request: GenerateRequest | InvalidRequestError) -> None:
        """Begins a session; on failure sends the error in its place."""
        try:
            if isinstance(request, InvalidRequestError):
                raise request
            self._add(gateway, number, request)
        except PacelineError as error:
            self._refuse(gateway, number, error)
        except Exception as error:
            logger.exception("a session could not be started")
            self._refuse(gateway, number, _internal(error))

    def _refuse(self, gateway: GatewayLog, number: int, error: PacelineError) -> None:
        known = self._session_of(gateway, number)
        if known is None:
            gateway.end(number, error)
        else:
            self._end(known, error)

    def _add(self, gateway: GatewayLog, number: int, request: GenerateRequest) -> None:
        with ExitStack() as closing:
            trace = closing.enter_context(traced_session(self._tracer, request))
            self._served.check(request)
            self._admit(request)
            request = trace.hand_on(request)
            self._fence(request)
            methods = self._methods(request)
            mine = _ActiveSession(
                number=next(self._numbers),
                request=request,
                log=SessionLog(
                    gateway,
                    number,
                    whole=request.whole,
                    offset=len(request.committed_token_ids),
                    now_s=asyncio.get_running_loop().time(),
                ),
                methods=methods,
                drafter_address=self.drafters.choose(methods),
                trace=trace,
                closing=closing.pop_all(),
            )
        self._rehearsal.interrupt()
        self._sessions[mine.number] = self._by_id[request.session_id] = mine
        gateway.sessions[number] = mine.number
        self.drafters.count(mine.drafter_address, +1)
        trace.paired(mine.drafter_address, self.drafters.model_of(mine.drafter_address))
        self._empty.clear()
        # Counted here, since an engine that hangs reports no steps.
        self._metrics.under_way.set(self.num_sessions)
        gateway.taken(number)
        if request.sampling.grammar:
            mine.compiling = asyncio.create_task(self._compile(mine))
        else:
            self._begin(mine)

    def _methods(self, request: GenerateRequest) -> frozenset[str]:
        """Tier methods by which a session may be drafted."""
        wanted = frozenset(request.speculation.methods or self.identity.methods) & frozenset(TIER_METHODS)
        return wanted if request.speculation.cap else frozenset()

    def _leave(self, gateway: GatewayLog, number: int) -> None:
        """Frees a session that its gateway does not want any more, if it still runs."""
        session = self._session_of(gateway, number)
        if session is not None:
            session.log.leave()
            self._forget(session, asyncio.CancelledError())

    def _end(self, session: _ActiveSession, error: PacelineError) -> None:
        session.log.fail(error)
        self._forget(session, error)

    def _forget(self, session: _ActiveSession, error: BaseException | None = None) -> None:
        """A session is over; None: the engine has ended it with a result."""
        log = session.log
        if session.compiling is not None and session.compiling is not asyncio.current_task():
            session.compiling.cancel()
        self._queue_clock.ended(time.monotonic(), num_waiting=max(0, self.num_sessions - self._num_places))
        del self._sessions[session.number], self._by_id[session.request.session_id], log.gateway.sessions[log.number]
        self.drafters.count(session.drafter_address, -1)
        self._metrics.under_way.set(self.num_sessions)
        if not self.num_sessions:
            self._empty.set()
        if error is not None:
            self._withdraw(session.number)
        session.closing.__exit__(type(error) if error else None, error, None)

    def _withdraw(self, number: int) -> None:
        """Withdraws a session's events, so that the queue during a long step stays bounded by the sessions."""
        withdrawn = self.engine.withdraw(lambda event: isinstance(event, Submit | Paired) and event.number == number)
        if not any(isinstance(event, Submit) for event in withdrawn):
            # If the engine has ended it, this does nothing.
            self._post(Cancel(number=number))

    async def _compile(self, mine: _ActiveSession) -> None:
        """Compiles the grammar of a session, then begins it; its gateway sees signs of life meanwhile."""
        request = mine.request
        try:
            if self._served.grammars is None:
                raise InvalidRequestError("grammar", "is not served with this model's tokenizer")
            # The session may have been placed anew because its lexer was used up.
            alone = bool(request.committed_token_ids)
            compiling = partial(self._served.grammars.compile, request.sampling.grammar, request.tenant, alone=alone)
            grammar = await self._compiling.run(compiling, request.tenant)
            self._begin(mine, grammar)
        except PacelineError as error:
            self._end(mine, error)
        except Exception as error:
            logger.exception("a grammar could not be compiled", extra={"session_id": request.session_id})
            self._end(mine, PacelineError(f"grammar: cannot be compiled ({type(error).__name__})"))

    def _begin(self, mine: _ActiveSession, grammar: GrammarState | None = None) -> None:
        self.engine.post(
            Submit(
                request=mine.request,
                number=mine.number,
                drafter_address=mine.drafter_address,
                arrived_s=time.monotonic(),
                grammar=grammar,
                tally=mine.log.tally,
            )
        )
        mine.begun = True

    def _admit(self, request: GenerateRequest) -> None:
        if self._draining:
            raise UnavailableError("this verifier shuts down")
        if self.num_sessions >= self._max_queue:
            raise OverloadedError(f"{self._max_queue} sessions are under way", retry_after_s=RETRY_AFTER_S)
        known = self._by_id.get(request.session_id)
        if known is not None and known.request.epoch >= request.epoch:
            raise StaleEpochError(
                f"epoch: session {request.session_id!r} is under way here under epoch {known.request.epoch}, "
                f"a newer one is needed to take it over, got {request.epoch}"
            )
        # A session that continues here was admitted elsewhere; it is not sent away.
        if not request.committed_token_ids:
            others = [(each.request.tenant, each.request.priority) for each in self._sessions.values()]
            ahead = num_ahead(request.tenant, request.priority, others, num_places=self._num_places)
            check_wait(self._queue_clock.wait_s(time.monotonic(), ahead=ahead), request.max_wait_s)

    def _fence(self, request: GenerateRequest) -> None:
        """Ends a session of an owner that has lost it; what was committed of it goes out before the error."""
        known = self._by_id.get(request.session_id)
        if known is not None:
            self._end(known, StaleEpochError(f"session {request.session_id!r} goes on under epoch {request.epoch}"))

    async def _show_life(self) -> None:
        """Sends signs of life to silent gateways; never returns.

        The engine is alive while it makes progress, or has no session: those that wait for their grammars wait for it.
        In a long step it is alive until it counts as hung, so that to a gateway silence means that nobody is there.
        """
        device, loop = self.engine.device, asyncio.get_running_loop()
        num_calls = device.num_calls
        while True:
            await asyncio.sleep(LIFE_S)
            step_s = 0.0 if device.num_calls != num_calls else device.call_s(time.monotonic())
            works = device.num_calls != num_calls or 0.0 < step_s < self.stall_s
            num_calls = device.num_calls
            if works or not any(each.begun for each in self._sessions.values()):
                for gateway in self._gateways:
                    if gateway.sessions:
                        gateway.show_life(loop.time(), step_s)

    def _link_changed(self, address: str, draft: ModelIdentity | None) -> None:
        wants_states = draft is not None and draft.draft_method == EAGLE3
        if draft is not None:
            self._rehearser.linked(draft.weights_hash)
        self._rehearsal.linked(address, up=draft is not None)
        name = "" if draft is None else draft.name
        self._post(LinkChanged(address=address, up=draft is not None, wants_states=wants_states, draft_model=name))

    async def _drafts_arrived(self, address: str, messages: Sequence[ToVerifier]) -> None:
        arrived = DraftsArrived(address=address, messages=messages, arrived_s=time.monotonic())
        with suppress(UnavailableError):
            await self.engine.post_from(address, arrived, size_of(*messages))

    def _deliver(self, output: DrafterNews) -> None:
        """Sends drafters their commits at once, as they have nothing to do until then; clients, beside the device."""
        for address, to_drafter in output.to_drafters.items():
            try:
                self.drafters.say(address, to_drafter)
            except Exception:
                # A new stream opens its sessions anew.
                logger.exception("a drafter could not be told of a step")
                self.drafters.reset(address, "a step could not be told")
        for address, error in output.broken_links.items():
            self.drafters.reset(address, str(error))
        if isinstance(output, TargetOutput) and not self._rehearsal.takes(output):
            self.engine.device.meanwhile(partial(self._tell_clients, output))

    def _tell_clients(self, output: TargetOutput) -> None:
        try:
            self._hand_on(output)
        except Exception:
            # Tokens that did not reach the logs are lost; gateways place these sessions anew.
            logger.exception("a step could not be handed on")
            for number in output.commit.sessions & self._sessions.keys():
                self._end(self._sessions[number], UnavailableError("tokens of the session could not be handed on"))

    def _hand_on(self, output: TargetOutput) -> None:
        report, commit, sessions = output.report, output.commit, self._sessions
        self._num_places = report.num_running if report.num_waiting else self.max_sessions
        for seen in report.traced:
            if seen.number in sessions:
                sessions[seen.number].trace.saw(seen)
        now_s = asyncio.get_running_loop().time()
        alone: Iterator[_Tokens] = ((number, None, (), b"") for number in commit.events.keys() - commit.numbers)
        tokens: Iterator[_Tokens] = itertools.chain(commit, alone)
        for number, offset, token_ids, origins in tokens:
            session, event = sessions.get(number), commit.events.get(number)
            if session is None:
                # It has left meanwhile.
                continue
            try:
                session.log.put(offset, token_ids, origins, event, now_s)
            except UnavailableError as error:
                self._end(session, error)
            except asyncio.QueueFull:
                self._cut_off(session.log.gateway, UnavailableError(UNREAD))
            else:
                if event is not None and event.result is not None:
                    session.trace.ended(event.result)
                    self._forget(session)
        for number in commit.errors.keys() & sessions.keys():
            self._end(sessions[number], commit.errors[number])
        self._gathering.after_step()
        asyncio.get_running_loop().call_soon(self._metrics.add, output)


def _internal(error: Exception) -> PacelineError:
    return PacelineError(f"internal error ({type(error).__name__}); the verifier's log has it")
