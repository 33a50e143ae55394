"""The replayer and Locust before a real gateway with both doors; its verifiers follow a script."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loadtest.client import replay
from loadtest.load import asked_in, open_door
from loadtest.locust import LocustConfig, missing_or_failed, read_rows, run_locust
from loadtest.shapes import SHAPES, num_users
from loadtest.streams import Ask
from loadtest.traffic.config import ADAPTIVE, GRPC, HTTP, OFF

from tests.support.scripted_fleet import Script, ScriptedFleet, scripted_fleet

NUM_REQUESTS = 12


@pytest.fixture
async def fleet(tmp_path):
    async with scripted_fleet(tmp_path) as started:
        yield started


def requests(max_tokens: int = 10) -> list[Ask]:
    return [
        Ask(index=n, due_s=0.01 * n, prompt="abc", max_tokens=max_tokens, temperature=0.5, seed=n)
        for n in range(NUM_REQUESTS)
    ]


def address(fleet: ScriptedFleet, kind: str) -> str:
    return f"http://{fleet.addresses.http}" if kind == HTTP else fleet.addresses.grpc


@pytest.mark.parametrize("kind", [HTTP, GRPC])
async def test_every_token_of_every_request_is_timed(fleet, kind) -> None:
    door = open_door(kind, address(fleet, kind))
    answers = await replay(door, requests())
    await door.close()
    assert [each.error for each in answers] == [""] * NUM_REQUESTS
    assert [each.text for each in answers] == [fleet.letters(seed, 10, "abc") for seed in range(NUM_REQUESTS)]
    # The script commits three tokens a step; the last one is left over.
    assert all([count for _, count in each.counts] == [3, 3, 3, 1] for each in answers)
    assert all(each.late_s >= 0.0 for each in answers)
    assert all(0.0 < each.ttft_s <= each.e2e_s for each in answers)
    assert all(each.num_prompt_tokens > 0 and each.record["num_draft_tokens"] == 9 for each in answers)


@pytest.mark.parametrize("kind", [HTTP, GRPC])
async def test_only_mode_off_asks_for_no_speculation(fleet, kind) -> None:
    for mode in (OFF, ADAPTIVE):
        door = open_door(kind, address(fleet, kind))
        await replay(door, asked_in(mode, requests()[:1]))
        await door.close()
    assert [each.speculation.enabled for each in fleet.verifier.requests] == [False, True]


async def test_a_request_does_not_wait_for_the_one_before(fleet) -> None:
    fleet.verifier.script = Script(pause_after=3)
    door = open_door(HTTP, address(fleet, HTTP))

    async def release() -> int:
        sessions = [await fleet.verifier.paused.get() for _ in range(NUM_REQUESTS)]
        for session in sessions:
            fleet.verifier.resume(session)
        return len(set(sessions))

    answers, num_at_once = await asyncio.gather(replay(door, requests()), release())
    assert num_at_once == NUM_REQUESTS
    assert not any(each.error for each in answers)


@pytest.mark.parametrize(("kind", "said"), [(HTTP, "status 400"), (GRPC, "INVALID_ARGUMENT")])
async def test_refusals_are_told_apart_by_kind(fleet, kind, said) -> None:
    door = open_door(kind, address(fleet, kind))
    answers = await replay(door, requests(max_tokens=100_000)[:2])
    await door.close()
    assert [each.error for each in answers] == [said, said]


@pytest.mark.parametrize(("kind", "said"), [(HTTP, "broke off"), (GRPC, "UNAVAILABLE")])
async def test_a_stream_that_breaks_off_is_an_error(fleet, kind, said) -> None:
    fleet.verifier.script = Script(fail_after=3, error=RuntimeError("a bug"))
    door = open_door(kind, address(fleet, kind))
    answers = await replay(door, requests()[:1])
    await door.close()
    assert [each.error for each in answers] == [said]


async def test_a_short_answer_is_an_error(fleet) -> None:
    fleet.verifier.script = Script(tokens=(5, 6, 7, 8))
    door = open_door(HTTP, address(fleet, HTTP))
    answers = await replay(door, requests()[:1])
    assert [(each.error, each.message) for each in answers] == [("short answer", "4 of 10 tokens")]


async def test_nobody_there_is_an_error_of_its_own_kind(unused_tcp_port_factory) -> None:
    door = open_door(HTTP, f"http://127.0.0.1:{unused_tcp_port_factory()}")
    assert [each.error for each in await replay(door, requests()[:1])] == ["no connection"]


async def test_locust_users_of_both_doors_stream_without_a_failure(fleet, tmp_path: Path) -> None:
    config = LocustConfig(
        shape="ramp", users=4, seconds=1.5, max_tokens=12, prompt="abc", out=tmp_path / "run" / "load"
    )
    rows = await run_locust(config, address(fleet, HTTP), address(fleet, GRPC))
    assert missing_or_failed(rows) == []
    for door in (HTTP, GRPC):
        requests_, gaps = (int(rows[kind, door]["Request Count"]) for kind in ("TTFT", "ITL"))
        # Steps of three: the first one's tokens have no gap.
        assert gaps == 9 * requests_
    report = config.out.with_name("load.html").read_text()
    assert all(kind in report for kind in ("TTFT", "ITL", "E2E"))


def test_failures_and_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    rows = [f"{kind},{door},9,0" for door in (HTTP, GRPC) for kind in ("E2E", "TTFT", "ITL")]
    stats = tmp_path / "stats.csv"

    def problems(lines: list[str]) -> list[str]:
        stats.write_text("\n".join(["Type,Name,Request Count,Failure Count", *lines, ",Aggregated,54,1"]))
        return missing_or_failed(read_rows(stats))

    assert problems(rows) == []
    assert problems(rows[1:]) == ["none: E2E http"]
    assert problems([*rows[:-1], "ITL,grpc,9,2"]) == ["2 of 9 failed: ITL grpc"]


def test_shapes_stay_within_their_users_and_end() -> None:
    for shape in SHAPES:
        counts = [num_users(shape, share / 100.0, 8) for share in range(100)]
        assert min(counts) == (8 if shape == "steady" else 2)
        assert max(counts) == 8
        assert num_users(shape, 1.0, 8) is None
    assert [num_users("spike", share, 8) for share in (0.0, 0.35, 0.5, 0.75, 0.9)] == [2, 8, 2, 8, 2]
    assert [num_users("ramp", share, 8) for share in (0.0, 0.25, 0.5, 0.75, 0.99)] == [2, 4, 8, 4, 2]
