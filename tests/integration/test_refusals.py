"""What makes starting impossible is named in one line that says what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec
from paceline.core.errors import ConfigError
from paceline.drafter.config import DrafterConfig
from paceline.service.config import load
from paceline.verifier.config import VerifierConfig

SERVICES: dict[str, type[Any]] = {"verifier": VerifierConfig, "drafter": DrafterConfig}
FREE_PORTS = ("--port", "0", "--metrics-port", "0")

for_each_service = pytest.mark.parametrize("service", SERVICES)


async def refusal(service: str, model: Path, *more: str) -> str:
    """Starts a service in this process; returns why it cannot start."""
    argv = ["--model", str(model), "--redis-url", "memory://", *FREE_PORTS, *more]
    main = import_module(f"paceline.{service}.__main__")
    with pytest.raises(ConfigError) as refused:
        await main.serve(load(SERVICES[service], argv, {}, service, ""))
    return str(refused.value)


def changed(model: Path, folder: Path) -> Path:
    """Copies a model to change it."""
    shutil.copytree(model, folder)
    return folder


@for_each_service
async def test_a_checkpoint_without_a_tokenizer_is_refused(tiny_pair, tmp_path, service):
    folder = changed(tiny_pair[0], tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in await refusal(service, folder)


async def test_a_folder_that_is_none_is_refused(tmp_path):
    assert "nowhere" in await refusal("drafter", tmp_path / "nowhere")


async def test_pickled_weights_are_refused(tiny_pair, tmp_path):
    folder = changed(tiny_pair[0], tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "holds pickled weights" in await refusal("verifier", folder)


@for_each_service
async def test_more_pages_than_memory_say_how_much_is_lacking(service):
    said = await refusal(service, DEMO_TARGET, "--num-kv-blocks", "10000000", "--dtype", "float32")
    assert "GB too few: lower --num-kv-blocks 10000000" in said


@for_each_service
@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
async def test_a_port_in_use_is_named(tiny_pair, service, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in await refusal(service, tiny_pair[0], flag, port)


@for_each_service
async def test_a_registry_that_cannot_be_reached_is_named(tiny_pair, service):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert f"127.0.0.1:{port}" in await refusal(service, tiny_pair[0], "--redis-url", f"redis://127.0.0.1:{port}")


async def test_a_speculative_config_that_is_not_served_is_refused(tiny_pair):
    problems = {
        "{": "JSON",
        '{"method": "magic"}': "method",
        '{"num_speculative_tokens": -1}': "num_speculative_tokens",
        '{"gamma": 3}': "gamma",
        '{"policy": "always"}': "policy",
    }
    for config, problem in problems.items():
        assert problem in await refusal("verifier", tiny_pair[0], "--speculative-config", config)


async def test_a_draft_model_for_another_vocabulary_is_refused_before_anything_starts(tiny_pair, tmp_path):
    stranger = changed(tiny_pair[1], tmp_path / "stranger")
    tokenizer = json.loads((stranger / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    argv = ["--model", str(tiny_pair[0]), "--draft-model", str(stranger), "--redis-port", "0"]
    with pytest.raises(ConfigError) as refused:
        await LocalFleet(load(FleetSpec, argv, {}, "up", ""), environ=os.environ).__aenter__()
    line = str(refused.value)
    assert "vocabular" in line
    assert Path(tiny_pair[0]).name in line
    assert stranger.name in line


def test_a_refusal_ends_the_process_in_one_line(tmp_path):
    command = [sys.executable, "-m", "paceline.verifier", "--model", str(tmp_path / "nowhere")]
    environ = {**os.environ, "PYTHONPATH": "services"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "nowhere" in ended.stderr.strip().splitlines()[-1]
