"""The fleet that gets the requests of the docs' commands."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.cluster.spec import ServicePort
from tests.support.fleet_runner import FleetRunner


@dataclass(frozen=True, slots=True)
class Demo:
    """A running fleet of the demo pair, with the addresses that code blocks need."""

    runner: FleetRunner

    @property
    def url(self) -> str:
        """URL of the HTTP API."""
        return self.runner.url

    @property
    def address(self) -> str:
        """`host:port` of the HTTP API."""
        return self.url.partition("://")[2]

    @property
    def grpc_address(self) -> str:
        """`host:port` of the gRPC API."""
        return self._endpoint("gateway").second_address

    @property
    def model(self) -> str:
        """Name of the target."""
        return DEMO_TARGET.name

    def metrics_url(self, role: str) -> str:
        """URL of the metrics of a verifier or drafter; empty for another role."""
        return f"http://{self._endpoint(role).second_address}" if role else ""

    def _endpoint(self, role: str) -> ServicePort:
        return next(each for each in self.runner.fleet.endpoints if each.role == role)
