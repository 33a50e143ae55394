"""Verifiers and drafters of a simulation: the very engines on simulated devices, where time jumps from act to act."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.errors import PacelineError
from paceline.core.messages import (
    CommittedTokens,
    GenerateRequest,
    ModelIdentity,
    SpeculationRecord,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pages import BLOCK_SIZE
from paceline.core.pairing import DrafterCandidate, Pairing
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.core.target_events import (
    DrafterNews,
    DraftsArrived,
    LinkChanged,
    Submit,
    TargetEvent,
    TargetLimits,
    TargetOutput,
)
from paceline.drafting.colocated import LOCAL, ColocatedEngine
from paceline.engine.bridge import Stepper
from paceline.engine.draft_scheduler import DraftEvent, VerifierMessages
from paceline.engine.drafter import DraftEngine, DraftOutput
from paceline.engine.target import TargetEngine
from paceline.simulated.device import Pace
from paceline.simulated.model import SimulatedPair, guesses_of
from paceline.simulated.profile import DeviceFacts, DrafterFacts, Profile
from paceline.simulated.text import TextLaw

# Texts are made of these tokens; the first one of its prompt is a request's number, so that texts differ.
VOCAB_SIZE = 256
LAW = TextLaw(words=np.arange(VOCAB_SIZE), eos_token_id=None, mean_length=0.0)
# Sessions are as long as the load makes them; drafters have enough context for all.
CONTEXT_LEN = 1 << 19
IDENTITY = ModelIdentity(name="simulated", vocab_hash="", vocab_size=VOCAB_SIZE, context_len=CONTEXT_LEN)
# Drafters' devices have other seeds than verifiers'.
OF_DRAFTERS = 1 << 16

_Event = TypeVar("_Event")
_Output = TypeVar("_Output")


@dataclass(slots=True, kw_only=True)
class Request:
    """A request on its way through the fleet, and what became of it.

    Attributes:
        number: Decides its text.
        pieces: When tokens came and how many, `(seconds, tokens)`.
        record: What speculation did for it.
    """

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    record: SpeculationRecord = field(default_factory=SpeculationRecord)

    @property
    def num_received(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def num_steps(self) -> int:
        """Decoding steps: its first token comes of the step that has read the prompt."""
        return max(0, self.record.num_steps - 1)


class EngineAtWork(Generic[_Event, _Output]):
    """Drives an engine as its thread does (`paceline.engine.bridge`).

    Nothing reaches an engine within a step. So the step is computed when it begins, its device only moves the engine's
    own clock on, and what it has done is handed on when it would end.

    Args:
        deliver: Called with every output.

    Attributes:
        stepper: The engine; set it before the first event.
    """

    stepper: Stepper[_Event, _Output]

    def __init__(self, events: Events, deliver: Callable[[_Output], None]) -> None:
        self._events, self._deliver = events, deliver
        self._ahead_s = 0.0
        self._inbox: list[_Event] = []
        self._busy = False
        self._num_waits = 0

    def now_s(self) -> float:
        """The engine's time."""
        return self._events.now_s + self._ahead_s

    def pace(self, facts: DeviceFacts, seed: int, overhead: float = 0.0) -> Pace:
        return Pace(facts, seed=seed, overhead=overhead, clock=self.now_s, sleep=self._sleep)

    def post(self, event: _Event) -> None:
        """Hands the engine an event, once its step has ended."""
        self._inbox.append(event)
        if not self._busy:
            self._drive()

    def _sleep(self, seconds: float) -> None:
        self._ahead_s += seconds

    def _drive(self) -> None:
        inbox, self._inbox, self._busy = self._inbox, [], False
        self._num_waits += 1
        for event in inbox:
            self.stepper.handle(event)
        if not self.stepper.has_work():
            return
        patience_s = self.stepper.patience_s()
        if patience_s > 0.0:
            self._events.after(patience_s, self._wake(self._num_waits))
        else:
            self._step()

    def _wake(self, number: int) -> Act:
        """Goes on after a wait, unless something ended the wait before."""

        def wake() -> None:
            if number == self._num_waits and not self._busy:
                self._drive()

        return wake

    def _step(self) -> None:
        self._busy = True
        early = self.stepper.begin()
        if early is not None:
            self._hand_on(early)
        self._hand_on(self.stepper.step())
        self._events.after(self._ahead_s, self._drive)
        self._ahead_s = 0.0

    def _hand_on(self, output: _Output) -> None:
        self._events.after(self._ahead_s, lambda: self._deliver(output))


class DrafterAtWork:
    """A drafter of the tier.

    Args:
        address: What verifiers know it by.
        seed: Of the luck with step times.
    """

    def __init__(self, address: str, profile: Profile, events: Events, seed: int) -> None:
        self.address = address
        self._events, self._link_s = events, profile.link_s
        self._verifiers: list[VerifierAtWork] = []
        self._num_sessions = 0
        self._engine: EngineAtWork[DraftEvent, DraftOutput] = EngineAtWork(events, self._deliver)
        self._engine.stepper = draft_engine(self._engine, profile, profile.drafter, seed)

    def known(self) -> DrafterCandidate:
        """What verifiers know of it, without delay."""
        return DrafterCandidate(address=self.address, num_sessions=self._num_sessions)

    def count(self, change: int) -> None:
        """Drafts for so many sessions more from now on."""
        self._num_sessions += change

    def send(self, messages: Sequence[ToDrafter], verifier: VerifierAtWork) -> None:
        if verifier not in self._verifiers:
            self._verifiers.append(verifier)
        received = VerifierMessages(link=self._verifiers.index(verifier), messages=messages)
        self._events.after(self._link_s, lambda: self._engine.post(received))

    def _deliver(self, output: DraftOutput) -> None:
        for link, messages in output.to_verifiers.items():
            self._events.after(self._link_s, self._arrival(self._verifiers[link], messages))

    def _arrival(self, verifier: VerifierAtWork, messages: Sequence[ToVerifier]) -> Act:
        return lambda: verifier.receive(self.address, messages)


