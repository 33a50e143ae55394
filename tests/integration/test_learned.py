"""What a verifier has learned, from one process to the next: real engines, real files, and files of strangers."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.draft_policy import Goodput
from paceline.core.params import SamplingParams
from paceline.core.step_time import StepCost
from paceline.engine.loading import model_identity
from paceline.service.learned import KEEP_NOTHING, TunedState
from paceline.verifier.config import VerifierConfig
from paceline.verifier.own_engine import learned_file
from tests.support.engines import EnginePair

COST = StepCost(rows=(1, 128), seconds=(0.010, 0.050))
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


@pytest.fixture
def file(tmp_path: Path) -> TunedState:
    return TunedState(tmp_path / "new folder" / "learned.json")


def fresh(folders) -> EnginePair:
    pair = EnginePair(*folders, policy=Goodput())
    pair.target._policy.start_from(COST)
    return pair


def experienced(folders) -> EnginePair:
    """An engine whose drafter guessed for a while, on a machine that got slow."""
    pair = fresh(folders)
    pair.submit("s", list(range(5, 15)), GREEDY)
    for _ in range(40):
        pair.round()
    for _ in range(200):
        guesses, step_s = 3 * pair.target._policy.enter(1), 3 * COST.at(4)
        pair.target._policy.observe(roots=1, guesses=guesses, tokens=1 + guesses, step_s=step_s, cycle_s=step_s)
    return pair


async def written(file: TunedState, pair: EnginePair) -> None:
    """Keeps it as a host does, which is stopped at once."""
    keeping = asyncio.create_task(file.keep(pair.target.learned))
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_successor_begins_where_its_predecessor_ended(tiny_pair, file: TunedState) -> None:
    before, after = experienced(tiny_pair), fresh(tiny_pair)
    await written(file, before)
    file.load_into(after.target)
    old, new = before.target._policy, after.target._policy
    assert new.times.factors == old.times.factors
    assert new.mode.learned() == pytest.approx(old.mode.learned())
    assert new.mode.learned() != fresh(tiny_pair).target._policy.mode.learned()
    after.submit("t", list(range(5, 15)), replace(GREEDY, max_tokens=4))
    after.round()
    known, learned = (each.target.learned()["calibrations"] for each in (after, before))
    assert known == learned


async def test_what_was_learned_changes_no_token(tiny_pair, file: TunedState) -> None:
    await written(file, experienced(tiny_pair))
    texts = []
    for learned in (file, TunedState(None)):
        pair = fresh(tiny_pair)
        learned.load_into(pair.target)
        pair.submit("s", list(range(5, 15)), replace(GREEDY, temperature=0.8, seed=3))
        while pair.sessions["s"].result is None:
            pair.round()
        texts.append(pair.sessions["s"].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"policy": {}, "calibrations": {}}',
        '{"policy": {"step_times": [1], "mode_rates": []}, "calibrations": {}}',
        '{"policy": {"step_times": {}, "mode_rates": [], "rehearsed": ""}, "calibrations": {"tier coupled": [1]}}',
        '{"policy": {}, "calibrations": {"tier greedy coupled": [NaN, 0, 1, 1, 0]}}',
        '{"policy": {}, "calibrations": {"tier greedy coupled": [1, 0, -1, 1, 0]}}',
        '{"policy": {}, "calibrations": 3}',
        "[" * 100_000,
        '{"policy": {}, "calibrations": {"tier greedy coupled": [1, 0, 1, 1, 1e200]}}',
        '{"policy": {}, "calibrations": {"tier greedy coupled": [Infinity, 0, 1, 1, 0]}}',
        "9" * 5_000,
        "\udc80",
        '{"policy": {"step_times": {}, "mode_rates": [1.0], "rehearsed": ""}, "calibrations": {}}',
        '{"policy": {"step_times": {"plain": [1]}, "mode_rates": [], "rehearsed": ""}, "calibrations": {}}',
        '{"policy": {"step_times": {"plain": [1, NaN]}, "mode_rates": [], "rehearsed": ""}, "calibrations": {}}',
        '{"policy": {"step_times": {"other": [1, 1]}, "mode_rates": [], "rehearsed": ""}, "calibrations": {}}',
        '{"policy": {"step_times": {}, "mode_rates": []}, "calibrations": {}}',
    ],
)
def test_a_file_of_something_else_is_like_none(tiny_pair, file: TunedState, content: str, caplog) -> None:
    pair = fresh(tiny_pair)
    before = pair.target.learned()
    file.path.parent.mkdir()
    file.path.write_text(content, errors="surrogateescape")
    with caplog.at_level(logging.WARNING):
        file.load_into(pair.target)
    assert "cannot be used" in caplog.text
    assert pair.target.learned() == before


async def test_a_folder_that_cannot_be_written_costs_a_warning(tiny_pair, tmp_path: Path, caplog) -> None:
    (tmp_path / "a file").write_text("")
    with caplog.at_level(logging.WARNING):
        await written(TunedState(tmp_path / "a file" / "learned.json"), fresh(tiny_pair))
    assert "cannot be kept" in caplog.text


def test_each_machine_model_and_way_to_run_has_a_file_of_its_own(tiny_pair, tmp_path: Path) -> None:
    config = VerifierConfig(model=tiny_pair[0], learned_dir=str(tmp_path))
    identity = model_identity(tiny_pair[0], "target")

    def path(**settings) -> Path | None:
        return learned_file(replace(config, **settings), identity, {}).path

    assert path() == path(port=1234)
    assert len({path(), path(threads=7), path(speculative_config='{"method": "ngram"}'), path(learned_dir="")}) == 4
    assert path(learned_dir=KEEP_NOTHING) is None
    assert learned_file(config, replace(identity, weights_hash="other"), {}).path != path()
    cached = learned_file(replace(config, learned_dir=""), identity, {"XDG_CACHE_HOME": str(tmp_path)}).path
    assert cached.parent == tmp_path / "paceline" / "learned"


def test_nothing_is_read_where_nothing_is_kept(tiny_pair, file: TunedState) -> None:
    pair = fresh(tiny_pair)
    before = json.dumps(pair.target.learned())
    for nothing in (file, TunedState(None)):
        nothing.load_into(pair.target)
    assert json.dumps(pair.target.learned()) == before
