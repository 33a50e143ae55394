"""A fleet at work on a load, and the latencies of its clients."""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import ConfigError
from paceline.planning.arrivals import Arrival
from paceline.planning.engines import DeviceAtWork, DrafterAtWork, JumpingLoop, Request, VerifierAtWork, simulate
from paceline.simulated.profile import Profile

PERCENTILES = (50, 95, 99)
# Verifiers of a cell, if the fleet has as many. Requests go to the one with the fewest, so a verifier by itself would
# have busier and idler times than one of a fleet; and fleets with more drafters have to be simulated like others.
LEAST_VERIFIERS = 4


class Way(enum.Enum):
    """How drafts are made."""

    PLAIN = "no speculation"
    TIER = "drafter tier"
    COLOCATED = "co-located drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """Verifiers, and with a tier the drafters that they share evenly, as many as verifiers at most."""

    way: Way
    num_verifiers: int = 1
    num_drafters: int = 0

    @classmethod
    def around(cls, way: Way, num_verifiers: int = 1) -> PlannedFleet:
        """Verifiers around one drafter, if they have any."""
        return cls(way=way, num_verifiers=num_verifiers, num_drafters=int(way is Way.TIER))

    @property
    def cell(self) -> PlannedFleet:
        """The least fleet that shows what this one does: drafters with their verifiers, or verifiers alone."""
        if self.way is not Way.TIER:
            return PlannedFleet(way=self.way, num_verifiers=min(LEAST_VERIFIERS, self.num_verifiers))
        each = -(-self.num_verifiers // self.num_drafters)
        drafters = min(self.num_drafters, -(-LEAST_VERIFIERS // each))
        return PlannedFleet(way=self.way, num_verifiers=min(self.num_verifiers, each * drafters), num_drafters=drafters)

    def num_gpus(self, profile: Profile) -> int:
        return self.num_verifiers * profile.target.num_devices + self.num_drafters * profile.drafter.num_devices

    def price_per_hour(self, profile: Profile) -> float:
        own = self.num_verifiers * profile.target.replica_price_per_hour
        return own + self.num_drafters * profile.drafter.replica_price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Requests of a fleet's clients, and their latencies.

    Args:
        requests: All of them, in order of arrival.
        door_s: Seconds that a first token spends outside the verifier.
        since_s: Requests that came before are not counted in percentiles, tokens before not in the rate.
        until_s: The same at the end.
        drafting_s: Time of a shared drafter's device for them, from the beginning on.
    """

    requests: Sequence[Request]
    door_s: float
    since_s: float
    until_s: float
    drafting_s: float = 0.0

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
    def counted(self) -> list[Request]:
        """Requests that latencies are taken of."""
        return [each for each in self.requests if self.since_s <= each.at_s < self.until_s]

    @property
    def gamma(self) -> float:
        """Draft tokens that a session's step verified, on average."""
        return sum(each.tally.num_draft_tokens for each in self.requests) / max(1, self._num_steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a session's decoding step committed, on average: the acceptance length over all steps."""
        return 1.0 + sum(each.tally.record().num_accepted_draft_tokens for each in self.requests) / max(
            1, self._num_steps
        )

    @property
    def _num_steps(self) -> int:
        return sum(each.num_steps for each in self.requests)

    def ttft_s(self) -> list[float]:
        """Percentiles of the time to the first token."""
        return _percentiles([each.pieces[0][0] - each.at_s + self.door_s for each in self.counted if each.pieces])

    def itl_s(self) -> list[float]:
        """Percentiles of the time between tokens, shared evenly among those of a step, as gateways count it."""
        gaps: list[float] = []
        for each in self.counted:
            for (before_s, _), (at_s, count) in zip(each.pieces, each.pieces[1:], strict=False):
                gaps += [(at_s - before_s) / count] * count
        return _percentiles(gaps)

    def e2e_s(self) -> list[float]:
        """Percentiles of the time from a request to its last token."""
        ended = (each for each in self.counted if each.num_received >= each.num_output_tokens)
        return _percentiles([each.pieces[-1][0] - each.at_s + self.door_s for each in ended])


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.percentile(values, PERCENTILES)] if values else [0.0] * len(PERCENTILES)