class VerifierAtWork:
    """A verifier whose sessions have drafters of the tier, one inside it, or none.

    Args:
        colocated: Whether it drafts itself.
        drafters: Those of the tier.
        on_end: Called with every request that has all its tokens.
        policy: Picks what steps verify; None: as verifiers do, from a profile at start-up.
        seed: Of the luck with step times.
    """

    def __init__(
        self,
        profile: Profile,
        events: Events,
        *,
        colocated: bool,
        drafters: Sequence[DrafterAtWork] = (),
        on_end: Callable[[Request], None],
        policy: Goodput | None = None,
        seed: int = 0,
    ) -> None:
        self._events, self._on_end = events, on_end
        self._drafters = {drafter.address: drafter for drafter in drafters}
        self._own = LOCAL if colocated else ""
        self._pairing = Pairing()
        # With the addresses of their drafters, by number.
        self._requests: dict[int, tuple[Request, str]] = {}
        self._engine: EngineAtWork[TargetEvent, DrafterNews] = EngineAtWork(events, self._deliver)
        self.policy = policy or Goodput(
            profile.target.starting_cost(), max_nodes=profile.most_nodes, most_on_loan=math.inf
        )
        self.engine = target_engine(self._engine, profile, self.policy, seed, colocated=colocated)
        self._engine.stepper = self.engine
        if colocated:
            draft = draft_engine(self._engine, profile, profile.colocated, seed)
            self._engine.stepper = ColocatedEngine(self.engine, draft, wants_states=False, clock=self._engine.now_s)
        for address in self._drafters:
            self.engine.handle(LinkChanged(address=address, up=True))

    def submit(self, asked: Request) -> None:
        """A request arrives, and is paired with a drafter if there is one."""
        self._pairing.know(each.known() for each in self._drafters.values())
        address = self._own or self._pairing.choose((DRAFT_MODEL,))
        self._requests[asked.number] = asked, address
        self._count(address, +1)
        request = GenerateRequest(
            session_id=str(asked.number),
            epoch=1,
            prompt_token_ids=(asked.number % VOCAB_SIZE,) + (0,) * (asked.num_prompt_tokens - 1),
            sampling=SamplingParams(max_tokens=asked.num_output_tokens, temperature=0.0, ignore_eos=True),
            speculation=SpeculationParams(enabled=bool(address)),
            # None has the pages of another.
            cache_salt=str(asked.number),
        )
        self._engine.post(
            Submit(request=request, serial=asked.number, drafter_address=address, arrived_s=self._events.now_s)
        )

    def receive(self, address: str, messages: Sequence[ToVerifier]) -> None:
        """Messages of a drafter's step arrive."""
        self._engine.post(DraftsArrived(address=address, messages=messages, arrived_s=self._events.now_s))

    def _deliver(self, output: DrafterNews) -> None:
        for address, messages in output.to_drafters.items():
            self._drafters[address].send(messages, self)
        for serial, committed in output.committed if isinstance(output, TargetOutput) else ():
            self._hand_on(serial, committed)

    def _hand_on(self, serial: int, committed: CommittedTokens | PacelineError) -> None:
        if isinstance(committed, PacelineError):
            raise committed
        asked, address = self._requests[serial]
        if committed.token_ids:
            asked.pieces.append((self._events.now_s, len(committed.token_ids)))
        if committed.speculation is not None:
            asked.record = committed.speculation
        if committed.result is not None:
            del self._requests[serial]
            self._count(address, -1)
            self._on_end(asked)

    def _count(self, address: str, change: int) -> None:
        if address in self._drafters:
            self._pairing.count(address, change)
            self._drafters[address].count(change)


def _pair(profile: Profile) -> SimulatedPair:
    return SimulatedPair(law=LAW, vocab_size=VOCAB_SIZE, guesses=guesses_of(profile))


def target_engine(
    at_work: EngineAtWork[TargetEvent, DrafterNews], profile: Profile, policy: Goodput, seed: int, *, colocated: bool
) -> TargetEngine:
    """A verifier's engine on the profile's device."""
    facts = profile.target
    # A co-located drafter's time is its own, not a share of the verifier's.
    pace = at_work.pace(facts, seed, overhead=0.0 if colocated else profile.drafting_overhead)
    return TargetEngine(
        decoder=_pair(profile).target(pace),
        identity=IDENTITY,
        num_blocks=facts.kv_tokens // BLOCK_SIZE,
        limits=TargetLimits(max_num_seqs=facts.max_sessions, max_num_batched_tokens=facts.max_rows),
        policy=policy,
        clock=at_work.now_s,
        use_threads=pace.beside_drafters,
    )


def draft_engine(
    at_work: EngineAtWork[_Event, _Output], profile: Profile, facts: DrafterFacts, seed: int
) -> DraftEngine:
    """A drafter's engine on a device."""
    pace = at_work.pace(facts, seed + OF_DRAFTERS)
    return _pair(profile).draft_engine(facts, pace, IDENTITY, num_blocks=facts.kv_tokens // BLOCK_SIZE)


Act = Callable[[], None]


class Events:
    """Acts in the order of their times; of equal times in the order they were planned in."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Act]] = []
        self._count = 0

    def after(self, delay_s: float, act: Act) -> None:
        """Lets something happen after a delay."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, act))

    def run(self, until_s: float = math.inf) -> None:
        """Lets everything happen until nothing is left, or the time has come to stop."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
