"""A fleet at work on a load: arrivals, least loaded routing, and what clients see of it."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.errors import ConfigError
from paceline.planning.arrivals import Arrival
from paceline.planning.engines import DrafterAtWork, JumpingLoop, Request, VerifierAtWork, simulate
from paceline.simulated.profile import Profile

PERCENTILES = (50, 95, 99)


class Way(enum.Enum):
    """How drafts are made."""

    PLAIN = "no speculation"
    TIER = "drafter tier"
    COLOCATED = "co-located drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Replicas that work together: any of these drafters may draft for any session of these verifiers.

    Args:
        way: How drafts are made.
        num_drafters: Replicas of the drafter tier.

    Raises:
        ConfigError: There is no verifier, or a drafter where the way has no use for one.
    """

    way: Way
    num_verifiers: int = 1
    num_drafters: int = 0

    def __post_init__(self) -> None:
        if self.num_verifiers < 1:
            raise ConfigError(f"num_verifiers must be at least 1, got {self.num_verifiers}")
        if (self.num_drafters > 0) != (self.way is Way.TIER):
            raise ConfigError(f"num_drafters must be at least 1 with a {Way.TIER.value} and 0 otherwise")

    def cell(self) -> Fleet:
        """The least fleet that shows what this one does: a drafter with its verifiers, or a verifier alone.

        Raises:
            ConfigError: There are more drafters than verifiers.
        """
        if self.num_drafters > self.num_verifiers:
            raise ConfigError(f"drafters must be at most as many as verifiers, got {self.num_drafters}")
        if self.way is not Way.TIER:
            return Fleet(way=self.way)
        return Fleet(way=self.way, num_verifiers=-(-self.num_verifiers // self.num_drafters), num_drafters=1)

    def num_gpus(self, profile: Profile) -> int:
        own = self.num_verifiers * profile.target.num_devices
        return own + self.num_drafters * profile.drafter.num_devices

    def price_per_hour(self, profile: Profile) -> float:
        own = self.num_verifiers * profile.target.replica_price_per_hour
        return own + self.num_drafters * profile.drafter.replica_price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What clients of a fleet saw.

    Args:
        requests: All of them, in order of arrival.
        door_s: Seconds that a first token spends outside the verifier.
        since_s: Requests that came before are not counted in percentiles, tokens before not in the rate.
        until_s: The same at the end.
    """

    requests: Sequence[Request]
    door_s: float
    since_s: float
    until_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second within the time that counts."""
        count = sum(
            number for each in self.requests for at_s, number in each.pieces if self.since_s <= at_s < self.until_s
        )
        return count / (self.until_s - self.since_s)

    @property
    def num_unfinished(self) -> int:
        """Requests that did not get all their tokens."""
        return sum(each.num_received < each.num_output_tokens for each in self.requests)

    @property
    def num_counted(self) -> int:
        """Requests that latencies are taken of."""
        return len(self._counted())

    @property
    def gamma(self) -> float:
        """Draft tokens that a session's step verified, on average."""
        return sum(each.record.num_draft_tokens for each in self.requests) / max(1, self._num_steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a session's decoding step committed, on average: the acceptance length over all steps."""
        return 1.0 + sum(each.record.num_accepted_draft_tokens for each in self.requests) / max(1, self._num_steps)

    @property
    def _num_steps(self) -> int:
        return sum(each.num_steps for each in self.requests)

    def ttft_s(self) -> list[float]:
        """Percentiles of the time to the first token."""
        return _percentiles([each.pieces[0][0] - each.at_s + self.door_s for each in self._counted() if each.pieces])

    def itl_s(self) -> list[float]:
        """Percentiles of the time between tokens, shared evenly among those of a step, as gateways count it."""
        gaps: list[float] = []
        for each in self._counted():
            for (before_s, _), (at_s, count) in zip(each.pieces, each.pieces[1:], strict=False):
                gaps += [(at_s - before_s) / count] * count
        return _percentiles(gaps)

    def e2e_s(self) -> list[float]:
        """Percentiles of the time from a request to its last token."""
        ended = (each for each in self._counted() if each.num_received >= each.num_output_tokens)
        return _percentiles([each.pieces[-1][0] - each.at_s + self.door_s for each in ended])

    def _counted(self) -> list[Request]:
        return [each for each in self.requests if self.since_s <= each.at_s < self.until_s]


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, PERCENTILES)] if values else [0.0] * len(PERCENTILES)


class FleetAtWork:
    """A fleet at work; belongs to one run of a simulation.

    Args:
        policy: Of its verifiers; None: as they have it.
        seed: Of the luck with step times.
    """

    def __init__(
        self, profile: Profile, fleet: Fleet, loop: JumpingLoop, *, policy: Goodput | None = None, seed: int = 0
    ) -> None:
        inside = fleet.way is Way.COLOCATED
        self._profile = profile.sharing() if inside else profile
        drafters = [
            DrafterAtWork(f"drafter-{number}", profile, loop, seed + number) for number in range(fleet.num_drafters)
        ]
        self.verifiers = [
            VerifierAtWork(self._profile, loop, colocated=inside, drafters=drafters, policy=policy, seed=seed + number)
            for number in range(fleet.num_verifiers)
        ]
        at_work: list[DrafterAtWork | VerifierAtWork] = [*drafters, *self.verifiers]
        self._at_work = [loop.create_task(each.run()) for each in at_work]

    async def serve(self, asked: Request) -> None:
        """Has the verifier that has the fewest sessions serve a request to its end.

        Raises:
            ConfigError: No verifier could ever hold it.
        """
        held = asked.num_prompt_tokens + asked.num_output_tokens + self._profile.most_nodes
        if held > self._profile.target.kv_tokens:
            raise ConfigError(
                f"request {asked.number} of the load has {held} tokens, more than the {self._profile.target.kv_tokens} "
                "that the profile's target.kv_tokens allows"
            )
        await min(self.verifiers, key=lambda each: each.num_sessions).serve(asked)

    async def serve_all(self, load: Sequence[Request], most_s: float | None) -> None:
        """Serves each request when it is due, whether earlier ones have ended or not; for so many seconds at most.

        Raises:
            PacelineError: A request failed.
        """

        async def serve(asked: Request) -> None:
            await asyncio.sleep(asked.at_s)
            await self.serve(asked)

        await self._until(map(serve, load), most_s)

    async def keep_busy(
        self, lengths: Iterable[tuple[int, int]], streams: int, most_s: float | None
    ) -> tuple[list[Request], float]:
        """Has each of some streams send its next request when one ends; for so many seconds at most.

        Args:
            lengths: Prompt and output tokens of the requests in their order.

        Returns:
            The requests, and until when all streams were busy.

        Raises:
            PacelineError: A request failed.
        """
        loop, load, dry = asyncio.get_running_loop(), list[Request](), list[float]()
        numbered = enumerate(lengths)

        async def stream() -> None:
            for number, (num_prompt_tokens, num_output_tokens) in numbered:
                asked = Request(
                    number=number,
                    at_s=loop.time(),
                    num_prompt_tokens=num_prompt_tokens,
                    num_output_tokens=num_output_tokens,
                )
                load.append(asked)
                await self.serve(asked)
            dry.append(loop.time())

        await self._until((stream() for _ in range(streams)), most_s)
        return load, dry[0] if dry else loop.time()

    async def _until(self, load: Iterable[Awaitable[None]], most_s: float | None) -> None:
        """Works until all of a load is served, or for so many seconds."""

        async def served() -> None:
            await asyncio.gather(*load)

        tasks = [asyncio.create_task(served()), *self._at_work]
        done, _ = await asyncio.wait(tasks, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()


def run_open(
    profile: Profile,
    fleet: Fleet,
    arrivals: Sequence[Arrival],
    *,
    warm_up_s: float = 0.0,
    until_s: float | None = None,
    give_up_s: float | None = None,
    seed: int = 0,
) -> Outcome:
    """What a fleet does under a load that comes as it comes.

    Args:
        arrivals: The load, in order.
        warm_up_s: Requests of this time at the beginning are not counted.
        until_s: When the load ends; None: with its last request.
        give_up_s: Requests that are still under way this long after that are left unfinished.
        seed: Of the luck.

    Raises:
        ConfigError: A request is longer than the profile allows.
    """
    load = [
        Request(
            number=number,
            at_s=each.at_s,
            num_prompt_tokens=each.num_prompt_tokens,
            num_output_tokens=each.num_output_tokens,
        )
        for number, each in enumerate(arrivals)
    ]
    last_s = max((each.at_s for each in arrivals), default=0.0) if until_s is None else until_s
    most_s = None if give_up_s is None else last_s + give_up_s
    simulate(lambda loop: FleetAtWork(profile, fleet, loop, seed=seed).serve_all(load, most_s))
    return Outcome(requests=load, door_s=profile.door_s, since_s=warm_up_s, until_s=max(last_s, warm_up_s + 1e-3))


def run_closed(
    profile: Profile,
    fleet: Fleet,
    lengths: Iterable[tuple[int, int]],
    *,
    streams: int,
    warm_up_s: float = 0.0,
    until_s: float | None = None,
    seed: int = 0,
) -> Outcome:
    """What a fleet does for streams that send one request after the other.

    Args:
        lengths: Prompt and output tokens of the requests in their order; may be without end where `until_s` is given.
        warm_up_s: Time at the beginning that is not counted.
        until_s: When all of it ends; None: with the last request, and once a stream has none left nothing counts.
        seed: Of the luck.

    Raises:
        ConfigError: A request is longer than the profile allows.
    """
    load, busy_s = simulate(
        lambda loop: FleetAtWork(profile, fleet, loop, seed=seed).keep_busy(lengths, streams, until_s)
    )
    return Outcome(requests=load, door_s=0.0, since_s=warm_up_s, until_s=busy_s)
