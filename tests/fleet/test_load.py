"""The replayer before real fleets: speculation off and adaptive at one, a fixed number of drafts at the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

import pytest
from loadtest.load import figures_of, open_door, run_windows
from loadtest.prompts import open_prompts
from loadtest.traffic.config import ADAPTIVE, HTTP, OFF, ON, LoadConfig
from loadtest.traffic.figures import Window
from loadtest.traffic.plan import Source, requests_of, windows_of
from loadtest.traffic.report import print_tables

from paceline.cluster.checkpoints import DEMO_TARGET
from tests.support.fleet_runner import FleetRunner

pytestmark = pytest.mark.full


def test_a_replay_in_all_modes_loses_no_token_changes_no_text_and_reports_it(
    trees: FleetRunner, chains: FleetRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LoadConfig(
        minutes=0.025,
        window_s=1.0,
        slot_s=0.25,
        rate="8",
        output_scale=0.1,
        max_output_tokens=40,
    )
    source = Source(config)
    prompts, described = open_prompts(None, DEMO_TARGET, max_tokens=1024, seed=1)
    requests = requests_of(source.arrivals(8.0), prompts, config)
    windows = windows_of(requests, config.duration_s, config.window_s)
    urls = {OFF: trees.url, ON: chains.url, ADAPTIVE: trees.url}

    async def run() -> list[Mapping[str, Sequence[Window]]]:
        doors = {mode: open_door(HTTP, url) for mode, url in urls.items()}
        return [dict(so_far) async for so_far in run_windows(doors, windows)]

    runs = asyncio.run(run())[-1]

    assert len(windows) == 2
    for of in runs.values():
        answers = [each for window in of for each in window]
        assert [each.error for each in answers] == [""] * len(requests)
        assert [each.num_tokens for each in answers] == [each.max_tokens for each in requests]
    plan = {**source.described(8.0), "prompts": described}
    figures = figures_of(config, plan, runs, windows)
    assert figures["checks"]["no_errors"]
    assert figures["checks"]["same_texts"]
    assert figures["modes"][OFF]["draft_tokens_per_step"] == 0.0
    assert figures["modes"][ON]["draft_tokens_per_step"] > 0.0
    assert sum(bucket["requests"] for bucket in figures["buckets"].values()) == len(requests)

    assert json.loads(json.dumps(figures)) == figures
    print_tables(figures)
    table = capsys.readouterr().out.partition("by mode")[2].partition("by load")[0]
    rows = [line.split()[:3] for line in table.splitlines()[2:] if line]
    assert rows == [[mode, str(len(requests)), "0"] for mode in urls]
