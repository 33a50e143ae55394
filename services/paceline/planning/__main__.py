"""Plans capacity: `paceline plan --profile 70b+1b@4xh100+h100 --rate 100`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from paceline.core.errors import ConfigError
from paceline.planning.arrivals import SHAPES, Arrival, generated_arrivals, opening, read_arrivals
from paceline.planning.fleets import RATIOS, Goal, Plan, drafters_worth_trying, evaluate, least_fleet
from paceline.planning.report import LOADS, best_way, figures, promise, steady, table
from paceline.planning.simulation import PlannedFleet, Way
from paceline.service.config import parse, setting
from paceline.simulated.model import find_profile
from paceline.simulated.profile import COMPUTED, Profile, write_profile

PROG = "paceline plan"
Key = TypeVar("Key")
Found = TypeVar("Found")
DESCRIPTION = """Says what a pair of models on its GPUs promises, or how many verifiers and drafters a load needs.
It simulates fleets with the engines that serve, on step times and guesses from a profile. Without a load it prints
tokens/s at several numbers of streams, and whether a drafter pays there: paceline plan --profile 70b+1b@4xh100+h100.
With --rate or --trace it prints the cheapest mix of verifiers and drafters that meets the goals, beside fleets of as
many GPUs without speculation and with the drafter inside the verifier:
paceline plan --profile 70b+1b@4xh100+h100 --rate 100 --slo-ttft-ms 1000 --slo-itl-ms 20.
Profiles whose name is in that form are computed from data sheets, not measured, and their acceptance is assumed: write
one with --write-profile, put your measurements in, and give the file as --profile.
With --verifiers (and --drafters) that fleet is simulated instead of looking for one; see docs/capacity.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Flags and environment variables of `paceline plan`."""

    profile: str = setting(
        help="JSON file, or the name of a profile to compute: TARGET+DRAFT@VERIFIER_GPU+DRAFTER_GPU, as "
        "70b+1b@4xh100+h100 or 32b-fp8+0.6b@h100+l40s."
    )
    trace: Path | None = setting(
        None,
        help="Arrivals: Azure's CSV of 2023 or Mooncake's JSON lines, plain or gzipped; generated without it.",
    )
    shape: str = setting("conversation", help="Statistics of generated arrivals.", choices=tuple(SHAPES))
    rate: float | None = setting(
        None, help="Mean rate; without it that of the trace.", unit="requests/s", low=0.001, high=1e7
    )
    seconds: float = setting(
        20.0,
        help="Time that is simulated: of a trace its beginning; without a load that of one stream.",
        unit="seconds",
        low=1.0,
        high=86_400.0,
    )
    slo_ttft_ms: float = setting(1000.0, help="Goal: p95 of the time to the first token.", unit="ms", low=0.1)
    slo_itl_ms: float = setting(50.0, help="Goal: p95 of the time between tokens.", unit="ms", low=0.01)
    verifiers: int | None = setting(None, help="Verifiers of a given fleet.", low=1, high=1_000_000)
    drafters: int | None = setting(
        None,
        help="Its drafters; without it one for 1, 2, 4 and 8 verifiers, the cheapest per token first.",
        low=1,
        high=1_000_000,
    )
    seed: int = setting(0, help="Of arrivals and of the luck with step times.", low=0, high=2**31 - 1)
    write_profile: Path | None = setting(None, help="Write the profile to this file, and do nothing else.")
    json: Path | None = setting(None, help="Write the figures to this file too.")

    def __post_init__(self) -> None:
        """Checks what depends on one another.

        Raises:
            ConfigError: It does not fit together.
        """
        if self.drafters is not None and self.verifiers is None:
            raise ConfigError("--drafters needs --verifiers beside it")
        if self.drafters is not None and self.verifiers is not None and self.drafters > self.verifiers:
            raise ConfigError(f"--drafters must be at most --verifiers ({self.verifiers}), got {self.drafters}")
        if self.verifiers is not None and not self.has_load:
            raise ConfigError("--verifiers needs a load: --rate or --trace beside it")

    @property
    def has_load(self) -> bool:
        """Whether fleets are looked for; if not, the profile alone is asked."""
        return self.rate is not None or self.trace is not None


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `paceline plan`; exit status 1 when no fleet meets the goals.

    Raises:
        ConfigError: Profile, trace or settings do not do; the message names the field.
    """
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(PlanConfig, arguments, os.environ, PROG, DESCRIPTION)
    profile = find_profile(config.profile)
    if config.write_profile is not None:
        write_profile(profile, config.write_profile)
        sys.stdout.write(f"wrote {config.write_profile}\n")
        return
    note = " COMPUTED, NOT MEASURED" if profile.kind == COMPUTED else ""
    title = f"{profile.name}:{note} ({profile.origin})\n"
    with ProcessPoolExecutor() as pool:
        if config.has_load:
            _plan(pool, config, profile, title)
        else:
            _promise(pool, config, profile, title)


def _promise(pool: ProcessPoolExecutor, config: PlanConfig, profile: Profile, title: str) -> None:
    """Prints what the profile promises, at the loads that its target can hold."""
    loads = [each for each in LOADS if each <= profile.target.max_sessions]
    futures = {
        (streams, way): pool.submit(steady, profile, way, streams, seconds=config.seconds, seed=config.seed)
        for streams in loads
        for way in Way
    }
    found = _awaited(futures, "simulating loads")
    rates = {streams: {way: found[streams, way].tokens_per_s for way in Way} for streams in loads}
    sys.stdout.write(title + promise(profile, rates))
    content = [
        {
            "streams": streams,
            "tokens_per_s": {way.value: round(rate, 1) for way, rate in each.items()},
            "best": best_way(each).value,
        }
        for streams, each in rates.items()
    ]
    _write(config.json, content)


