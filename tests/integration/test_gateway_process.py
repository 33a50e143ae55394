"""What stops a gateway from starting, and how its process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from paceline.core.errors import ConfigError
from paceline.gateway import __main__ as main
from paceline.gateway.config import GatewayConfig, model_folders
from paceline.service.config import load
from tests.support import tiny_tokenizer

SERVICES = Path(__file__).parents[2] / "services"


@contextmanager
def gateway(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a gateway; kills it if the test leaves it running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.gateway", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SERVICES)},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def refusal(*arguments: str) -> str:
    """Starts a gateway in this process; returns why it cannot start."""
    config = load(GatewayConfig, arguments, {}, "gateway", "")
    with patch.object(main, "settle_heap"), pytest.raises(ConfigError) as refused:
        await main.serve_until_signal(config, model_folders(config.model, config.model_name))
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tiny_tokenizer.save_folder(tmp_path / "tiny"))


def test_a_folder_without_a_tokenizer_ends_the_process_in_one_line(tmp_path: Path) -> None:
    with gateway("--model", str(tmp_path), "--redis-url", "memory://") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    assert line.startswith("python -m paceline.gateway: error: ")
    assert "holds no tokenizer.json" in line


async def test_broken_sampling_defaults_are_refused_unless_nobody_asks_for_them(folder: str) -> None:
    (Path(folder) / "generation_config.json").write_text('{"top_p": 2}')
    line = await refusal("--model", folder, "--redis-url", "memory://")
    assert "generation_config.json: top_p: must be a number from 0 to 1, got 2" in line
    line = await refusal(
        "--model", folder, "--redis-url", "memory://", "--generation-config", "vllm", "--tls-dir", folder
    )
    assert "generation_config" not in line


async def test_a_store_that_cannot_be_reached_is_named(folder: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        line = await refusal("--model", folder, "--redis-url", f"redis://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in line
    assert "--redis-url" in line


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
async def test_a_port_in_use_is_named(folder: str, flag: str) -> None:
    other = {"--port": "--grpc-port", "--grpc-port": "--port"}[flag]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = await refusal("--model", folder, "--redis-url", "memory://", flag, str(port), other, "0")
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert f"or {flag} (0 picks a free one)" in line


def test_sigterm_ends_a_gateway_well(folder: str) -> None:
    with gateway("--model", folder, "--redis-url", "memory://", "--port", "0", "--grpc-port", "0") as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if "gateway is ready" in line)
        http = next(part for part in ready.split() if part.startswith("http=")).removeprefix("http=")
        assert httpx.get(f"http://{http}/v1/models", trust_env=False).json()["data"][0]["id"] == "tiny"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in errors
