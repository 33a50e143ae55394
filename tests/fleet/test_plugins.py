"""The packages of docs/add-a-draft-method.md and docs/add-an-acceptance-rule.md, installed, in a real fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from tests.support.plugin_pages import blocks

pytestmark = pytest.mark.full

SPECULATION = {
    "method": "draft_model+bigram",
    "acceptance": "coupled+typical",
    "lossy": True,
    "options": {"bigram": {"confidence": 0.9}, "typical": {"threshold": 0.2}},
}
INSTALL_S = 120


def install(page: str, module: str, source: Path, target: Path) -> None:
    """Makes the package that a page shows, and installs it beside nothing else."""
    shown = blocks(page)
    folder = source / module
    folder.mkdir()
    (folder / "pyproject.toml").write_text(shown["toml"], encoding="utf-8")
    (folder / f"{module}.py").write_text(shown["python"], encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run((*pip, "--target", target, folder), check=True, timeout=INSTALL_S)


@asynccontextmanager
async def fleet_with(packages: Path) -> AsyncIterator[httpx.AsyncClient]:
    spec = FleetSpec(
        **FREE_PORTS,
        model=DEMO_TARGET,
        draft_model=DEMO_DRAFTER,
        dtype="float32",
        speculative_config=json.dumps(SPECULATION),
    )
    environ = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{packages}"}
    async with (
        LocalFleet(spec, environ=environ) as fleet,
        httpx.AsyncClient(base_url=fleet.gateway_url, timeout=60.0) as client,
    ):
        yield client


async def answer(client: httpx.AsyncClient, speculation: dict[str, Any], status: int = 200) -> dict[str, Any]:
    body = {"prompt": "a = 1\nb = 1\nc = 1\nd = 1\ne =", "max_tokens": 48, "seed": 3, "ignore_eos": True}
    response = await client.post("/v1/completions", json={**body, "temperature": 0.7, "speculation": speculation})
    assert response.status_code == status, response.text
    content: dict[str, Any] = response.json()
    return content


def record(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["metrics"]["speculative_decoding"]
    return found


async def test_a_method_and_a_rule_of_other_packages_are_served_named_and_counted(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    install("add-a-draft-method.md", "paceline_bigram", tmp_path, installed)
    install("add-an-acceptance-rule.md", "paceline_typical", tmp_path, installed)
    async with fleet_with(installed) as client:
        plain = await answer(client, {"enabled": False})
        guessed = await answer(client, {"method": "bigram"})
        assert guessed["choices"][0]["text"] == plain["choices"][0]["text"], "a method changes no token"
        assert record(guessed)["num_accepted_draft_tokens"] > 0
        assert not record(guessed)["lossy"]

        lenient = record(await answer(client, {"acceptance": "typical"}))
        assert lenient["lossy"]
        assert lenient["draft_acceptance_rate"] > 0

        unknown = await answer(client, {"method": "trigram"}, status=400)
        assert unknown["error"]["param"] == "speculation.method"
        assert "trigram is not served here, only draft_model, bigram" in unknown["error"]["message"]
        unknown = await answer(client, {"acceptance": "top_p"}, status=400)
        assert "top_p is not served here, only coupled, rejection, block, typical" in unknown["error"]["message"]
