"""The table of the literature, run by the real fleet at its own constants: `make bench NAME=literature`.

A 70B target on an A100 that takes 7 ms a token and 8 ms a verification, and 0.5 ms a drafted token; guesses are right
with one chance everywhere. Devices are simulated, the services are real, one stream. Speed-ups over plain decoding of
the same fleet; for each chance:

* formula: (1 - a^(k+1)) / (1 - a) tokens a round of 8 + 0.5 k ms (Leviathan, Kalman and Matias, 2023, theorem 3.8), at
  the length k that is best by it, over 7 ms a token: the drafter and the target take turns
* turns: the drafter is inside the verifier, and takes turns with the target
* overlapped: the same tokens in rounds of 8 ms, of a drafter that drafts all of them while the target verifies
* tier: the drafter is a service of its own, and drafts while the target verifies
* fixed k, fixed 16: chains of that length; controller: the fleet as it is by default

A second table is of drafters that guess three wide, whose second guess is right in half of the rest: there the tier may
have the branch ready that the text takes.

Each figure is the mean of all rounds; spread is the largest difference between rounds of one way, over its mean. The
bench is met when all texts are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.bench import Table, bench_parser, report, run
from loadtest.client import Completions
from loadtest.fleet import bench_fleet
from loadtest.paced import OFF, keep_busy
from loadtest.streams import Ask, HttpDoor
from paceline.cluster.local import LocalFleet

TOKEN_MS, VERIFY_MS, DRAFT_MS = 7.0, 8.0, 0.5
CHANCES, MOST_LENGTH = (0.9, 0.8, 0.7, 0.5, 0.3), 16
PLACEMENTS = {"turns": {"placement": "verifier"}, "tier": {}}
FIXED, CONTROLLER = "fixed", "controller"
Policies = Mapping[str, Mapping[str, Any]]
# By the guesses below a node.
POLICIES: Mapping[int, Policies] = {
    1: {FIXED: {"policy": "fixed", "num_speculative_tokens": MOST_LENGTH}, CONTROLLER: {}},
    3: {CONTROLLER: {}},
}


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("literature", __doc__)
    parser.add_argument("--chances", nargs="+", type=float, default=CHANCES, help="acceptance (default 0.9 to 0.3)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a load (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="of each way (default 2)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a text (default 200)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all rows; True when no way has changed a text."""
    rows, texts = list[dict[str, Any]](), defaultdict[int, set[str]](set)
    num_fleets = len(arguments.chances) * len(PLACEMENTS) * sum(map(len, POLICIES.values()))
    with tempfile.TemporaryDirectory() as folder, tqdm(total=num_fleets, unit="fleet") as bar:
        for width, policies in POLICIES.items():
            table, path = Table(), Path(folder) / f"{width}.json"
            path.write_text(json.dumps(profile(width)), encoding="utf-8")
            for chance in arguments.chances:
                bench = Bench(path, chance, arguments, texts)
                speeds = {
                    placement: await bench.measure_placement(settings, policies, bar)
                    for placement, settings in PLACEMENTS.items()
                }
                rows.append(row_of(width, chance, speeds))
                table.add(rows[-1])
    met = all(len(each) == 1 for each in texts.values())
    return report("literature", simulated=True, rows=rows, ok=met)


