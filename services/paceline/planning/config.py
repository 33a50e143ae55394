"""Settings of `paceline plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.planning.arrivals import SHAPES
from paceline.service.config import setting

DESCRIPTION = """Says how many verifiers and drafters a load needs, and what that costs.
It simulates fleets with the very policy, trees and waiting rules of the services, on step times and guesses from a
profile, and prints the cheapest mix of verifiers and drafters that meets the goals beside fleets of as many GPUs
without speculation and with the drafter inside the verifier.
Example: paceline plan --profile 8b+1b@h100+a100 --rate 100 --slo-ttft-ms 1000 --slo-itl-ms 20.
Profiles whose name is in that form are computed from data sheets, not measured, and their acceptance is assumed: write
one with --write-profile, put your measurements in, and give the file as --profile.
With --verifiers (and --drafters) that fleet is simulated instead of looking for one; see docs/capacity.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Flags and environment variables of `paceline plan`."""

    profile: str = setting(
        help="JSON file, the name of a measured profile in the package (demo), or one to compute: "
        "TARGET+DRAFT@VERIFIER_GPU+DRAFTER_GPU, as 8b+1b@h100+l4 or 70b+1b@4xh100+a100."
    )
    trace: Path | None = setting(
        None, help="Arrivals: Azure's CSV of 2023 or Mooncake's JSON lines, plain or gzipped; without it generated."
    )
    shape: str = setting("conversation", help="Statistics of generated arrivals.", choices=tuple(SHAPES))
    rate: float | None = setting(
        None, help="Mean rate; without it that of the trace.", unit="requests/s", low=0.001, high=1e7
    )
    seconds: float = setting(
        20.0, help="Time that is simulated, of a trace its beginning.", unit="seconds", low=1.0, high=86_400.0
    )
    slo_ttft_ms: float = setting(1000.0, help="Goal: p95 of the time to the first token.", unit="ms", low=0.1)
    slo_itl_ms: float = setting(50.0, help="Goal: p95 of the time between tokens.", unit="ms", low=0.01)
    verifiers: int | None = setting(None, help="Verifiers of a given fleet.", low=1, high=1_000_000)
    drafters: int | None = setting(
        None, help="Its drafters; without it a quarter as many as verifiers, at least one.", low=1, high=1_000_000
    )
    verifier_price: float | None = setting(
        None, help="Price an hour of a verifier's GPU, instead of the profile's.", low=0.0
    )
    drafter_price: float | None = setting(
        None, help="Price an hour of a drafter's GPU, instead of the profile's.", low=0.0
    )
    workers: int = setting(0, help="Processes that simulate; 0: one a CPU.", low=0, high=1024)
    seed: int = setting(0, help="Of arrivals and of the luck with step times.", low=0, high=2**31 - 1)
    write_profile: Path | None = setting(None, help="Write the profile to this file, and do nothing else.")
    json: Path | None = setting(None, help="Write the figures to this file too.")
    plot: Path | None = setting(None, help="Draw percentiles and costs as SVG; needs matplotlib.")

    def __post_init__(self) -> None:
        """Checks what depends on one another.

        Raises:
            ConfigError: It does not fit together.
        """
        if self.drafters is not None and self.verifiers is None:
            raise ConfigError("--drafters needs --verifiers beside it")
        if self.drafters is not None and self.verifiers is not None and self.drafters > self.verifiers:
            raise ConfigError(f"--drafters must be at most --verifiers ({self.verifiers}), got {self.drafters}")
        if self.trace is None and self.rate is None and self.write_profile is None:
            raise ConfigError("--rate is required without --trace: mean rate of the generated arrivals, requests/s")
