"""The fleet that the docs' commands are sent to."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.cluster.spec import Endpoint
from tests.support.fleet_runner import FleetRunner


@dataclass(frozen=True, slots=True)
class Demo:
    """A running fleet of the demo pair, by what blocks ask of it."""

    runner: FleetRunner

    @property
    def url(self) -> str:
        """Of the HTTP door."""
        return self.runner.url

    @property
    def address(self) -> str:
        """`host:port` of the HTTP door."""
        return self.url.partition("://")[2]

    @property
    def grpc_address(self) -> str:
        """`host:port` of the gRPC door."""
        return self._endpoint("gateway").second_address

    @property
    def model(self) -> str:
        """Its name."""
        return DEMO_TARGET.name

    def metrics_url(self, role: str) -> str:
        """Where metrics of a verifier or drafter are; empty for another role."""
        return f"http://{self._endpoint(role).second_address}" if role else ""

    def _endpoint(self, role: str) -> Endpoint:
        return next(each for each in self.runner.fleet.endpoints if each.role == role)
