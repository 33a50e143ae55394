"""Alert rules against made series; promtool does the work, this sees that no alert is left out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.support.prometheus import ALERTS, needs_prometheus

STORIES = Path(__file__).with_name("alerts_test.yaml")
RUNBOOK = Path(__file__).parents[3] / "docs" / "operate.md"


@needs_prometheus
def test_each_alert_is_raised_by_what_it_is_for_and_none_by_a_healthy_fleet() -> None:
    tested = subprocess.run(["promtool", "test", "rules", str(STORIES)], capture_output=True, text=True, timeout=60)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_prometheus
def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_story_in_which_it_is_raised() -> None:
    stories = yaml.safe_load(STORIES.read_text(encoding="utf-8"))["tests"]
    raised = [
        name
        for story in stories
        for asked in story["promql_expr_test"]
        for name in re.findall(r'alertname="(\w+)"', asked["expr"])
        if asked["exp_samples"]
    ]
    assert set(raised) == {rule["alert"] for rule in alerts()}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def test_the_runbook_has_a_heading_for_each_alert_and_each_alert_names_its_own() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/operate.md#{rule['alert'].lower()}"
