"""Facts in files: what is written is read again, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from loadtest.scale import stretched

from paceline.core.errors import ConfigError
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.model import find_profile
from paceline.simulated.profile import read_profile, write_profile
from paceline.simulated.roofline import computed_profile
from tests.unit.planning.facts import profile


def broken(**changes: Any) -> dict[str, Any]:
    given = json.loads(json.dumps(asdict(profile())))
    for key, value in changes.items():
        first, _, second = key.partition("__")
        if second:
            given[first][second] = value
        else:
            given[first] = value
    return given


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = profile(GuessLaw(slope=0.9))
    write_profile(written, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == written


def test_stretched_devices_take_as_many_times_as_long_and_hold_as_much() -> None:
    given, longer = find_profile("8b+1b@h100+l4"), stretched("8b+1b@h100+l4", 4.0)
    for device, slow in ((given.target, longer.target), (given.drafter, longer.drafter)):
        for rows in (1, 7, 300):
            at = {"num_sessions": 3, "kv_tokens": 500}
            assert slow.step_s(rows, **at) == pytest.approx(4.0 * device.step_s(rows, **at))
        assert (slow.rows, slow.kv_tokens, slow.max_sessions) == (device.rows, device.kv_tokens, device.max_sessions)
    assert longer.link_s == 4.0 * given.link_s
    assert longer.drafter.draft_width == given.drafter.draft_width


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target__max_rows": 0}, "target.max_rows must be a whole number of at least 1, got '0'"),
        ({"target__noise": "much"}, "target.noise must be a number of at least 0, got 'much'"),
        ({"target__max_sessions": 2.5}, "target.max_sessions must be a whole number of at least 1, got '2.5'"),
        ({"target__rows": [4, 2]}, "target: step cost"),
        ({"target__speed": 3}, "target.speed is no setting; there are name, rows, seconds"),
        ({"drafter__draft_rows": -1}, "drafter.draft_rows must be a whole number of at least 0, got '-1'"),
        ({"kind": "guessed"}, "kind must be one of measured, computed, got 'guessed'"),
        ({"link_s": -1}, "link_s must be a number of at least 0, got '-1'"),
        ({"most_nodes": 65}, "most_nodes must be a whole number from 0 to 64, got '65'"),
        ({"acceptance": {"rate": 0.7}}, "acceptance.rate is no setting"),
        ({"drafter": 7}, "drafter must be a JSON object, got 7"),
        ({"drafter": None}, "drafter is required"),
    ],
)
def test_a_wrong_fact_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({key: value for key, value in broken(**changes).items() if value is not None}))
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"profile {path}: {message}")


def test_a_computed_step_reads_all_weights_or_computes_all_rows() -> None:
    computed = computed_profile("8b+1b@h100+l4")
    assert computed.kind == "computed"
    assert computed.colocated_kv_tokens < computed.target.kv_tokens, "a drafter inside takes some of it"
    target = computed.target
    weights_s = 2 * 8.03e9 / (0.75 * 3.35e12)
    assert target.cost.at(1) == pytest.approx(weights_s + 5e-4)
    assert target.cost.at(2048) == pytest.approx(2 * 8.03e9 * 2048 / (0.6 * 989e12) + 5e-4)
    split = computed_profile("8b+1b@2xh100+l4").target
    assert split.cost.at(1) == pytest.approx(weights_s / 2 + 5e-4 + 64 * 1e-5)


def test_a_model_of_any_size_and_byte_width_can_be_computed() -> None:
    computed = computed_profile("70b-fp8+0.6b@h200+l40s")
    assert computed.target.cost.at(1) == pytest.approx(70.6e9 / (0.75 * 4.8e12) + 5e-4)
    assert computed.name == "70B FP8 on 1 x H200 SXM, 0.6B on L40S"
    other = computed_profile("24b-int4+1.5b@h100+l4")
    assert other.target.cost.at(1) == pytest.approx(0.5 * 24e9 / (0.75 * 3.35e12) + 5e-4)
    assert other.target.kv_token_s == computed_profile("32b+1b@h100+l4").target.kv_token_s


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    for name, message in (
        ("8b@h100", "not in the form"),
        ("large+1b@h100+l4", "no model 'large' is known: write its billions of parameters.*14b"),
        ("8b-fp9+1b@h100+l4", "no model '8b-fp9' is known.*bf16, fp8"),
        ("0b+1b@h100+l4", "no model '0b' is known"),
        ("8b+1b@h100+l5", "no GPU 'l5' is known; there are h100"),
        ("70b+8b@h100+l4", "70B does not fit 1 x H100"),
        ("8b+1b@9xh100+l4", "from 1 to 8 GPUs, got 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            computed_profile(name)
