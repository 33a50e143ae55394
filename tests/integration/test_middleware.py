"""Middleware that an operator switches on: CORS, a line for each request, further names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.gateway.config import GatewayConfig
from tests.support.scripted_fleet import MODEL, scripted_fleet

ORIGIN = "https://chat.example.com"
ASKS = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "seed": 0}


async def test_pages_of_an_allowed_origin_may_ask_and_read_what_came_with_the_answer(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, allowed_origins=(ORIGIN,)) as fleet:
        asked = await fleet.http.options("/v1/completions", headers=ASKS)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
        answer = await fleet.http.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        other = await fleet.http.options("/v1/completions", headers={**ASKS, "origin": "https://evil.example.com"})
        assert "access-control-allow-origin" not in other.headers


async def test_without_the_flag_no_page_of_another_origin_may_ask(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        answer = await fleet.http.post("/v1/completions", json=BODY, headers={"origin": ORIGIN})
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_each_request_is_logged_once_with_its_id_and_without_what_it_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline.gateway.http.middleware")
    async with scripted_fleet(tmp_path, access_log=True) as fleet:
        await fleet.http.post("/v1/completions?secret=1", json=BODY, headers={"x-request-id": "mine"})
        await fleet.http.post("/v1/completions", json={**BODY, "stream": True})
        await fleet.http.get("/nowhere")
    told = [vars(each) for each in caplog.records if each.name == "paceline.gateway.http.middleware"]
    asked = [(each["method"], each["path"], each["status"]) for each in told]
    assert asked == [("POST", "/v1/completions", 200), ("POST", "/v1/completions", 200), ("GET", "/nowhere", 404)]
    assert told[0]["request_id"] == "mine"
    assert all(each["seconds"] >= 0 and each["client"] for each in told)


@pytest.mark.parametrize(
    ("proxies", "client"), [((), "127.0.0.1"), (("10.0.0.0/8",), "127.0.0.1"), (("127.0.0.0/8",), "203.0.113.7")]
)
async def test_who_was_the_client_is_believed_from_named_proxies_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, proxies: tuple[str, ...], client: str
) -> None:
    """The access log said whatever `X-Forwarded-For` said, for all that came from this machine."""
    caplog.set_level(logging.INFO, logger="paceline.gateway.http.middleware")
    async with scripted_fleet(tmp_path, access_log=True, forwarded_allow_ips=proxies) as fleet:
        await fleet.http.get("/livez", headers={"x-forwarded-for": "203.0.113.7"})
    [told] = [vars(each)["client"] for each in caplog.records if each.name == "paceline.gateway.http.middleware"]
    assert told == client


@pytest.mark.parametrize("proxies", [("proxy.example.com",), ("*", "10.0.0.1"), ("10.0.0.1/8",)])
def test_what_is_no_address_of_a_proxy_is_refused(proxies: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--forwarded-allow-ips must be addresses"):
        GatewayConfig(model=(), forwarded_allow_ips=proxies)


async def test_answers_call_a_model_as_it_was_asked_for(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, served_model_name=("gpt-tiny",)) as fleet:
        listed = (await fleet.http.get("/v1/models")).json()["data"]
        assert {each["id"] for each in listed} == {MODEL, "gpt-tiny"}
        for name in (MODEL, "gpt-tiny"):
            answer = await fleet.http.post("/v1/completions", json={**BODY, "model": name})
            assert answer.json()["model"] == name
