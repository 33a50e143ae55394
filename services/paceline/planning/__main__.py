"""Plans capacity: `paceline plan --profile 8b+1b@h100+a100 --rate 100`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from paceline.core.errors import ConfigError
from paceline.planning.arrivals import Arrival, generated_arrivals, read_arrivals, scaled
from paceline.planning.config import DESCRIPTION, PlanConfig
from paceline.planning.fleets import RATIOS, Fleet, Goal, Plan, evaluate, least_fleet
from paceline.planning.profile import COMPUTED, SHIPPED, Profile, read_profile, write_profile
from paceline.planning.report import draw, figures, table
from paceline.planning.roofline import computed_profile
from paceline.planning.simulation import Way
from paceline.service.config import parse

PROG = "paceline plan"
# Drafters of a given fleet whose number is not named: one for so many verifiers.
USUAL_RATIO = 4
Found = TypeVar("Found")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `paceline plan`; exit status 1 when no fleet meets the goals.

    Raises:
        ConfigError: Profile, trace or settings do not do; the message names the field.
    """
    arguments = sys.argv[1:] if argv is None else argv
    config = parse(PlanConfig, arguments, os.environ, PROG, DESCRIPTION)
    profile = profile_of(config)
    if config.write_profile is not None:
        write_profile(profile, config.write_profile)
        sys.stdout.write(f"wrote {config.write_profile}\n")
        return
    load = load_of(config)
    plans = _plans(config, profile, load)
    sys.stdout.write(_heading(profile, load, config) + table(plans) + "\n")
    if config.json is not None:
        content = {title: figures(plan) for title, plan in plans.items()}
        config.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if config.plot is not None:
        draw(plans, config.plot)
    first = next(iter(plans.values()))
    if not first.meets:
        sys.stdout.write("the goals are not met\n")
        raise SystemExit(1)


def profile_of(config: PlanConfig) -> Profile:
    """The profile that is asked for, with the prices that are.

    Raises:
        ConfigError: There is none of that name, or its file is broken.
    """
    path, shipped = Path(config.profile), SHIPPED / f"{config.profile}.json"
    files = [each for each in (path, shipped) if each.is_file()]
    profile = read_profile(files[0]) if files else computed_profile(config.profile)
    target, drafter = profile.target, profile.drafter
    if config.verifier_price is not None:
        target = replace(target, price_per_hour=config.verifier_price)
    if config.drafter_price is not None:
        drafter = replace(drafter, device=replace(drafter.device, price_per_hour=config.drafter_price))
    return replace(profile, target=target, drafter=drafter)


def load_of(config: PlanConfig) -> list[Arrival]:
    """The arrivals that are asked for: at that rate, for that time.

    Raises:
        ConfigError: The trace cannot be read, or too little of it falls into the time.
    """
    if config.trace is None:
        assert config.rate is not None, "the settings were checked"
        load = generated_arrivals(
            rate_per_s=config.rate, duration_s=config.seconds, seed=config.seed, shape=config.shape
        )
    else:
        load = read_arrivals(config.trace)
        if config.rate is not None:
            load = scaled(load, config.rate)
        load = list(takewhile(lambda each: each.at_s <= config.seconds, load))
    if len(load) < 2:
        raise ConfigError(f"--seconds {config.seconds:g}: only {len(load)} requests arrive in that time, needs 2")
    return load


def _plans(config: PlanConfig, profile: Profile, load: Sequence[Arrival]) -> dict[str, Plan]:
    """The plan asked for first, and what it is compared with."""
    goal = Goal(ttft_s=config.slo_ttft_ms / 1e3, itl_s=config.slo_itl_ms / 1e3)
    with ProcessPoolExecutor(config.workers or os.cpu_count()) as pool:
        if config.verifiers is None:
            plans = _cheapest(pool, profile, load, goal, config.seed)
        else:
            drafters = config.drafters or max(1, config.verifiers // USUAL_RATIO)
            fleet = Fleet(way=Way.TIER, num_verifiers=config.verifiers, num_drafters=drafters)
            given = {Way.TIER.value: pool.submit(evaluate, profile, fleet, load, goal, seed=config.seed)}
            plans = _awaited(given, "simulating the fleet")
        tier = next((plan for plan in plans.values() if plan.fleet.way is Way.TIER), None)
        return plans if tier is None else plans | _at_equal_gpus(pool, tier, load, goal, config.seed)


def _cheapest(
    pool: ProcessPoolExecutor, profile: Profile, load: Sequence[Arrival], goal: Goal, seed: int
) -> dict[str, Plan]:
    """The least fleets that meet the goals, by way, the cheapest first.

    Raises:
        ConfigError: No fleet of any size does.
    """
    searches = {
        f"{Way.TIER.value}, {ratio} to a drafter": pool.submit(
            least_fleet, profile, Way.TIER, ratio, load, goal, seed=seed
        )
        for ratio in RATIOS
    }
    for way in (Way.PLAIN, Way.COLOCATED):
        searches[way.value] = pool.submit(least_fleet, profile, way, 1, load, goal, seed=seed)
    found = {title: plan for title, plan in _awaited(searches, "looking for fleets").items() if plan is not None}
    if not found:
        raise ConfigError(
            f"--slo-ttft-ms {1e3 * goal.ttft_s:g} and --slo-itl-ms {1e3 * goal.itl_s:g}: no fleet meets them with this "
            f"profile, as far as {len(load):,} requests can show; ask for less, or simulate more with --seconds"
        )
    return dict(sorted(found.items(), key=lambda entry: entry[1].fleet.price_per_hour(profile)))


def _at_equal_gpus(
    pool: ProcessPoolExecutor, tier: Plan, load: Sequence[Arrival], goal: Goal, seed: int
) -> dict[str, Plan]:
    """Fleets of verifiers alone, of as many GPUs as a fleet with a drafter tier has."""
    profile = tier.profile
    count = tier.fleet.num_gpus(profile) // profile.target.num_devices
    fleets = {way: Fleet(way=way, num_verifiers=count) for way in (Way.PLAIN, Way.COLOCATED)}
    futures = {
        f"{way.value}, equal GPUs": pool.submit(evaluate, profile, fleet, load, goal, seed=seed)
        for way, fleet in fleets.items()
    }
    return _awaited(futures, "simulating fleets of as many GPUs")


def _awaited(futures: Mapping[str, Future[Found]], title: str) -> dict[str, Found]:
    """All results in the order asked for, with a bar that counts them."""
    with tqdm(total=len(futures), desc=title, unit="fleet", leave=False) as bar:
        for _ in as_completed(futures.values()):
            bar.update()
    return {name: future.result() for name, future in futures.items()}


def _heading(profile: Profile, load: Sequence[Arrival], config: PlanConfig) -> str:
    span_s = max(load[-1].at_s, 1e-9)
    prompts = sum(each.num_prompt_tokens for each in load) / len(load)
    outputs = sum(each.num_output_tokens for each in load) / len(load)
    note = " COMPUTED, NOT MEASURED" if profile.kind == COMPUTED else ""
    return (
        f"{profile.name}:{note} ({profile.origin})\n"
        f"{len(load):,} requests in {span_s:.0f} s ({len(load) / span_s:.1f}/s), {prompts:.0f} prompt and "
        f"{outputs:.0f} output tokens each; goals: TTFT p95 {config.slo_ttft_ms:g} ms, ITL p95 {config.slo_itl_ms:g} ms"
        "\n\n"
    )


if __name__ == "__main__":
    main()
