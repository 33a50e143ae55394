"""A fleet of simulated verifiers behind gateways: discrete events, no sockets, no real time.

A verifier computes prompts one after the other, in order of arrival, and only what its prefix cache lacks; decoding
sessions go on beside it at a fixed pace. Its cache holds a fixed number of blocks and forgets the least recently used.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.conversations import TRACE_BLOCK, Request, full_blocks
from loadtest.routing_policies import MODEL, Policy
from paceline.core.messages import GATEWAY, VERIFIER, ModelIdentity
from paceline.store.base import Replica

# A model of about 8 billion weights on a large GPU.
PREFILL_TOKENS_PER_S = 10_000.0
TIME_PER_OUTPUT_TOKEN_S = 0.03
MAX_SESSIONS = 64
# Verifiers announce their load so often; gateways read it half a beat later.
HEARTBEAT_S = 1.0


class PrefixCache:
    """The full blocks that a verifier has, the least recently used first.

    Args:
        num_blocks: Its size.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_leading(self, block_ids: Sequence[int]) -> int:
        """Returns how many leading blocks are held."""
        for index, block in enumerate(block_ids):
            if block not in self._blocks:
                return index
        return len(block_ids)

    def add(self, block_ids: Sequence[int]) -> None:
        """Takes in a text's blocks; its end is forgotten before its beginning."""
        for block in reversed(block_ids[: self._num_blocks]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class SimulatedVerifier:
    """One verifier: a queue of prompts, a cache, and sessions that decode."""

    replica_id: str
    cache: PrefixCache
    queue: deque[Session] = field(default_factory=deque)
    num_sessions: int = 0
    computing: bool = False
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A request on its way."""

    request: Request
    gateway: int
    verifier: SimulatedVerifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy brought about.

    Attributes:
        hit_rate: Share of the prompts' tokens that were cached.
        busy_spread: Seconds of computing prompts, the busiest verifier's over the mean.
        waits_s: Time in the queue, by request.
        ttfts_s: Time to the first token, by request.
    """

    hit_rate: float
    busy_spread: float
    waits_s: Sequence[float]
    ttfts_s: Sequence[float]

    def wait_s(self, percentile: float) -> float:
        """Returns a percentile of the time in the queue."""
        return float(np.percentile(self.waits_s, percentile))

    def ttft_s(self, percentile: float) -> float:
        """Returns a percentile of the time to first token."""
        return float(np.percentile(self.ttfts_s, percentile))

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token."""
        return float(np.mean(self.ttfts_s))


class Simulation:
    """Plays a trace through a policy, once.

    Args:
        requests: In order of arrival.
        policy: Chooses verifiers.
        num_verifiers: How many there are.
        num_gateways: How many; each request comes through one of them by chance.
        cache_tokens: Size of a verifier's prefix cache.
        seed: Of that chance.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        policy: Policy,
        *,
        num_verifiers: int,
        num_gateways: int,
        cache_tokens: int,
        seed: int = 0,
    ) -> None:
        self._policy = policy
        self._in_flight: list[Counter[str]] = [Counter() for _ in range(num_gateways)]
        self._verifiers = {
            name: SimulatedVerifier(name, PrefixCache(cache_tokens // TRACE_BLOCK))
            for name in (f"verifier-{index}" for index in range(num_verifiers))
        }
        # What gateways read last, and what they will read next.
        self._replicas, self._announced = self._announce(), self._announce()
        self._requests = requests
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._chance = random.Random(seed)
        self._num_hit_tokens = 0
        self._waits_s: list[float] = []
        self._ttfts_s: list[float] = []

    def run(self) -> Outcome:
        """Plays the whole trace."""
        tick_s = 0.0
        for request in self._requests:
            self._at(request.at_s, lambda now_s, request=request: self._arrive(request))  # type: ignore[misc]
        while self._events:
            now_s, _, act = heapq.heappop(self._events)
            while tick_s <= now_s:
                self._tick(round(2 * tick_s / HEARTBEAT_S))
                tick_s += HEARTBEAT_S / 2
            act(now_s)
        busy_s = [verifier.busy_s for verifier in self._verifiers.values()]
        return Outcome(
            hit_rate=self._num_hit_tokens / sum(request.num_input_tokens for request in self._requests),
            busy_spread=max(busy_s) / float(np.mean(busy_s)),
            waits_s=self._waits_s,
            ttfts_s=self._ttfts_s,
        )

    def _tick(self, half_beat: int) -> None:
        """Verifiers announce themselves on even half beats, gateways read that on odd ones."""
        if half_beat % 2 == 0:
            self._announced = self._announce()
        else:
            self._replicas = self._announced

    def _announce(self) -> list[Replica]:
        gateways = [
            Replica(replica_id=f"gateway-{index}", role=GATEWAY, address=f"gateway-{index}:1")
            for index in range(len(self._in_flight))
        ]
        return [*gateways, *(_announced(verifier) for verifier in self._verifiers.values())]

    def _at(self, at_s: float, act: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, act))

    def _arrive(self, request: Request) -> None:
        gateway = self._chance.randrange(len(self._in_flight))
        replica_id = self._policy.place(gateway, request, self._replicas, self._in_flight[gateway])
        verifier = self._verifiers[replica_id]
        verifier.queue.append(Session(request=request, gateway=gateway, verifier=verifier))
        verifier.num_sessions += 1
        self._in_flight[gateway][replica_id] += 1
        if not verifier.computing:
            self._compute_next(verifier, request.at_s)

    def _compute_next(self, verifier: SimulatedVerifier, now_s: float) -> None:
        verifier.computing = bool(verifier.queue)
        if not verifier.queue:
            return
        session = verifier.queue.popleft()
        request = session.request
        num_cached = verifier.cache.num_leading(full_blocks(request.block_ids, request.num_input_tokens))
        # The last token is always computed: its output is the first token of the answer.
        num_hit_tokens = min(num_cached * TRACE_BLOCK, request.num_input_tokens - 1)
        computing_s = (request.num_input_tokens - num_hit_tokens) / PREFILL_TOKENS_PER_S
        verifier.busy_s += computing_s
        self._num_hit_tokens += num_hit_tokens
        self._waits_s.append(now_s - request.at_s)
        self._ttfts_s.append(now_s + computing_s - request.at_s)
        self._at(now_s + computing_s, lambda then_s: self._computed(session, then_s))

    def _computed(self, session: Session, now_s: float) -> None:
        request = session.request
        session.verifier.cache.add(full_blocks(request.block_ids, request.num_input_tokens))
        self._at(now_s + request.num_output_tokens * TIME_PER_OUTPUT_TOKEN_S, lambda _: self._end(session))
        self._compute_next(session.verifier, now_s)

    def _end(self, session: Session) -> None:
        request, verifier = session.request, session.verifier
        if request.final_block_ids is not None:
            verifier.cache.add(full_blocks(request.final_block_ids, request.num_final_tokens))
        verifier.num_sessions -= 1
        self._in_flight[session.gateway][verifier.replica_id] -= 1
        self._policy.ended(session.gateway, request, verifier.replica_id)


def _announced(verifier: SimulatedVerifier) -> Replica:
    return Replica(
        replica_id=verifier.replica_id,
        role=VERIFIER,
        address=f"{verifier.replica_id}:1",
        identity=ModelIdentity(name=MODEL, vocab_hash="", vocab_size=2**31 - 1, context_len=2**31 - 1),
        max_sessions=MAX_SESSIONS,
        num_sessions=verifier.num_sessions,
    )


def pooled_hit_rate(requests: Sequence[Request], cache_tokens: int) -> float:
    """Returns the share of prompt tokens that one cache of that size, for the whole fleet, would hold.

    Answers are taken in with their prompts. As it forgets the least recently used, separate caches may do
    a little better.
    """
    cache = PrefixCache(cache_tokens // TRACE_BLOCK)
    num_hit_tokens = 0
    for request in requests:
        block_ids = full_blocks(request.block_ids, request.num_input_tokens)
        num_hit_tokens += min(cache.num_leading(block_ids) * TRACE_BLOCK, request.num_input_tokens - 1)
        if request.final_block_ids is not None:
            block_ids = full_blocks(request.final_block_ids, request.num_final_tokens)
        cache.add(block_ids)
    return num_hit_tokens / sum(request.num_input_tokens for request in requests)