class _CellAtWork:
    """Verifiers at work, one for each profile, that take drafters of the first profile by turns.

    Args:
        profiles: Facts of each verifier.
        cell: How many drafters there are, and how drafts are made.
        seed: Seed of random step times.
        device: Makes the device of each.

    Attributes:
        drafters: Of the tier.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        cell: PlannedFleet,
        loop: JumpingLoop,
        seed: int,
        device: Callable[[JumpingLoop], DeviceAtWork] = DeviceAtWork,
    ) -> None:
        inside = cell.way is Way.COLOCATED
        self._profiles = [each.sharing() if inside else each for each in profiles]
        self.drafters = [
            DrafterAtWork(profiles[0], loop, seed + number, device(loop)) for number in range(cell.num_drafters)
        ]
        drafters = itertools.cycle(self.drafters or [None])
        self._verifiers = [
            VerifierAtWork(each, loop, colocated=inside, device=device(loop), drafter=drafter, seed=seed + number)
            for number, (each, drafter) in enumerate(zip(self._profiles, drafters, strict=False))
        ]
        at_work = [each.run() for each in self.drafters] + [each.run() for each in self._verifiers]
        self._at_work = [loop.create_task(each) for each in at_work]

    async def serve(self, asked: Request, number: int | None = None) -> None:
        """Has a verifier serve a request to its end; None: the one that has the fewest sessions.

        Raises:
            ConfigError: The verifier could never hold it.
            PacelineError: It failed.
        """
        if number is None:
            number = min(range(len(self._verifiers)), key=lambda each: self._verifiers[each].num_sessions)
        profile = self._profiles[number]
        held = asked.num_prompt_tokens + asked.num_output_tokens + profile.most_nodes
        if held > profile.target.kv_tokens:
            raise ConfigError(
                f"request {asked.number} of the load has {held} tokens, more than the {profile.target.kv_tokens} "
                "that the profile's target.kv_tokens allows"
            )
        await self._verifiers[number].serve(asked)

    async def until(self, load: Iterable[Awaitable[None]], most_s: float | None) -> None:
        """Works until all of a load is served, or for so many seconds."""

        async def served() -> None:
            await asyncio.gather(*load)

        tasks = [asyncio.create_task(served()), *self._at_work]
        done, _ = await asyncio.wait(tasks, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()


def run_open(
    profile: Profile,
    cell: PlannedFleet,
    arrivals: Sequence[Arrival],
    *,
    warm_up_s: float = 0.0,
    until_s: float | None = None,
    give_up_s: float | None = None,
    seed: int = 0,
) -> Outcome:
    """Runs a cell under an open load: requests arrive whether earlier ones have ended or not.

    Args:
        arrivals: The load, in order.
        warm_up_s: Requests of this time at the beginning are not counted.
        until_s: When the load ends; None: with its last request.
        give_up_s: Requests that are still under way this long after that are left unfinished.
        seed: Seed of all random choices.

    Raises:
        ConfigError: A request is longer than the profile allows.
    """
    load = [
        Request(number, each.at_s, each.num_prompt_tokens, each.num_output_tokens)
        for number, each in enumerate(arrivals)
    ]
    last_s = max((each.at_s for each in arrivals), default=0.0) if until_s is None else until_s

    async def main(loop: JumpingLoop) -> None:
        at_work = _CellAtWork([profile] * cell.num_verifiers, cell, loop, seed)

        async def serve(asked: Request) -> None:
            await asyncio.sleep(asked.at_s)
            await at_work.serve(asked)

        await at_work.until(map(serve, load), None if give_up_s is None else last_s + give_up_s)

    simulate(main)
    return Outcome(requests=load, door_s=profile.door_s, since_s=warm_up_s, until_s=max(last_s, warm_up_s + 1e-3))


def run_closed(
    profiles: Sequence[Profile],
    way: Way,
    lengths: Iterable[tuple[int, int]],
    *,
    streams: Sequence[int],
    warm_up_s: float = 0.0,
    until_s: float | None = None,
    seed: int = 0,
    device: Callable[[JumpingLoop], DeviceAtWork] = DeviceAtWork,
) -> list[Outcome]:
    """Runs verifiers with a closed load each: streams that send one request after the other.

    Args:
        profiles: Facts of each verifier; in a tier all share the drafter of the first one.
        lengths: Prompt and output tokens of the requests in their order; may be without end where `until_s` is given.
        streams: Streams of each verifier.
        warm_up_s: Time at the beginning that is not counted.
        until_s: When all of it ends; None: with the last request, and once a stream has none left nothing counts.
        seed: Seed of all random choices.
        device: Makes the device of each verifier and drafter.

    Returns:
        The outcome of each verifier.

    Raises:
        ConfigError: A request is longer than a profile allows.
    """
    loads, numbered, dry = [list[Request]() for _ in profiles], enumerate(lengths), list[float]()

    async def main(loop: JumpingLoop) -> tuple[float, Counter[int]]:
        at_work = _CellAtWork(profiles, PlannedFleet.around(way, len(profiles)), loop, seed, device)

        async def stream(verifier: int) -> None:
            for number, (num_prompt_tokens, num_output_tokens) in numbered:
                asked = Request(number, loop.time(), num_prompt_tokens, num_output_tokens)
                loads[verifier].append(asked)
                await at_work.serve(asked, verifier)
            dry.append(loop.time())

        await at_work.until((stream(each) for each, count in enumerate(streams) for _ in range(count)), until_s)
        return dry[0] if dry else loop.time(), Counter(at_work.drafters[0].device_s if at_work.drafters else {})

    busy_s, device_s = simulate(main)
    return [
        Outcome(requests=load, door_s=0.0, since_s=warm_up_s, until_s=busy_s, drafting_s=device_s[verifier])
        for verifier, load in enumerate(loads)
    ]