def _plan(pool: ProcessPoolExecutor, config: PlanConfig, profile: Profile, title: str) -> None:
    """Prints the fleets that do, or what a given one does."""
    load = load_of(config)
    plans = _plans(pool, config, profile, load)
    shown = {name: figures(plan) for name, plan in plans.items()}
    sys.stdout.write(title + _heading(load, config) + table(shown) + "\n")
    _write(config.json, shown)
    if not next(iter(plans.values())).meets:
        sys.stdout.write("the goals are not met\n")
        raise SystemExit(1)


def _write(path: Path | None, content: object) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_of(config: PlanConfig) -> list[Arrival]:
    """The arrivals that the settings describe: at that rate, for that time.

    Raises:
        ConfigError: The trace cannot be read, or too little of it falls into the time.
    """
    if config.trace is not None:
        load = opening(read_arrivals(config.trace), rate_per_s=config.rate, duration_s=config.seconds)
    else:
        assert config.rate is not None, "the settings were checked"
        load = generated_arrivals(
            rate_per_s=config.rate, duration_s=config.seconds, seed=config.seed, shape=config.shape
        )
    if len(load) < 2:
        raise ConfigError(f"--seconds {config.seconds:g}: only {len(load)} requests arrive in that time, needs 2")
    return load


def _plans(pool: ProcessPoolExecutor, config: PlanConfig, profile: Profile, load: Sequence[Arrival]) -> dict[str, Plan]:
    """The plan, followed by others, and by fleets of verifiers alone that have as many GPUs.

    Raises:
        ConfigError: No fleet of any size meets the goals.
    """
    goal = Goal(ttft_s=config.slo_ttft_ms / 1e3, itl_s=config.slo_itl_ms / 1e3)
    judge = partial(evaluate, profile, load=load, goal=goal, seed=config.seed)
    if config.verifiers is None:
        search = partial(least_fleet, profile, load=load, goal=goal, seed=config.seed)
        tiers = {f"{Way.TIER.value}, {ratio} to a drafter": pool.submit(search, Way.TIER, ratio) for ratio in RATIOS}
        alone = {way.value: pool.submit(search, way) for way in (Way.PLAIN, Way.COLOCATED)}
        tried = _awaited(tiers | alone, "looking for fleets")
    else:
        given = {title: pool.submit(judge, fleet) for title, fleet in _given(config, config.verifiers).items()}
        tried = _awaited(given, "simulating the fleet")
    found = [(title, plan) for title, plan in tried.items() if plan is not None]
    if not found:
        raise ConfigError(
            f"--slo-ttft-ms {config.slo_ttft_ms:g} and --slo-itl-ms {config.slo_itl_ms:g}: no fleet meets them with "
            f"this profile, as far as {len(load):,} requests can show; ask for less, or simulate more with --seconds"
        )
    plans = dict(sorted(found, key=lambda entry: (not entry[1].meets, entry[1].price_per_million_tokens)))
    tier = next((plan for plan in plans.values() if plan.fleet.way is Way.TIER), None)
    if tier is None:
        return plans
    count = tier.fleet.num_gpus(profile) // profile.target.num_devices
    equal = {
        f"{way.value}, equal GPUs": pool.submit(judge, PlannedFleet(way=way, num_verifiers=count))
        for way in (Way.PLAIN, Way.COLOCATED)
    }
    return plans | _awaited(equal, "simulating fleets of as many GPUs")


def _given(config: PlanConfig, num_verifiers: int) -> dict[str, PlannedFleet]:
    """A given number of verifiers with drafters, as many as are given or as are worth trying."""
    counts = [config.drafters] if config.drafters else drafters_worth_trying(num_verifiers)
    return {
        f"{Way.TIER.value}, {count}" if len(counts) > 1 else Way.TIER.value: PlannedFleet(
            way=Way.TIER, num_verifiers=num_verifiers, num_drafters=count
        )
        for count in counts
    }


def _awaited(futures: Mapping[Key, Future[Found]], title: str) -> dict[Key, Found]:
    """All results in the order of the futures, with a bar that counts them."""
    with tqdm(total=len(futures), desc=title, unit="fleet", leave=False) as bar:
        for _ in as_completed(futures.values()):
            bar.update()
    return {name: future.result() for name, future in futures.items()}


def _heading(load: Sequence[Arrival], config: PlanConfig) -> str:
    span_s = max(load[-1].at_s, 1e-9)
    prompts = sum(each.num_prompt_tokens for each in load) / len(load)
    outputs = sum(each.num_output_tokens for each in load) / len(load)
    return (
        f"{len(load):,} requests in {span_s:.0f} s ({len(load) / span_s:.1f}/s), {prompts:.0f} prompt and "
        f"{outputs:.0f} output tokens each; goals: TTFT p95 {config.slo_ttft_ms:g} ms, ITL p95 {config.slo_itl_ms:g} ms"
        "\n\n"
    )


if __name__ == "__main__":
    main()
