"""Cost of a greedy tenant to a modest one at the same gateway: `make bench NAME=tenants`.

Two API keys and one fleet of real services at simulated devices, whose texts show every error. The modest tenant runs a
few streams over both doors, and once in a while does what an operator or an agent does: looks for a sign of life, opens
the console, asks for an answer with a schema of its own, keeps a response and reads it back. The greedy one takes all
it can get in one way (`loadtest.greedy`): bodies that never come, schemas that take long to compile, grammars that use
up their lexers, kept responses, viewers of the console, streams resumed again and again, texts that take long to be
tokenized, prompts that take long to be read. In two more turns nobody is greedy: a process computes on every core, to
show what that alone costs here, and the store hangs.

By turns the modest tenant is alone and beside each kind of greed. In the table: p50 and p99 of its whole answers and of
its first tokens, the ratio of p99 to that alone, its standard error over the rounds, its errands, and what the greedy
one was answered. Judged are: nothing of the modest tenant's is lost, doubled, changed, refused or in error; its p99
grows by less than half, beside long prompts that of its first tokens, as all share the length of steps; and no key
passes its limit of requests. Both tenants, the gateway and the other services share this machine's cores, so greed also
costs what any load costs: compare the spread of the turns alone.

    make bench NAME=tenants ARGS='--kinds bodies kept --rounds 5'
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from loadtest.bench import bench_parser, report, run, show
from loadtest.fleet import bench_fleet
from loadtest.greedy import COMPLETIONS, CONSOLE, KINDS, LEXER_PATTERN, RESPONSES
from loadtest.histories import History, Kind, Verdict, judge
from loadtest.resuming_http import ResumingHttpClient
from loadtest.steadfast import Answer, Request, keep_running, mixed_requests, over, run_each
from loadtest.trial import Trial, rounded_error, take_turns
from paceline.client.resuming import ResumingClient
from paceline.cluster.local import LocalFleet
from paceline.gateway.access.keys import KeyConfig, line_of, new_key
from paceline.gateway.sessions.take_over import FREE_RESUMPTIONS
from paceline.simulated.model import find_profile
from paceline.simulated.profile import write_profile

PROFILE = "70b+0.5b@4xh100+h100"
# The default of `--max-num-batched-tokens`.
STEP_ROWS = 512
ALONE, BUSY, HANGING_STORE = "alone", "busy cores", "hanging store"
MODEST = "modest"
MOST_GROWTH = 1.5
REQUESTS_PER_MINUTE = 60
MOST_PASSED = REQUESTS_PER_MINUTE * (1 + FREE_RESUMPTIONS)
# Small enough that greed fills it within a turn.
ROOM_BYTES = 1024 * 1024
# The modest one limits its requests too, so that they are counted in the store.
MODEST_PER_MINUTE = 50_000
GREEDY_FIRST_S = 2.0
ERRAND_EVERY_S, ERRAND_S = 0.5, 10.0
REST_S = 2.0


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("tenants", __doc__)
    kinds = [BUSY, *KINDS, HANGING_STORE]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="ways to be greedy (default all)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a turn (default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind (default 3)")
    parser.add_argument("--streams", type=int, default=6, help="of the modest tenant, side by side (default 6)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens a stream (default 32)")
    run(parser, measure)


@dataclass(slots=True, kw_only=True)
class Turn:
    """Results of a turn.

    Attributes:
        histories: Histories of the modest tenant's streams.
        errands_s: How long each of its errands took.
        failed: Errands that failed, and why.
        greedy: Statuses that the greedy tenant got.
    """

    histories: Sequence[History] = ()
    errands_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    greedy: Mapping[str, int] = field(default_factory=dict)

    @property
    def answers_s(self) -> list[float]:
        """From the question to the end, of each whole answer."""
        return [each.events[-1].at_s - each.events[0].at_s for each in self.histories if each.whole]

    @property
    def firsts_s(self) -> list[float]:
        """From the question to the first piece."""
        return [each.pieces[0].at_s - each.events[0].at_s for each in self.histories if each.pieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All turns by kind, in their order, and what is wrong with the modest tenant's streams."""

    turns: Mapping[str, Sequence[Turn]]
    verdict: Verdict

    @property
    def refused(self) -> int:
        """How often the modest tenant was refused."""
        return sum(
            event.kind is Kind.REFUSED for each in self._all for history in each.histories for event in history.events
        )

    @property
    def failed(self) -> Counter[str]:
        """The modest tenant's errands that failed."""
        return sum((each.failed for each in self._all), Counter[str]())

    @property
    def most_passed(self) -> int:
        """The most that a key with a limit of requests was answered within a turn, which is less than a minute."""
        limited = [
            turn for kind, turns in self.turns.items() if kind in KINDS and KINDS[kind].limited for turn in turns
        ]
        return max((turn.greedy.get("200", 0) for turn in limited), default=0)

    @property
    def unharmed(self) -> bool:
        """Whether the modest tenant got all that was due, and the greedy one no more."""
        return self.verdict.clean and not self.refused and not self.failed and self.most_passed <= MOST_PASSED

    @property
    def _all(self) -> Iterator[Turn]:
        return itertools.chain.from_iterable(self.turns.values())


