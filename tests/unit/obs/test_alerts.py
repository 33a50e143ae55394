"""Alert rules against made series; promtool does the work, this sees that no alert is left out.

Rules and dashboard also stay apart by fleet, whatever else a Prometheus scrapes.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.prometheus import ALERTS, DASHBOARD, needs_prometheus

STORIES = Path(__file__).with_name("alerts_test.yaml")
RUNBOOK = Path(__file__).parents[3] / "docs" / "operate.md"
# A metric with its labels, and the join that it is the right side of.
SELECTOR = re.compile(
    r"(on \(instance\) (?:group_left \(.*?\) )?\(?)?((?:vllm|paceline):[a-z0-9_:]+|process_[a-z_]+)(\{.*?\})?"
)


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
        # The name that Alertmanager's and Grafana's templates look for.
        assert rule["annotations"]["runbook_url"] == f"docs/operate.md#{rule['alert'].lower()}"


def rule_queries() -> dict[str, str]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules}


def panels() -> list[dict[str, Any]]:
    found = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def panel_queries() -> dict[str, str]:
    return {f"{panel['title']} ({each['refId']})": each["expr"] for panel in panels() for each in panel["targets"]}


@pytest.mark.parametrize(
    ("queries", "matcher"), [(rule_queries(), 'namespace=~".*"'), (panel_queries(), 'namespace=~"$namespace"')]
)
def test_every_query_keeps_fleets_apart_and_servers_of_another_make_out(queries: dict[str, str], matcher: str) -> None:
    wrong: dict[str, str] = {}
    for name, query in queries.items():
        found = [(metric, labels) for joined, metric, labels in SELECTOR.findall(query) if not joined]
        # Of one join's two selectors the second stands behind `or`.
        found = [each for each in found if each != ("paceline:replica_info", '{role="verifier", model!~"$model_name"}')]
        fleets = all(matcher in labels for _, labels in found)
        sums = re.findall(r"\b(?:sum|max|min|avg|count|group)\b(?! by \(namespace)", query)
        foreign = any(not metric.startswith("paceline:") for metric, _ in found)
        joined = query.count("on (instance)") >= 1
        if not found or not fleets or sums or (foreign and not joined):
            wrong[name] = query
    assert wrong == {}


def test_every_panel_says_what_it_shows_and_draws_only_limits_of_alerts() -> None:
    assert [panel["title"] for panel in panels() if len(panel.get("description", "")) < 20] == []
    drawn = {
        step["value"]
        for panel in panels()
        for step in panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", ())
        if step["value"] is not None
    }
    limits = {float(limit) for query in rule_queries().values() for limit in re.findall(r"[<>] ([0-9.]+)", query)}
    assert {0.2, 0.5, 0.95, 2.5, 5, 64} <= drawn <= limits | {2.5}


def test_the_dashboard_can_be_narrowed_to_a_fleet_a_model_and_a_replica() -> None:
    variables = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]
    assert [each["name"] for each in variables] == ["datasource", "namespace", "model_name", "replica_id"]
