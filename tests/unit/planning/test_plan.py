"""`paceline plan`: fleets by their cells, the least that does, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import cli
from paceline.core.step_time import StepCost
from paceline.planning import report
from paceline.planning.arrivals import Arrival
from paceline.planning.fleets import Goal, dealt, evaluate, least_fleet
from paceline.planning.report import paces
from paceline.planning.simulation import PlannedFleet, Way
from paceline.simulated.profile import read_profile, write_profile
from paceline.simulated.roofline import computed_profile
from tests.unit.planning.facts import profile, sure_guesses

REPOSITORY = Path(__file__).parents[3]
LOAD = [Arrival(0.02 * index, 50, 20) for index in range(200)]
LOOSE = Goal(ttft_s=5.0, itl_s=5.0)


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", *argv])
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("share", "of"), [(1, 7), (3, 7), (7, 7), (9, 7)])
def test_requests_are_dealt_out_evenly(share: int, of: int) -> None:
    mine = dealt(LOAD, share, of)
    assert len(mine) == min(len(LOAD), len(LOAD) * share // of)
    assert mine == sorted(mine, key=lambda each: each.at_s)


def test_a_fleet_counts_gpus_of_both_tiers() -> None:
    facts = profile()
    two_each = replace(facts, target=replace(facts.target, num_devices=2))
    fleet = PlannedFleet(way=Way.TIER, num_verifiers=8, num_drafters=2)
    assert fleet.num_gpus(two_each) == 18
    assert fleet.price_per_hour(two_each) == 8 * 2 * 4.0 + 2 * 1.0


@pytest.mark.parametrize(
    ("way", "fleet", "cell"),
    [
        (Way.TIER, (8, 2), (4, 1)),
        (Way.TIER, (8, 1), (8, 1)),
        (Way.TIER, (4, 4), (4, 4)),
        (Way.TIER, (100, 50), (4, 2)),
        (Way.TIER, (3, 2), (3, 2)),
        (Way.TIER, (1, 1), (1, 1)),
        (Way.PLAIN, (9, 0), (4, 0)),
        (Way.COLOCATED, (2, 0), (2, 0)),
    ],
)
def test_cells_of_all_fleets_have_several_verifiers_if_these_have(
    way: Way, fleet: tuple[int, int], cell: tuple[int, int]
) -> None:
    """Cells of one verifier had a drafter each lose to half as many: a verifier by itself has busier times."""
    found = PlannedFleet(way=way, num_verifiers=fleet[0], num_drafters=fleet[1]).cell
    assert (found.num_verifiers, found.num_drafters) == cell


def test_all_cells_together_have_the_whole_rate() -> None:
    alone = evaluate(profile(), PlannedFleet(way=Way.PLAIN, num_verifiers=1), LOAD, LOOSE)
    eight = evaluate(profile(), PlannedFleet(way=Way.PLAIN, num_verifiers=8), LOAD, LOOSE)
    assert (len(alone.outcome.requests), len(eight.outcome.requests)) == (200, 100)
    assert eight.tokens_per_s == pytest.approx(50 * 20, rel=0.1)


def test_the_least_fleet_does_and_a_smaller_one_does_not() -> None:
    goal = Goal(ttft_s=0.1, itl_s=0.03)
    heavy = [Arrival(0.01 * index, 20, 60) for index in range(200)]
    best = least_fleet(profile(), Way.PLAIN, load=heavy, goal=goal)
    assert best is not None
    assert best.meets
    assert best.fleet.num_verifiers > 1
    fewer = PlannedFleet(way=Way.PLAIN, num_verifiers=best.fleet.num_verifiers - 1)
    assert not evaluate(profile(), fewer, heavy, goal).meets
    assert least_fleet(profile(), Way.PLAIN, load=LOAD, goal=Goal(ttft_s=5.0, itl_s=0.001)) is None, (
        "none of any size does"
    )


def test_an_answer_may_take_as_long_as_the_goal_lets_each_of_its_tokens_take() -> None:
    long = [Arrival(at_s, 20, 4000) for at_s in (0.0, 0.5, 1.0)]
    plan = evaluate(profile(), PlannedFleet(way=Way.PLAIN, num_verifiers=1), long, Goal(ttft_s=1.0, itl_s=0.02))
    assert plan.outcome.requests[-1].pieces[-1][0] > 40.0
    assert plan.meets


def test_a_cell_that_nobody_asks_shows_nothing() -> None:
    assert not evaluate(profile(), PlannedFleet(way=Way.PLAIN, num_verifiers=200), LOAD[:40], LOOSE).meets


def test_the_command_compares_a_fleet_with_as_many_gpus_and_misses_goals_by_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_profile(profile(), tmp_path / "p.json")
    load = ["--profile", str(tmp_path / "p.json"), "--shape", "code", "--rate", "10", "--seconds", "2"]
    fleet = ["--verifiers", "2", "--drafters", "1", "--json", str(tmp_path / "out.json")]
    cli.main(["plan", *load, *fleet, "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows[2:]]
    assert cells == [
        ["drafter tier", "2", "1"],
        ["no speculation, equal GPUs", "3", "0"],
        ["co-located drafter, equal GPUs", "3", "0"],
    ]
    found = json.loads((tmp_path / "out.json").read_text())
    assert [each["gpus"] for each in found.values()] == [3, 3, 3]
    with pytest.raises(SystemExit, match="1"):
        cli.main(["plan", *load, "--verifiers", "1", "--slo-itl-ms", "0.1"])
    assert "the goals are not met" in capsys.readouterr().out


def test_the_number_of_drafters_is_found_the_cheapest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(profile(), tmp_path / "p.json")
    load = ["--profile", str(tmp_path / "p.json"), "--shape", "code", "--rate", "10", "--seconds", "2"]
    written = tmp_path / "out.json"
    cli.main(
        ["plan", *load, "--verifiers", "2", "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000", "--json", str(written)]
    )
    tiers = [each for each in json.loads(written.read_text()).values() if each["way"] == "drafter tier"]
    assert {each["drafters"] for each in tiers} == {1, 2}
    prices = [each["price_per_million_tokens"] for each in tiers]
    assert prices == sorted(prices)
    assert tiers[0]["gpus"] == 3, "both carry the load, so the fewest are the cheapest"
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| drafter tier")]
    assert [row.split("|")[1].strip() for row in rows] == ["drafter tier, 1", "drafter tier, 2"]


def test_without_a_load_the_command_says_what_pays_at_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LEAST_S", 1.0)
    facts = profile(sure_guesses(right=True), cost=StepCost(rows=(1, 9, 521), seconds=(0.010, 0.011, 0.611)))
    write_profile(facts, tmp_path / "p.json")
    written = tmp_path / "out.json"
    cli.main(["plan", "--profile", str(tmp_path / "p.json"), "--seconds", "2", "--json", str(written)])
    text = capsys.readouterr().out
    assert "A step takes 10.0 ms; a draft step takes 1.0 ms on a device of its own (0.10 of it)" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == [
        "streams", "no speculation, 1 GPU", "drafter tier, 2 GPUs", "co-located drafter, 1 GPU", "what pays",
    ]  # fmt: skip
    assert [row[0] for row in rows[2:]] == ["1", "8", "32", "64"]
    assert float(rows[2][1]) == pytest.approx(100, abs=2)
    assert rows[2][-1] == "drafter tier"
    assert rows[-1][-1] == "no speculation", "a step of 64 rows takes as long as those of each of them"
    found = json.loads(written.read_text())
    assert [each["streams"] for each in found] == [1, 8, 32, 64]
    assert found[0]["best"] == "drafter tier"


def test_a_device_that_is_too_slow_for_its_drafter_is_named() -> None:
    slow, fast = (paces(computed_profile(f"70b+1b@4xh100+{gpu}")) for gpu in ("l4", "h100"))
    assert "L4 is too slow for this drafter" in slow
    assert "too slow" not in fast


SET_UPS = sorted(
    [
        *(
            path
            for path in (REPOSITORY / "k8s/paceline/values").glob("*.yaml")
            if path.stem not in ("cpu-demo", "production")
        ),
        *(path for path in (REPOSITORY / "docs/ray").glob("*.yaml") if path.stem != "demo"),
    ]
)


@pytest.mark.parametrize("path", SET_UPS, ids=lambda path: path.stem)
def test_the_pair_of_each_set_up_that_we_ship_can_be_planned_and_its_drafter_is_fast_enough(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (named,) = re.findall(r"paceline plan --profile (\S+)", text)
    target, draft, count, *cards = re.fullmatch(r"(.+)\+(.+)@(?:(\d)x)?(.+)\+(.+)", named).groups()  # type: ignore[union-attr]
    assert "too slow" not in paces(computed_profile(named))
    values = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")).lower()
    if "simulate:" in values:
        assert f"simulate: {named}" in values
        return
    sizes = re.findall(r"^ *(?:model|target|draft|draft_model): \S*?-([0-9.]+b)\b", values, re.MULTILINE)
    assert sizes == [each.partition("-")[0] for each in (target, draft)]
    assert ("-fp8" in target) == ("fp8" in values)
    placed = re.findall(r"(?:gpu.product: nvidia-|accelerator_type: )([a-z0-9]+)", values)
    assert placed in ([], cards)
    assert (count or "1") == (re.findall(r"tensor-parallel-size=(\d)", values) or ["1"])[0]


def test_a_computed_profile_is_written_as_a_file_to_edit(tmp_path: Path) -> None:
    cli.main(["plan", "--profile", "8b+1b@h100+l4", "--write-profile", str(tmp_path / "p.json")])
    assert read_profile(tmp_path / "p.json").kind == "computed"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--profile is required"),
        (["--profile", "8b+1b@h100+l4", "--verifiers", "2"], "--verifiers needs a load: --rate or --trace"),
        (["--profile", "demos", "--rate", "3"], "profile 'demos' is no file"),
        (["--profile", "8b+1b@h100+l4", "--rate", "0"], "--rate must be a number of requests/s from 0.001"),
        (["--profile", "8b+1b@h100+l4", "--rate", "3", "--drafters", "3"], "--drafters needs --verifiers"),
        (
            ["--profile", "8b+1b@h100+l4", "--rate", "3", "--drafters", "3", "--verifiers", "2"],
            "--drafters must be at most --verifiers (2), got 3",
        ),
        (["--profile", "8b+1b@h100+l4", "--trace", "/nope.csv"], "/nope.csv"),
        (["--profile", "8b+1b@h100+l4", "--rate", "0.01"], "--seconds 20: only"),
    ],
)
def test_refusals_name_the_setting(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(argv, capsys)
