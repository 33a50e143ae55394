"""One replica as the launcher sees it: its actors, and what they last said of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.cluster.ray.host import Report
from paceline.cluster.ray.placement import Slot
from paceline.cluster.spec import Endpoint
from paceline.core.errors import ConfigError, UnavailableError

POLL_S = 0.5
# An actor that says nothing for so long is taken for lost.
ANSWER_S = 10.0
# Time beyond the service's own for an actor to say that it has stopped.
LAST_ANSWER_S = 5.0
NODE_CHARS = 8


class Replica:
    """A replica of a service, followed until it is stopped.

    Args:
        name: In the registry.
        slot: Its place.
        actors: One a rank; the first runs the service that others call.
        say: Gets a line for whatever happens to it.
    """

    def __init__(self, name: str, role: str, slot: Slot, actors: Sequence[Any], say: Callable[[str], None]) -> None:
        self.name = name
        self.role = role
        self.slot = slot
        self.leaving = False
        self._actors = actors
        self._say = say
        self._reports: list[Report | None] = [None] * len(actors)
        self._told = ""
        self._heard = False
        self._changed = asyncio.Condition()
        self._followers = [
            asyncio.create_task(self._follow(rank), name=f"follow {name}") for rank in range(len(actors))
        ]

    @property
    def well(self) -> bool:
        """Whether all its processes do their work, as far as is known."""
        return all(report is not None and report.well for report in self._reports)

    @property
    def error(self) -> str:
        """What ended a process of it that is not well again."""
        return next((report.error for report in self._reports if report is not None and report.error), "")

    @property
    def endpoint(self) -> Endpoint | None:
        """Where it listens; None while it is not well."""
        report = self._reports[0]
        return report.endpoint if report is not None and self.well else None

    async def until_well(self, timeout_s: float) -> None:
        """Returns when it does its work.

        Raises:
            ConfigError: A process of it ended.
            UnavailableError: It did not get that far in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.well or self.error)
        except TimeoutError:
            why = "" if self._heard else ": Ray has found no node with room for it"
            raise UnavailableError(f"{self.name} was not ready within {timeout_s:g} s{why}") from None
        if not self.well:
            raise ConfigError(self.error)

    async def stop(self, grace_s: float) -> None:
        """Ends its processes, which get `grace_s` seconds to finish, and its actors."""
        for follower in self._followers:
            follower.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)
        if self._heard:
            await asyncio.gather(*(_stop(actor, grace_s) for actor in self._actors))
        self.kill()

    def kill(self) -> None:
        """Ends its actors at once, and the processes with them."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    async def _follow(self, rank: int) -> None:
        while True:
            call = asyncio.wrap_future(self._actors[rank].report.remote().future())
            try:
                while not (await asyncio.wait({call}, timeout=ANSWER_S))[0]:
                    await self._note(rank, None)
                await self._note(rank, call.result())
            except RayError:
                # Ray restarts it, here or elsewhere.
                await self._note(rank, None)
            finally:
                call.cancel()
            await asyncio.sleep(POLL_S)

    async def _note(self, rank: int, report: Report | None) -> None:
        async with self._changed:
            self._reports[rank] = report
            self._heard |= report is not None
            self._changed.notify_all()
        line = self._describe()
        if line != self._told and self._heard:
            self._told = line
            self._say(line)

    def _describe(self) -> str:
        first = self._reports[0]
        if self.well and first is not None and first.endpoint is not None:
            pids = " ".join(str(report.pid) for report in self._reports if report is not None)
            place = f"node {first.node[:NODE_CHARS]}, {_doors(first.endpoint)}, pid {pids}"
            return f"{self.name} is well: {place}"
        if self.error:
            return f"{self.name} is down: {self.error}"
        if None in self._reports:
            return f"{self.name} is lost: Ray looks for a place for it"
        return f"{self.name} starts"


def _doors(endpoint: Endpoint) -> str:
    if endpoint.role == "gateway":
        return f"http {endpoint.address}, grpc {endpoint.second_address}"
    return f"grpc {endpoint.address}, metrics {endpoint.second_address}"


async def _stop(actor: Any, grace_s: float) -> None:
    """Asks an actor to end its process; one that is gone or says nothing is killed by the caller."""
    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(grace_s + LAST_ANSWER_S):
            await asyncio.wrap_future(actor.stop.remote(grace_s).future())