def row_of(width: int, chance: float, speeds: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    """A row of a table.

    Args:
        width: Guesses below a node.
        chance: Acceptance.
        speeds: Speed-ups of each round, by placement and way.
    """
    k = best_length(chance)
    figures = {
        placement: {way: round(statistics.fmean(rounds), 2) for way, rounds in ways.items()}
        for placement, ways in speeds.items()
    }
    spread = max(
        (max(rounds) - min(rounds)) / statistics.fmean(rounds) for ways in speeds.values() for rounds in ways.values()
    )
    return {
        "wide": width,
        "acceptance": chance,
        "k": k,
        "formula": round(formula(chance, k), 2),
        "turns": figures["turns"],
        "overlapped": round(expected(chance, k) * TOKEN_MS / VERIFY_MS, 2),
        "tier": figures["tier"],
        "spread": round(spread, 3),
    }


def expected(chance: float, length: int) -> float:
    """Tokens a round of a chain of this length (Leviathan et al. 2211.17192, equation 1)."""
    return length + 1.0 if chance == 1.0 else (1.0 - chance ** (length + 1)) / (1.0 - chance)


def formula(chance: float, length: int) -> float:
    """Speed-up over plain decoding when drafter and target take turns."""
    return expected(chance, length) * TOKEN_MS / (VERIFY_MS + DRAFT_MS * length)


def best_length(chance: float) -> int:
    """The length that is best by the formula."""
    return max(range(1, 1 + MOST_LENGTH), key=lambda length: formula(chance, length))


class Bench:
    """Measures the fleets of one chance.

    Args:
        path: Path of the profile.
        chance: Acceptance.
        arguments: Arguments of the command line.
        texts: Gets the texts of each request.
    """

    def __init__(
        self, path: Path, chance: float, arguments: argparse.Namespace, texts: defaultdict[int, set[str]]
    ) -> None:
        self._path, self._chance, self._arguments, self._texts = path, chance, arguments, texts

    def _fleet(self, settings: Mapping[str, Any]) -> LocalFleet:
        config = json.dumps({"method": "draft_model", **settings})
        return bench_fleet(simulate=str(self._path), acceptance=self._chance, speculative_config=config)

    async def measure_placement(
        self, placement: Mapping[str, Any], policies: Policies, bar: tqdm[Any]
    ) -> dict[str, list[float]]:
        """Returns the speed-ups of each round by way."""
        speeds: dict[str, list[float]] = {}
        for policy, settings in policies.items():
            bar.set_postfix_str(f"acceptance {self._chance}, {policy}")
            async with self._fleet({**placement, **settings}) as fleet:
                door = HttpDoor(fleet.gateway_url)
                speeds |= await (self._fixed(door) if policy == FIXED else self._controlled(door))
            bar.update()
        return speeds

    async def _fixed(self, door: HttpDoor) -> dict[str, list[float]]:
        ways = {f"fixed {name}": {"max_draft_tokens": length} for name, length in self._lengths().items()}
        await self._tokens_per_s(door, OFF)
        return await self._speed_ups(door, ways)

    async def _controlled(self, door: HttpDoor) -> dict[str, list[float]]:
        await self._tokens_per_s(door, None)
        return await self._speed_ups(door, {CONTROLLER: None})

    def _lengths(self) -> dict[str, int]:
        return {"k": best_length(self._chance), str(MOST_LENGTH): MOST_LENGTH}

    async def _speed_ups(self, door: HttpDoor, ways: Mapping[str, Mapping[str, Any] | None]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {way: [] for way in ways}
        plain = await self._tokens_per_s(door, OFF)
        for _ in range(self._arguments.rounds):
            for way, speculation in ways.items():
                found[way].append(await self._tokens_per_s(door, speculation) / plain)
        return found

    async def _tokens_per_s(self, door: HttpDoor, speculation: Mapping[str, Any] | None) -> float:
        """Speed of one stream after its first tokens; plain steps are all alike, so few of them do."""
        seconds = self._arguments.seconds * (1.0 if speculation is not OFF else 0.25)

        def make(number: int) -> Ask:
            tokens = self._arguments.max_tokens
            return Ask(prompt=f"text number {number}, and ", max_tokens=tokens, seed=number, speculation=speculation)

        completions = await keep_busy(door, make, 1, seconds)
        for number, each in enumerate(completions):
            self._texts[number].add(each.text)
        return Completions(completions).decode_tokens_per_s


def profile(width: int) -> dict[str, Any]:
    """The constants of the literature as a profile, for drafters that make so many guesses below a node."""
    device = {"name": "A100", "kv_tokens": 65536, "max_sessions": 8, "max_rows": 512}
    drafter = {
        "name": "A100", "rows": (1, 64), "seconds": (DRAFT_MS / 1e3, DRAFT_MS / 1e3), "kv_tokens": 65536,
        "draft_width": width, "draft_rows_per_session": width,
    }  # fmt: skip
    # One row is a plain step; guesses beside it make it a verification.
    target = {**device, "rows": (1, 2, 64), "seconds": (TOKEN_MS / 1e3, VERIFY_MS / 1e3, VERIFY_MS / 1e3)}
    return {
        "name": "the literature's 70B on an A100",
        "kind": "computed",
        "origin": "constants that papers use",
        "target": target,
        "drafter": drafter,
        "colocated": drafter,
        "colocated_kv_tokens": 32768,
        "acceptance": {},
        "most_nodes": MOST_LENGTH,
    }


if __name__ == "__main__":
    main()
