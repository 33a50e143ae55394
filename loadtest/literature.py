"""The table of the literature, run by the real fleet at its own constants: `make bench NAME=literature`.

A 70B target on an A100 that takes 7 ms a token and 8 ms a verification, and 0.5 ms a drafted token; guesses are right
with one chance everywhere. Devices are simulated, the services are real, one stream. For each chance:

* formula: (1 - a^(k+1)) / (1 - a) tokens a round of 8 + 0.5 k ms (Leviathan, Kalman and Matias, 2023, theorem 3.8), at
  the length k that is best by it, over 7 ms a token: the drafter and the target take turns
* fixed: the fleet, chains of that length; controller: the fleet as it is by default
* overlapped: the same tokens in rounds of 8 ms, of a drafter that drafts all of them while the target verifies

A tier drafts while the target verifies, so it may beat the formula. The bench is met when all texts are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.bench import Table, bench_parser, report, run
from loadtest.client import asks_of, run_batch, same_texts
from loadtest.fleet import bench_fleet

TOKEN_MS, VERIFY_MS, DRAFT_MS = 7.0, 8.0, 0.5
CHANCES, LENGTHS = (0.9, 0.8, 0.7, 0.5, 0.3), range(1, 17)


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("literature", __doc__)
    parser.add_argument("--chances", nargs="+", type=float, default=CHANCES, help="acceptance (default 0.9 to 0.3)")
    parser.add_argument("--prompts", type=int, default=4, help="texts each way (default 4)")
    parser.add_argument("--max-tokens", type=int, default=400, help="of a text (default 400)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all rows; True when no way has changed a text."""
    table, rows = Table(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "literature.json"
        path.write_text(json.dumps(profile()), encoding="utf-8")
        for chance in arguments.chances:
            length = max(LENGTHS, key=lambda k: formula(chance, k))
            fixed = {"policy": "fixed", "num_speculative_tokens": length}
            ways: Mapping[str, Mapping[str, Any]] = {"fixed": fixed, "controller": {}}
            results = {way: await measure_way(path, chance, settings, arguments) for way, settings in ways.items()}
            row = {
                "acceptance": chance,
                "k": length,
                "formula": round(formula(chance, length), 2),
                "overlapped": round(expected(chance, length) * TOKEN_MS / VERIFY_MS, 2),
                **{way: speed_up for way, (speed_up, _) in results.items()},
                "same_texts": same_texts(each for _, batches in results.values() for each in batches),
            }
            table.add(row)
            rows.append(row)
    return report("literature", simulated=True, rows=rows, ok=all(row["same_texts"] for row in rows))


def expected(chance: float, length: int) -> float:
    """Tokens a round of a chain of this length."""
    return (1.0 - chance ** (length + 1)) / (1.0 - chance)


def formula(chance: float, length: int) -> float:
    """Speed-up over plain decoding when drafter and target take turns."""
    return expected(chance, length) * TOKEN_MS / (VERIFY_MS + DRAFT_MS * length)


async def measure_way(
    path: Path, chance: float, settings: Mapping[str, Any], arguments: argparse.Namespace
) -> tuple[float, list[Any]]:
    """Returns the speed-up over plain decoding of the same fleet, and all its batches."""
    spoken = {"method": "draft_model", **settings}
    async with bench_fleet(simulate=str(path), acceptance=chance, speculative_config=json.dumps(spoken)) as fleet:
        asks = asks_of(arguments.prompts, arguments.max_tokens)
        plain = [replace(ask, speculation={"enabled": False}) for ask in asks]
        title = f"acceptance {chance}"
        await run_batch(fleet.gateway_url, asks, 1, f"{title}, warming up")
        batches = [await run_batch(fleet.gateway_url, each, 1, title) for each in (plain, asks, plain, asks)]
        speeds = [each.decode_tokens_per_s for each in batches]
        return round(statistics.fmean(speeds[1::2]) / statistics.fmean(speeds[::2]), 2), batches


def profile() -> dict[str, Any]:
    """The constants of the literature as a profile."""
    device = {"name": "A100", "kv_tokens": 65536, "max_sessions": 8, "max_rows": 512}
    drafter = {
        "name": "A100", "rows": (1, 64), "seconds": (DRAFT_MS / 1e3, DRAFT_MS / 1e3), "kv_tokens": 65536,
        "draft_width": 1, "draft_rows": 16, "draft_rows_per_session": 1,
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
        "most_nodes": 16,
    }


if __name__ == "__main__":
    main()
