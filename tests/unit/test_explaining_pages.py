"""The pages that explain name files, functions and figures of the code: they hold what the code holds."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from paceline.core import (
    draft_policy,
    goodput,
    scheduled_session,
)
from paceline.core import drafting_mode as modes
from paceline.core import step_time as times
from paceline.forest import drafting, linking
from paceline.gateway.config import GatewayConfig
from paceline.gateway.fleet import ejection, prefixes, routing
from paceline.gateway.sessions import failover, trail
from paceline.store import announcer, base
from paceline.verifier.config import DEFAULT_DRAFT_TOKENS, DEFAULT_METHODS, VerifierConfig

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "services" / "paceline"
PAGES = (
    "acceptance",
    "architecture",
    "controller",
    "failures",
    "glossary",
    "life-of-a-request",
    "routing",
    "speculation",
    "threat-model",
)
GATEWAY, VERIFIER = (each.__dataclass_fields__ for each in (GatewayConfig, VerifierConfig))


@cache
def page(name: str) -> str:
    """Returns a page with its line breaks as spaces."""
    return " ".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").split())


@cache
def words_of_the_code() -> frozenset[str]:
    """Returns every word of the sources."""
    files = [*SOURCES.rglob("*.py"), *(ROOT / "protos").rglob("*.proto")]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8")))


def code_in(page_name: str) -> set[str]:
    """Returns what a page sets in backquotes and in indented formulas' last column."""
    text = (ROOT / "docs" / f"{page_name}.md").read_text(encoding="utf-8")
    return {*re.findall(r"`([^`\n]+)`", text), *re.findall(r"(?m)^ {4,}\S.*? {3,}([A-Za-z_.]+)$", text)}


def test_files_that_pages_name_are_there():
    paths = {(name, each) for name in PAGES for each in code_in(name) if re.fullmatch(r"[\w/]+(\.py|/)", each)}
    assert {each for each in paths if not ((SOURCES / each[1]).exists() or (ROOT / each[1]).exists())} == set()


def test_functions_classes_and_fields_that_pages_name_are_there():
    names = {
        (name, part)
        for name in PAGES
        for each in code_in(name)
        if re.fullmatch(r"_?[A-Za-z]\w*[_A-Z.]\w+", each) and not each.endswith(".py")
        for part in each.split(".")
    }
    assert {each for each in names if each[1] not in words_of_the_code()} == set()


def test_the_page_of_the_controller_has_the_figures_of_the_code():
    for said in (
        f"price = max({goodput.LEAST_SURVIVAL:g}, goodput(m*)",
        f"(default {DEFAULT_DRAFT_TOKENS})",
        f"Steps hold at most {times.MOST_ROWS} rows",
        f"each of {len(times.KNOTS)} points from 1 to {times.MOST_ROWS} rows",
        f"min(1 + answer time / step time, {linking.MOST_STEPS_AHEAD:g})",
        f"room = {linking.ROOM_PER_NODE} * most nodes",
        f"counts half after {modes.HALF_LIFE} further steps",
        f"{modes.USUAL_STEPS} steps * max(0, 1 - other rate",
        f"once {modes.LEAST_STEPS} steps have counted",
        f"After {modes.MOST_STEPS} counted steps",
        f"after {modes.MOST_UNCOUNTED} steps that do not count",
        f"have left {linking.MOST_UNANSWERED} tokens unanswered",
        f"within a factor of {2**modes.SAME_LOAD:.1f}",
        f"saved grows by {100 * goodput.EXPLORATION:g} % of the time",
        f"at most {draft_policy.MOST_PRICE:g}",
        f"fewer than {scheduled_session.SHORT_REMAINDER} tokens to go",
    ):
        assert said in page("controller")
    assert draft_policy.FixedGamma.__name__ in page("controller")


def test_the_pages_of_speculation_have_the_figures_of_the_code():
    assert drafting.AHEAD == 0.1
    assert "stops at a tenth of the *price*" in page("speculation")
    assert f"the default is `{DEFAULT_METHODS}`" in page("speculation")


def test_the_page_of_failures_has_the_figures_of_the_code():
    assert trail.MOST_DEATHS == 2
    assert "a second death is proof" in page("failures")
    for said in (
        f"`--failover-s` seconds ({GATEWAY['failover_s'].default:g})",
        f"`--verifier-silence-s` seconds ({GATEWAY['verifier_silence_s'].default:g})",
        f"`--record-ttl-s` seconds ({GATEWAY['record_ttl_s'].default:g})",
        f"`--engine-stall-s` seconds in one step ({VERIFIER['engine_stall_s'].default:g};",
        f"its registry entry expires after {announcer.EXPIRY_S:g} s",
        f"{failover.MOST_FAILURES} times in a row at most",
        f"after {ejection.CONSECUTIVE} failures in a row, or half of at least {ejection.LEAST_OUTCOMES} sessions",
        f"gets none for {ejection.EJECTION_S:g} s",
        f"range of {base.EPOCHS_PER_OWNER:,} epochs",
    ):
        assert said in page("failures")


def test_the_page_of_routing_has_the_figures_of_the_code():
    assert f"`AFFINITY` is {routing.AFFINITY:g}." in page("routing")
    assert f"remembers {prefixes.MAX_BLOCKS:,} names" in page("routing")
    for num_names, num_tokens in ((64, 1024), (128, 4096), (288, 128 * 1024)):
        assert prefixes.covered_tokens(num_names) == num_tokens
    assert "first 1,024 tokens" in page("routing")
    assert "128 names for 4,096 tokens, 288 for 128 k" in page("routing")
