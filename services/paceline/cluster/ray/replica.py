"""One replica as the launcher sees it: its actor, and that actor's last report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.cluster.ray.host import Report
from paceline.cluster.ray.placement import Slot
from paceline.cluster.spec import Endpoint
from paceline.core.errors import ConfigError, UnavailableError

POLL_S = 0.5
# An actor that does not answer for this long counts as lost.
ANSWER_S = 10.0
# Time beyond the service's own for an actor to report that it has stopped.
LAST_ANSWER_S = 5.0
NODE_CHARS = 8


class Replica:
    """A replica of a service, followed until it is stopped.

    Args:
        name: In the registry.
        slot: Its place.
        actor: Runs its process.
        say: Gets a line for whatever happens to it.
    """

    def __init__(self, name: str, role: str, slot: Slot, actor: Any, say: Callable[[str], None]) -> None:
        self.name = name
        self.role = role
        self.slot = slot
        self.leaving = False
        self._actor = actor
        self._say = say
        self._report: Report | None = None
        self._last_line = ""
        self._has_answered = False
        self._changed = asyncio.Condition()
        self._follower = asyncio.create_task(self._follow(), name=f"follow {name}")

    @property
    def well(self) -> bool:
        """Whether its process does its work, as far as is known."""
        return self._report is not None and self._report.well

    @property
    def error(self) -> str:
        """What ended its process, which is not well again."""
        return "" if self._report is None else self._report.error

    @property
    def endpoint(self) -> Endpoint | None:
        """Where it listens; None while it is not well."""
        return self._report.endpoint if self._report is not None and self._report.well else None

    async def until_well(self, timeout_s: float) -> None:
        """Returns when it does its work.

        Raises:
            ConfigError: Its process ended.
            UnavailableError: It did not get that far in time.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.well or self.error)
        except TimeoutError:
            why = "" if self._has_answered else ": Ray has found no node with room for it"
            raise UnavailableError(f"{self.name} was not ready within {timeout_s:g} s{why}") from None
        if not self.well:
            raise ConfigError(self.error)

    async def stop(self, grace_s: float) -> None:
        """Ends its process, which gets `grace_s` seconds to finish, and its actor."""
        self._follower.cancel()
        await asyncio.gather(self._follower, return_exceptions=True)
        if self._has_answered:
            await _stop(self._actor, grace_s)
        ray.kill(self._actor, no_restart=True)

    async def _follow(self) -> None:
        while True:
            call = asyncio.wrap_future(self._actor.report.remote().future())
            try:
                while not (await asyncio.wait({call}, timeout=ANSWER_S))[0]:
                    await self._note(None)
                await self._note(call.result())
            except RayError:
                # Ray restarts it, here or elsewhere.
                await self._note(None)
            finally:
                call.cancel()
            await asyncio.sleep(POLL_S)

    async def _note(self, report: Report | None) -> None:
        async with self._changed:
            self._report = report
            self._has_answered |= report is not None
            self._changed.notify_all()
        line = self._describe()
        if line != self._last_line and self._has_answered:
            self._last_line = line
            self._say(line)

    def _describe(self) -> str:
        report = self._report
        if report is None:
            return f"{self.name} is lost: Ray looks for a place for it"
        if report.well and report.endpoint is not None:
            place = f"node {report.node[:NODE_CHARS]}, {_doors(report.endpoint)}, pid {report.pid}"
            return f"{self.name} is well: {place}"
        if report.error:
            return f"{self.name} is down: {report.error}"
        return f"{self.name} starts"


def _doors(endpoint: Endpoint) -> str:
    if endpoint.role == "gateway":
        return f"http {endpoint.address}, grpc {endpoint.second_address}"
    return f"grpc {endpoint.address}, metrics {endpoint.second_address}"


async def _stop(actor: Any, grace_s: float) -> None:
    """Asks an actor to end its process; the caller kills one that is gone or does not answer."""
    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(grace_s + LAST_ANSWER_S):
            await asyncio.wrap_future(actor.stop.remote(grace_s).future())
