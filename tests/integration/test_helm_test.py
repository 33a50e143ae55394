"""What `helm test` runs in a pod, against a gateway: it passes where the answer is whole, and says why where not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.support.scripted_fleet import MODEL, scripted_fleet

SCRIPT = Path(__file__).parents[2] / "k8s" / "paceline" / "tests" / "completion.py"
TIMEOUT_S = 30


async def run(address: str, model: str = MODEL, key: str = "") -> tuple[int | None, str]:
    """Returns its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT.read_text()),
        env={"URL": f"http://{address}", "MODEL": model, **({"API_KEY": key} if key else {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(TIMEOUT_S):
        said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_it_passes_where_a_completion_comes_with_its_record(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        status, said = await run(fleet.addresses.http)
    assert status == 0, said
    assert "16 tokens in" in said


async def test_it_fails_with_the_gateways_words_or_with_the_address_of_nobody(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        status, said = await run(fleet.addresses.http, "another")
    assert status == 1
    assert "answers 404" in said
    status, said = await run("127.0.0.1:1")
    assert status == 1
    assert "cannot be reached" in said
