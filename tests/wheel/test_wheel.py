"""The wheel alone, in an empty environment and an empty folder, does what the checkout does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import paceline

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]
CHECKOUT = Path(__file__).resolve().parents[2]
INSTALL_S = 600.0
RUN_S = 300.0
MOST_WHEEL_MB = 50
# Settings of pip and of caches are the user's; nothing else is.
KEPT = ("PATH", "HOME", "LANG", "PIP_", "XDG_", "SSL_", "REQUESTS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def run(*command: str | Path, cwd: Path, env: dict[str, str], timeout_s: float = RUN_S) -> str:
    ended = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def outside() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.upper().startswith(KEPT)}
    return kept | {"PACELINE_LEARNED_DIR": "none"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, outside: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder)
    run(*pip, CHECKOUT, cwd=folder, env=outside, timeout_s=INSTALL_S)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory, outside: dict[str, str]) -> Path:
    """Folder of the programs of an environment that holds the wheel and what its extra `serve` needs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder, env=outside)
    programs = folder / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", CHECKOUT / "constraints.txt")
    run(*pip, f"paceline[serve] @ {wheel.as_uri()}", cwd=folder, env=outside, timeout_s=INSTALL_S)
    return programs


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("*.py")), "nothing of a checkout is here"


def test_the_wheel_holds_models_and_console_and_is_small(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"paceline", f"paceline-{paceline.__version__}.dist-info"}
    for part in ("models/demo-target/model.safetensors", "models/demo-drafter/tokenizer.json", "py.typed"):
        assert f"paceline/{part}" in names
    assert any(name.startswith("paceline/gateway/api/console/static/") for name in names)
    assert wheel.stat().st_size < MOST_WHEEL_MB * 1e6


def test_the_version_is_that_of_the_sources(installed: Path, empty: Path, outside: dict[str, str]) -> None:
    said = run(installed / "paceline", "--version", cwd=empty, env=outside)
    assert said == f"paceline {paceline.__version__}\n"


def test_the_demo_runs_and_finds_all_texts_identical(installed: Path, empty: Path, outside: dict[str, str]) -> None:
    flags = ("--prompts=2", "--shown=1", "--max-tokens=16", "--concurrency=2")
    said = run(installed / "paceline", "demo", *flags, cwd=empty, env=outside)
    assert "all texts identical" in said


def test_a_fleet_serves_a_completion_and_names_the_command_as_it_was_called(
    installed: Path, empty: Path, outside: dict[str, str]
) -> None:
    ports = ("gateway", "gateway-grpc", "verifier", "verifier-metrics", "drafter", "drafter-metrics", "redis")
    command: list[str | Path] = [installed / "python", "-m", "paceline", "up", *(f"--{port}-port=0" for port in ports)]
    with subprocess.Popen(command, cwd=empty, env=outside, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = serving_at(process)
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "def f(", "max_tokens": 8}, timeout=60.0)
            assert answer.json()["usage"]["completion_tokens"] == 8
            assert "<title>" in httpx.get(f"{url}/", timeout=60.0).text
            assert httpx.get(f"{url}/docs/swagger-ui.js", timeout=60.0).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(60.0) == 0
        finally:
            process.kill()


def serving_at(process: subprocess.Popen[str]) -> str:
    """The address that a fleet names in the line to try it with."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"python -m paceline generate .* --url (\S+)", line):
            return found[1]
    raise AssertionError("the fleet ended before it was up")
