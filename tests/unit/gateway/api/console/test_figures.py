"""Figures of the console: verifiers are read once for all pages, and one that cannot be read is shown without."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paceline.core.target_events import Reason, StepReport
from paceline.gateway.api.console.figures import SHOWN, Figures, summed
from paceline.obs import metrics_page as module
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.metrics_page import samples_of
from paceline.store.base import Replica

DRAFTER = "h:2"


def page_of_two_steps() -> str:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry, "tiny")
    for gammas, accepted in (([4, 0], [3]), ([4, 2], [0, 2])):
        report = StepReport(num_rows=8, seconds=0.01, price=0.25, gammas=gammas, accepted=accepted)
        report.mode, report.reason = "drafting", Reason.PAYS
        report.measured = [("plain", 2, 50.0), ("drafting", 2, 90.0)]
        report.count("paceline:drafter_verified_tokens", "draft", DRAFTER, by=sum(gammas))
        report.count("paceline:drafter_accepted_tokens", "draft", DRAFTER, by=sum(accepted))
        metrics.steps.add(report)
    return generate_latest(registry).decode()


def test_counters_and_mode_are_those_of_a_verifiers_steps() -> None:
    told = summed(samples_of(page_of_two_steps(), SHOWN), time.time() + 60.0)
    assert told["counters"] == {"steps": 2, "turns": 4, "drafted": 10, "accepted": 5}
    assert told["mode"] == {"mode": "drafting", "reason": "pays", "for_s": pytest.approx(60.0, abs=10.0)}
    assert told["rates"] == [
        {"mode": mode, "load": 2, "tokens_per_s": rate, "age_s": pytest.approx(60.0, abs=10.0)}
        for mode, rate in (("plain", 50.0), ("drafting", 90.0))
    ]
    assert told["guesses"] == {DRAFTER: {"verified": 10, "accepted": 5}}
    counters = {"steps": 0, "turns": 0, "drafted": 0, "accepted": 0}
    assert summed([], 0.0) == {"counters": counters, "mode": None, "rates": [], "guesses": {}}


def test_rates_of_loads_that_no_verifier_has_are_left_out() -> None:
    page = "".join(
        f'paceline:mode_tokens_per_second{{mode="plain",load="{load}"}} 1\n' for load in ("2", "x", "9" * 10, "", "²")
    )
    assert [each["load"] for each in summed(samples_of(page, SHOWN), 0.0)["rates"]] == [2]
    many = "".join(f'paceline:mode_tokens_per_second{{mode="plain",load="{load}"}} 1\n' for load in range(1000))
    assert len(summed(samples_of(many, SHOWN), 0.0)["rates"]) == 128


def test_a_rate_is_as_old_as_its_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry, "tiny")
    metrics.show_rates([("plain", 4, 10.0), ("drafting", 4, 20.0)])
    at_s = time.time() + 100.0
    monkeypatch.setattr(time, "time", lambda: at_s)
    metrics.show_rates([("plain", 4, 10.0), ("drafting", 4, 21.0)])
    rates = summed(samples_of(generate_latest(registry).decode(), SHOWN), at_s)["rates"]
    assert {each["mode"]: round(each["age_s"], -1) for each in rates} == {"plain": 100.0, "drafting": 0.0}


@contextmanager
def metrics_server(page: str | bytes, encoding: str = "") -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            if encoding:
                self.send_header("content-encoding", encoding)
            self.end_headers()
            with suppress(OSError):  # the reader has left
                self.wfile.write(page if isinstance(page, bytes) else page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def verifier(replica_id: str, metrics_address: str) -> Replica:
    return Replica(replica_id=replica_id, role="verifier", address="h:1", metrics_address=metrics_address)


async def test_pages_that_ask_together_share_one_reading_and_the_unreadable_have_no_counters() -> None:
    with metrics_server(page_of_two_steps()) as (address, asked):
        drafter = Replica(replica_id="d", role="drafter", address=DRAFTER, metrics_address=address)
        fleet = [verifier("v", address), verifier("mute", ""), verifier("file", "localhost/etc"), drafter]
        figures = Figures(lambda: fleet)
        first, second = await asyncio.gather(figures.read(), figures.read())
    assert first is second
    assert asked == ["/metrics"]
    assert {each["id"]: each["counters"] and each["counters"]["turns"] for each in first["replicas"]} == {
        "v": 4, "mute": None, "file": None, "d": None,
    }  # fmt: skip


async def test_a_drafters_guesses_are_summed_over_its_verifiers() -> None:
    endless = 'paceline:drafter_verified_tokens_total{drafter="h:3"} 1e308\n'
    with metrics_server(page_of_two_steps() + endless) as (address, _):
        drafters = [Replica(replica_id=each, role="drafter", address=each) for each in (DRAFTER, "h:3", "h:4")]
        figures = await Figures(lambda: [verifier("a", address), verifier("b", address), *drafters]).read()
    assert {each["id"]: each["guesses"] for each in figures["replicas"]} == {
        "a": None, "b": None, DRAFTER: {"verified": 20, "accepted": 10}, "h:3": None, "h:4": None,
    }  # fmt: skip


COUNTED = "paceline:gamma_sum 1\n"


@pytest.mark.parametrize(
    "page",
    [
        "paceline:gamma_sum many",
        "x" * 2000,
        COUNTED * 20,
        "paceline:gamma_sum NaN",
        "paceline:gamma_sum +Inf",
        "paceline:gamma_sum 1e308\n" * 2,
        "paceline:mode_since_seconds NaN",
        'paceline:gamma_sum{a="b", =ode="c"} 1',
    ],
    ids=["no number", "too long", "too much that counts", "NaN", "infinite", "infinite sum", "NaN of a mode", "labels"],
)
async def test_a_page_that_is_too_long_or_none_counts_as_missing(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", 1000)
    monkeypatch.setattr(module, "MAX_PARSED_BYTES", 200)
    assert await counters_of(page) is None


async def test_a_compressed_page_is_not_unpacked() -> None:
    """2 KiB of gzip within gzip held a gateway for over a minute and took a GiB."""
    once = gzip.compress(COUNTED.encode())
    assert await counters_of(once, "gzip") is None
    assert await counters_of(gzip.compress(once), "gzip, gzip") is None


async def test_what_only_begins_like_a_counter_is_left_out() -> None:
    counters = await counters_of(f"paceline:gamma_sum_of_others 7\n{COUNTED}")
    assert counters is not None
    assert counters["drafted"] == 1


async def counters_of(page: str | bytes, encoding: str = "") -> dict[str, float] | None:
    """Counters of a verifier with this page, as JSON that a browser takes."""
    with metrics_server(page, encoding) as (address, _):
        figures = await Figures(lambda: [verifier("v", address)]).read()
    json.dumps(figures, allow_nan=False)
    counters: dict[str, float] | None = figures["replicas"][0]["counters"]
    return counters