async def measure(options: argparse.Namespace) -> bool:
    """Runs the bench; True when the modest tenant came to no harm and its p99 grew by less than half."""
    return print_report(await take_all_turns(options))


async def take_all_turns(options: argparse.Namespace) -> Outcome:
    """Starts a fleet and takes turns at it."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        keys = _write_keys(Path(folder) / "keys", options.rounds)
        limits = (f"--api-keys-file={folder}/keys", f"--response-room-bytes={ROOM_BYTES}")
        profile = Path(folder) / "profile.json"
        found = find_profile(PROFILE)
        write_profile(replace(found, target=replace(found.target, max_rows=STEP_ROWS)), profile)
        async with (
            bench_fleet(simulate=str(profile), acceptance=0.8, gateway_arg=limits) as fleet,
            _tenant(fleet, keys[MODEST], options) as tenant,
        ):
            reference = await tenant.reference()
            numbers = {kind: itertools.count() for kind in KINDS}

            async def one(kind: str) -> Turn:
                async with _disturbing(kind, fleet, keys, numbers) as greedy:
                    turn = await tenant.turn(options.seconds)
                turn.greedy = greedy
                await asyncio.sleep(REST_S)
                return turn

            turns = await take_turns([ALONE, *options.kinds], one, rounds=options.rounds, title="tenants")
    histories = [history for each in turns.values() for turn in each for history in turn.histories]
    return Outcome(turns=turns, verdict=judge(histories, reference))


def _write_keys(path: Path, rounds: int) -> dict[str, str]:
    """Makes the file of keys; a greedy tenant has a new one for each turn, so that none has used up its time before."""
    limits = {
        f"{kind}-{number}": REQUESTS_PER_MINUTE
        for kind, greed in KINDS.items()
        if greed.limited
        for number in range(rounds)
    }
    names = [MODEST, *(f"{kind}-{number}" for kind in KINDS for number in range(rounds))]
    keys = {name: new_key() for name in names}
    lines = [
        line_of(
            KeyConfig(name=name, requests_per_minute=limits.get(name, MODEST_PER_MINUTE if name == MODEST else None)),
            key,
        )
        for name, key in keys.items()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant:
    """The modest tenant: its streams over both doors, and its errands."""

    http: httpx.AsyncClient
    answers: Sequence[Answer]
    requests: Sequence[Request]

    async def reference(self) -> list[History]:
        """Answers to its requests while nothing else runs.

        Raises:
            RuntimeError: A request fails.
        """
        # The first door brings tokens as well as text; all are warm afterwards.
        for answer in self.answers[::-1]:
            histories = await run_each(answer, self.requests)
        return histories

    async def turn(self, seconds: float) -> Turn:
        """Runs streams and errands for some seconds."""
        turn = Turn()
        running_errands = asyncio.create_task(self._run_errands(turn))
        ends_s = time.perf_counter() + seconds
        turn.histories = await keep_running(
            self.answers, self.requests, lambda: time.perf_counter() >= ends_s, lambda _: None
        )
        running_errands.cancel()
        await asyncio.gather(running_errands, return_exceptions=True)
        return turn

    async def _run_errands(self, turn: Turn) -> None:
        kept = await self._keep()
        for number in itertools.count():
            errands: Mapping[str, Callable[[], Awaitable[object]]] = {
                "sign of life": partial(self._get, "/livez"),
                "console": partial(self._get, CONSOLE),
                "schema of its own": partial(
                    self._complete, structured_outputs={"json": _schema(f"{time.time_ns()}-{number}")}
                ),
                "grammar of both": partial(self._complete, structured_outputs={"regex": LEXER_PATTERN}),
                "kept response": partial(self._get, f"{RESPONSES}/{kept}"),
            }
            for name, errand in errands.items():
                begun_s = time.perf_counter()
                try:
                    async with asyncio.timeout(ERRAND_S):
                        await errand()
                except (httpx.HTTPError, TimeoutError) as error:
                    turn.failed[f"{name}: {type(error).__name__} {error}"[:200]] += 1
                turn.errands_s.append(time.perf_counter() - begun_s)
            await asyncio.sleep(ERRAND_EVERY_S)

    async def _keep(self) -> str:
        response = await self.http.post(RESPONSES, json={"input": "Keep this.", "max_output_tokens": 1})
        return str(response.raise_for_status().json()["id"])

    async def _get(self, path: str) -> None:
        (await self.http.get(path)).raise_for_status()

    async def _complete(self, **fields: Any) -> None:
        body = {"prompt": "An answer:", "max_tokens": 4, **fields}
        (await self.http.post(COMPLETIONS, json=body)).raise_for_status()


def _schema(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"enum": [1, 2]}}, "required": [name]}


@asynccontextmanager
async def _tenant(fleet: LocalFleet, key: str, options: argparse.Namespace) -> AsyncIterator[_Tenant]:
    headers = {"authorization": f"Bearer {key}"}
    requests = mixed_requests(options.streams, options.max_tokens)
    async with (
        ResumingClient([fleet.endpoint("gateway").second_address], api_key=key) as over_grpc,
        ResumingHttpClient([fleet.gateway_url], api_key=key) as over_http,
        httpx.AsyncClient(base_url=fleet.gateway_url, headers=headers, trust_env=False, verify=False) as http,
    ):
        yield _Tenant(http=http, answers=[over(over_grpc), over(over_http)], requests=requests)


@asynccontextmanager
async def _disturbing(
    kind: str, fleet: LocalFleet, keys: Mapping[str, str], numbers: Mapping[str, Iterator[int]]
) -> AsyncIterator[dict[str, int]]:
    """Somebody is greedy, or the store hangs, while a block runs; afterwards the statuses are in what it yields."""
    statuses: dict[str, int] = {}
    if kind == HANGING_STORE:
        fleet.pause("valkey")
        try:
            yield statuses
        finally:
            fleet.resume("valkey")
    elif kind == ALONE:
        yield statuses
    elif kind == BUSY:
        async with _processes("-c", "while True: pass", count=os.cpu_count() or 1):
            yield statuses
    else:
        key = keys[f"{kind}-{next(numbers[kind])}"]
        async with _processes("-m", "loadtest.greedy", kind, fleet.gateway_url, key) as [process]:
            assert process.stdout is not None, "it has a pipe"
            await process.stdout.readline()
            await asyncio.sleep(GREEDY_FIRST_S)
            yield statuses
            output, _ = await process.communicate(b"")
            statuses.update(json.loads(output))


@asynccontextmanager
async def _processes(*arguments: str, count: int = 1) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Runs some of Python's processes while a block runs."""
    running = [
        await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        yield running
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.wait()


def print_report(outcome: Outcome) -> bool:
    """Prints the table and the figures."""
    alone = outcome.turns[ALONE]
    rows, trials = {}, {}
    for kind, turns in outcome.turns.items():
        measured = _first_p99_ms if kind in KINDS and KINDS[kind].lengthens_steps else _p99_ms
        trials[kind] = Trial.of(map(measured, turns), map(measured, alone))
        rows[kind] = _figures(turns) | {
            "ratio": round(trials[kind].ratio, 2),
            "error": rounded_error(trials[kind]),
            "greedy": " ".join(
                f"{status}:{count}" for turn in turns[-1:] for status, count in sorted(turn.greedy.items())
            ),
        }
    show({"beside": kind, **row} for kind, row in rows.items())
    for problem, count in outcome.failed.items():
        print(f"{count} errands failed: {problem}")
    grown = [kind for kind, trial in trials.items() if not trial.meets(most=MOST_GROWTH)]
    return report(
        "tenants",
        simulated=True,
        rows=rows,
        p99_alone_ms=[round(_p99_ms(turn)) for turn in alone],
        streams=sum(len(turn.histories) for turns in outcome.turns.values() for turn in turns),
        **asdict(outcome.verdict),
        refused=outcome.refused,
        errands_failed=outcome.failed.total(),
        most_passed=outcome.most_passed,
        grown=grown,
        ok=outcome.unharmed and not grown,
    )


def _p99_ms(turn: Turn) -> float:
    return 1e3 * float(np.quantile(turn.answers_s, 0.99))


def _first_p99_ms(turn: Turn) -> float:
    return 1e3 * float(np.quantile(turn.firsts_s, 0.99))


def _figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Medians of the rounds, in milliseconds; the least and the most p99 of the rounds."""
    p99s = [_p99_ms(turn) for turn in turns]
    return {
        "answers": sum(len(turn.answers_s) for turn in turns),
        "p50_ms": round(statistics.median(1e3 * statistics.median(turn.answers_s) for turn in turns)),
        "p99_ms": round(statistics.median(p99s)),
        "p99s_ms": f"{min(p99s):.0f}-{max(p99s):.0f}",
        "first_p99_ms": round(statistics.median(map(_first_p99_ms, turns))),
        "errand_p50_ms": round(1e3 * statistics.median(itertools.chain.from_iterable(t.errands_s for t in turns))),
        "errand_max_ms": round(1e3 * max(itertools.chain.from_iterable(t.errands_s for t in turns))),
    }
