"""All figures that a machine with a GPU can give in 8 minutes: `make gpu-contact`, or `make bench NAME=gpu`.

Parts, the most wanted first, each a process with its own limit, so that one that fails or hangs takes no other with it:

* check: the tests of kernels, steps and the choice of tokens, on the card instead of in an interpreter
* steps: steps of an 8B and a 1B of random weights at 1 to 256 sessions, from the batch to the tokens on the host
* rounds: whole engines, plain and with the drafter inside, acceptance IMPOSED
* attention, sampler: microseconds of a layer's attention, and of choosing and ranking
* fleet: gateway, verifier on the card and a drafter at the measured pace of the 1B on a card of its own; every step of
  the target is computed, texts and acceptance are IMPOSED
* facts, kernels: bandwidth and products of the card; kernels of a step, and the longest of them

Each figure is a line of JSON, written at once. The table of steps becomes a profile, for `paceline up --simulate`,
`paceline plan` and `make bench NAME=scale`. Without a GPU the exit status is 3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loadtest.bench import bench_parser
from paceline.simulated.profile import MEASURED, Profile, write_profile
from paceline.simulated.roofline import computed_profile

BUDGET_S = 470.0
NO_GPU = 3
# Lines of a part's log that are shown.
MOST_LINES = 60
CHECKS = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit/engine/cuda"]
# Most seconds of each part.
PARTS = {
    "check": 90,
    "steps": 100,
    "rounds": 90,
    "attention": 40,
    "sampler": 30,
    "fleet": 120,
    "facts": 45,
    "kernels": 40,
}
# Variables: the part that runs, and the file to which all parts add their lines.
PART, LINES = "GPU_CONTACT_PART", "GPU_CONTACT_LINES"
# A profile has the devices' shares of memory and prices from here.
LIKE = "8b+1b@h100+h100"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line; runs all parts, or one of them in this process."""
    parser = bench_parser("gpu", __doc__)
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder for gpu.jsonl, logs and the profile")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.stderr.write(
            f"gpu: this machine has no GPU that torch {torch.__version__} can use; an 8B of bfloat16 needs 24 GB\n"
        )
        raise SystemExit(NO_GPU)
    if arguments.part is None:
        raise SystemExit(0 if contact(arguments.out, arguments.parts) else 1)
    # Kernels are compiled by Triton, which is there where there is a GPU.
    from loadtest import gpu_fleet, gpu_parts

    if arguments.part == "fleet":
        gpu_fleet.measure(arguments.out / "profile.json")
    else:
        gpu_parts.PARTS[arguments.part](gpu_parts.Contact(device=torch.device("cuda")))


def contact(out: Path, parts: Sequence[str]) -> bool:
    """Runs parts while there is time; true when all of them ended well."""
    out.mkdir(parents=True, exist_ok=True)
    lines, began_s, well = out / "gpu.jsonl", time.monotonic(), True
    lines.unlink(missing_ok=True)
    for part in parts:
        left_s = BUDGET_S - (time.monotonic() - began_s)
        ended = _run(part, out, lines, min(PARTS[part], left_s)) if left_s > 10 else "no time was left"
        print(f"== {part}: {ended}", flush=True)
        well = well and ended == "ok"
        if part == "steps" and (profile := measured(_figures(lines))) is not None:
            write_profile(profile, out / "profile.json")
    return well


def _run(part: str, out: Path, lines: Path, limit_s: float) -> str:
    """Runs a part, which adds its figures to the lines as they come, and says the rest in a log of its own."""
    own = ["-m", "loadtest.gpu", "--part", part, "--out", str(out)]
    command = [sys.executable, "-u", *(CHECKS if part == "check" else own)]
    path = ":".join(["services", ".", *filter(None, [os.environ.get("PYTHONPATH")])])
    log = out / f"gpu-{part}.log"
    with log.open("w") as said:
        environ = {**os.environ, "PYTHONPATH": path, PART: part, LINES: str(lines)}
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environ)
        try:
            status = process.wait(limit_s)
            ended = "ok" if status == 0 else f"exit status {status}; see {log}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"out of time after {limit_s:.0f} s; see {log}"
    for line in log.read_text(errors="replace").splitlines()[-MOST_LINES:]:
        print(line, flush=True)
    with lines.open("a") as figures:
        figures.write(json.dumps({"part": part, "ended": ended}) + "\n")
    return ended


def _figures(lines: Path) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, lines.read_text().splitlines())


def measured(figures: Iterator[dict[str, Any]]) -> Profile | None:
    """A profile of both models by their steps; None: the steps of one of them are missing."""
    tables: dict[str, dict[tuple[int, int, int], float]] = {}
    for each in figures:
        if "step" in each:
            tables.setdefault(each["model"], {})[tuple(each["step"])] = each["ms"] / 1e3
    if len(tables) != 2:
        return None
    like = computed_profile(LIKE)
    target, drafter = tables.values()
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "a card"
    return replace(
        like,
        name=f"8B on {place}, 1B on another",
        kind=MEASURED,
        origin=f"steps of our own engine on {place}, random weights; acceptance assumed",
        target=replace(like.target, **_device(target)),
        drafter=replace(like.drafter, **_device(drafter)),
        colocated=replace(like.colocated, **_device(drafter)),
    )


def _device(table: dict[tuple[int, int, int], float]) -> dict[str, Any]:
    """Fields of `DeviceFacts`: time by rows, and by tokens of KV, from steps of the same rows over other contexts."""
    most = max(sessions for sessions, rows, _ in table if rows == 1 and _longest(table, sessions))
    short, long = (
        each(context for sessions, rows, context in table if (sessions, rows) == (most, 1)) for each in (min, max)
    )
    more_s = table[most, 1, long] - table[most, 1, short]
    kv_token_s = max(0.0, more_s / (most * (long - short)))
    rows, seconds, least = [], [], 0.0
    for (sessions, each, context), taken_s in sorted(table.items()):
        if each == 1 and context == short:
            least = max(least, taken_s - kv_token_s * sessions * context)
            rows.append(sessions)
            seconds.append(least)
    return {"rows": tuple(rows), "seconds": tuple(seconds), "session_s": 0.0, "kv_token_s": kv_token_s}


def _longest(table: dict[tuple[int, int, int], float], sessions: int) -> bool:
    """Whether steps of so many sessions were timed over more than one context."""
    return len({context for count, rows, context in table if (count, rows) == (sessions, 1)}) > 1


if __name__ == "__main__":
    main()
