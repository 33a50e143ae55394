"""Verifiers and drafters of a simulation: the real engines on simulated devices, in an event loop whose clock jumps."""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.messages import (
    SIMULATED,
    GenerateRequest,
    ModelIdentity,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import (
    DrafterNews,
    DraftsArrived,
    LinkChanged,
    SpeculationTally,
    Submit,
    TargetEvent,
    TargetOutput,
)
from paceline.engine.draft_scheduler import DraftEvent, VerifierMessages
from paceline.engine.drafter import DraftEngine, DraftOutput
from paceline.engine.loop import Device, EngineLoop
from paceline.engine.rehearsing import RehearsalClient
from paceline.engine.target import LOCAL, TargetEngine
from paceline.simulated.device import Pace, SimulatedDraft, SimulatedTarget
from paceline.simulated.model import draft_engine
from paceline.simulated.profile import DeviceFacts, DrafterFacts, Profile

# Texts are made of these tokens; the first one of its prompt is a request's number, so that texts differ.
VOCAB_SIZE = 256
WORDS = np.arange(VOCAB_SIZE)
# Sessions are as long as the load makes them; drafters have enough context for all.
CONTEXT_LEN = 1 << 19
IDENTITY = ModelIdentity(
    name="simulated", vocab_hash="", vocab_size=VOCAB_SIZE, context_len=CONTEXT_LEN, arithmetic=SIMULATED
)
# Drafters' devices have other seeds than verifiers'; and no request has such a number.
OF_DRAFTERS, OF_REHEARSALS = 1 << 16, 1 << 30
DRAFTER = "drafter"

_Messages = TypeVar("_Messages")
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class _Clock(selectors.SelectSelector):
    """Jumps for as long as it may wait, and sees no file."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that will never happen")
        self.now_s += max(0.0, timeout)
        return []


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop that waits for nothing: its clock jumps to the next event."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._clock.now_s


def simulate(main: Callable[[JumpingLoop], Coroutine[Any, Any, _Result]]) -> _Result:
    """Runs a simulation to its end."""
    loop = JumpingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))


@dataclass(slots=True)
class Request:
    """A request on its way through the fleet, and what became of it.

    Attributes:
        number: Decides its text.
        pieces: When tokens came and how many, `(seconds, tokens)`.
        tally: Its speculation counts.
    """

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    tally: SpeculationTally = field(default_factory=SpeculationTally)

    @property
    def num_received(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def num_steps(self) -> int:
        """Decoding steps: its first token comes of the step that has read the prompt."""
        return max(0, self.tally.num_steps - 1)


class DeviceAtWork(Device):
    """Makes calls at once, on a clock of its own that moves on as they sleep; they come back at that time."""

    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__("simulated")
        self._loop, self._ahead_s = loop, 0.0

    def start(self) -> None:
        """There is no thread."""

    def now_s(self) -> float:
        return self._loop.time() + self._ahead_s

    def pace(self, facts: DeviceFacts, seed: int, overhead: float = 0.0) -> Pace:
        return Pace(facts, seed=seed, overhead=overhead, clock=self.now_s, sleep=self._sleep)

    async def run(self, call: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        result = call(*args, **kwargs)
        taken_s, self._ahead_s = self._ahead_s, 0.0
        await asyncio.sleep(taken_s)
        return result

    def _sleep(self, seconds: float) -> None:
        self._ahead_s += seconds


async def _run(engine: EngineLoop[Any, Any]) -> None:
    await engine.start()
    await engine.ended()


class Link(Generic[_Messages]):
    """A direction of a stream between a verifier and a drafter: messages arrive later, in their order."""

    def __init__(self, loop: JumpingLoop, delay_s: float, receive: Callable[[_Messages], None]) -> None:
        self._loop, self._delay_s, self._receive = loop, delay_s, receive
        self._under_way: deque[_Messages] = deque()

    def send(self, messages: _Messages) -> None:
        self._under_way.append(messages)
        self._loop.call_later(self._delay_s, lambda: self._receive(self._under_way.popleft()))


class DrafterAtWork:
    """A drafter of the tier; `seed` is of the luck with step times, and None a device whose code costs nothing.

    Attributes:
        device_s: Time of its device by verifier, in the order of `connect`.
    """

    def __init__(self, profile: Profile, loop: JumpingLoop, seed: int, device: DeviceAtWork | None = None) -> None:
        self._loop, self._link_s = loop, profile.link_s
        self._verifiers: list[Link[Sequence[ToVerifier]]] = []
        self.device_s = Counter[int]()
        device = device or DeviceAtWork(loop)
        engine = _drafter(device, profile, profile.drafter, seed)
        self._engine: EngineLoop[DraftEvent, DraftOutput] = EngineLoop(lambda: engine, self._deliver, device)
        self.run = partial(_run, self._engine)

    def connect(self, receive: Callable[[Sequence[ToVerifier]], None]) -> Link[Sequence[ToDrafter]]:
        """Opens a verifier's stream, of which it gets the drafter's messages."""
        number = len(self._verifiers)
        self._verifiers.append(Link(self._loop, self._link_s, receive))
        return Link(
            self._loop,
            self._link_s,
            lambda messages: self._engine.post(VerifierMessages(link=number, messages=messages)),
        )

    def _deliver(self, output: DraftOutput) -> None:
        self.device_s.update(output.device_s)
        for number, messages in output.to_verifiers.items():
            self._verifiers[number].send(messages)


class VerifierAtWork:
    """A verifier whose sessions have the drafter of the tier, one inside it, or none.

    Args:
        colocated: Whether it drafts itself.
        device: Where its engine computes; None: on one whose code costs nothing.
        drafter: The one of the tier.
        policy: Picks what steps verify; None: as verifiers do, from a profile at start-up.
        seed: Seed of random step times.
    """

    def __init__(
        self,
        profile: Profile,
        loop: JumpingLoop,
        *,
        colocated: bool,
        device: DeviceAtWork | None = None,
        drafter: DrafterAtWork | None = None,
        policy: Goodput | None = None,
        seed: int = 0,
    ) -> None:
        self._loop = loop
        self._address = LOCAL if colocated else DRAFTER if drafter is not None else ""
        self._link = None if drafter is None else drafter.connect(self._receive)
        # By number, with what learns of their ends.
        self._requests: dict[int, tuple[Request, asyncio.Future[None]]] = {}
        self.policy = policy or Goodput(
            profile.target.starting_cost(), max_nodes=profile.most_nodes, max_eager_batch=math.inf
        )
        device = device or DeviceAtWork(loop)
        self.engine = _target(device, profile, self.policy, seed, colocated=colocated)
        if drafter is not None:
            self.engine.handle(LinkChanged(address=DRAFTER, up=True))
        if colocated:
            self.engine.draft_inside(_drafter(device, profile, profile.colocated, seed))
        self._engine: EngineLoop[TargetEvent, DrafterNews] = EngineLoop(lambda: self.engine, self._deliver, device)
        self._rehearsal = RehearsalClient(
            IDENTITY,
            max_sessions=profile.target.max_sessions,
            numbers=itertools.count(OF_REHEARSALS),
            post=self._engine.post,
            busy=lambda: bool(self._requests),
            drafter=self._address,
        )
        self.run = partial(_run, self._engine)

    @property
    def num_sessions(self) -> int:
        """Requests under way."""
        return len(self._requests)

    async def rehearse(self) -> None:
        """Finds out what drafting is worth at each load, as verifiers do while nobody waits."""
        await self._rehearsal.run(IDENTITY.name)

    async def serve(self, asked: Request) -> None:
        """Serves a request to its end, with a drafter if there is one.

        Raises:
            PacelineError: It failed.
        """
        request = GenerateRequest(
            session_id=str(asked.number),
            epoch=1,
            prompt_token_ids=(asked.number % VOCAB_SIZE,) + (0,) * (asked.num_prompt_tokens - 1),
            sampling=SamplingParams(max_tokens=asked.num_output_tokens, temperature=0.0, ignore_eos=True),
            speculation=SpeculationParams(enabled=bool(self._address)),
            # None has the pages of another.
            cache_salt=str(asked.number),
        )
        ended = self._loop.create_future()
        self._requests[asked.number] = asked, ended
        self._rehearsal.interrupt()
        self._engine.post(
            Submit(
                request=request,
                number=asked.number,
                drafter_address=self._address,
                arrived_s=self._loop.time(),
                tally=asked.tally,
            )
        )
        try:
            await ended
        finally:
            del self._requests[asked.number]

    def _receive(self, messages: Sequence[ToVerifier]) -> None:
        self._engine.post(DraftsArrived(address=DRAFTER, messages=messages, arrived_s=self._loop.time()))

    def _deliver(self, output: DrafterNews) -> None:
        if self._link is not None and (messages := output.to_drafters.get(DRAFTER)):
            self._link.send(messages)
        if not isinstance(output, TargetOutput) or self._rehearsal.takes(output):
            return
        for number, error in output.commit.errors.items():
            self._requests[number][1].set_exception(error)
        for number, _, token_ids, _ in output.commit:
            self._requests[number][0].pieces.append((self._loop.time(), len(token_ids)))
        for number, event in output.commit.events.items():
            if event.result is not None:
                self._requests[number][1].set_result(None)


def _target(device: DeviceAtWork, profile: Profile, policy: Goodput, seed: int, *, colocated: bool) -> TargetEngine:
    facts = profile.target
    # A co-located drafter's time is its own, not a share of the verifier's.
    pace = device.pace(facts, seed, overhead=0.0 if colocated else profile.drafting_overhead)
    return TargetEngine(
        decoder=SimulatedTarget(WORDS, pace, VOCAB_SIZE),
        identity=IDENTITY,
        num_blocks=facts.kv_tokens // BLOCK_SIZE,
        limits=facts.target_limits,
        policy=policy,
        clock=device.now_s,
        use_threads=pace.beside_drafters,
    )


def _drafter(device: DeviceAtWork, profile: Profile, facts: DrafterFacts, seed: int) -> DraftEngine:
    pace = device.pace(facts, seed + OF_DRAFTERS)
    draft = SimulatedDraft(WORDS, pace, VOCAB_SIZE, profile.acceptance)
    return draft_engine(draft, facts, pace, IDENTITY, num_blocks=facts.kv_tokens // BLOCK_SIZE)
