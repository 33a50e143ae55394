"""What makes starting impossible ends a process in one line that says what to do, with exit status 2."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.checkpoints import DEMO_TARGET

SERVICES = ["verifier", "drafter"]


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": "services"}
    return subprocess.run(
        [sys.executable, "-m", *argv], capture_output=True, text=True, timeout=100, env=environ, check=False
    )


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("service", SERVICES)
def test_a_checkpoint_without_a_tokenizer_is_refused(tiny_pair, tmp_path, service):
    folder = tmp_path / "bare"
    shutil.copytree(tiny_pair[0], folder)
    (folder / "tokenizer.json").unlink()
    ended = start(f"paceline.{service}", "--model", str(folder), "--redis-url", "memory://")
    assert "tokenizer.json" in last_line(ended)


@pytest.mark.parametrize("service", SERVICES)
def test_a_folder_that_is_none_is_refused(tmp_path, service):
    ended = start(f"paceline.{service}", "--model", str(tmp_path / "nowhere"), "--redis-url", "memory://")
    assert "nowhere" in last_line(ended)


def test_pickled_weights_are_refused(tiny_pair, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_pair[0], folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    ended = start(
        "paceline.verifier", "--model", str(folder), "--redis-url", "memory://", "--port", "0", "--metrics-port", "0"
    )
    assert "holds pickled weights" in last_line(ended)


@pytest.mark.parametrize("service", SERVICES)
def test_more_pages_than_memory_say_how_much_is_lacking(service):
    model = ("--model", str(DEMO_TARGET), "--redis-url", "memory://", "--port", "0", "--metrics-port", "0")
    ended = start(f"paceline.{service}", *model, "--num-kv-blocks", "10000000", "--dtype", "float32")
    assert "GB too few: lower --num-kv-blocks 10000000" in last_line(ended)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_port_in_use_is_named(tiny_pair, service, flag):
    other = "--metrics-port" if flag == "--port" else "--port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        model = str(tiny_pair[0])
        ended = start(f"paceline.{service}", "--model", model, "--redis-url", "memory://", flag, port, other, "0")
        assert port in last_line(ended)


@pytest.mark.parametrize("service", SERVICES)
def test_a_registry_that_cannot_be_reached_is_named(tiny_pair, service):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ended = start(f"paceline.{service}", "--model", str(tiny_pair[0]), "--redis-url", f"redis://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in last_line(ended)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", "JSON"),
        ('{"method": "magic"}', "method"),
        ('{"num_speculative_tokens": -1}', "num_speculative_tokens"),
        ('{"gamma": 3}', "gamma"),
        ('{"policy": "always"}', "policy"),
    ],
)
def test_a_speculative_config_that_is_not_served_is_refused(tiny_pair, config, problem):
    model = str(tiny_pair[0])
    ended = start("paceline.verifier", "--model", model, "--redis-url", "memory://", "--speculative-config", config)
    assert problem in last_line(ended)


def test_a_draft_model_for_another_vocabulary_is_refused_before_anything_starts(tiny_pair, tmp_path):
    stranger = tmp_path / "stranger"
    shutil.copytree(tiny_pair[1], stranger)
    tokenizer = json.loads((stranger / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (stranger / "tokenizer.json").write_text(json.dumps(tokenizer))
    ended = start("paceline", "up", "--model", str(tiny_pair[0]), "--draft-model", str(stranger), "--redis-port", "0")
    line = last_line(ended)
    assert "vocabular" in line
    assert Path(tiny_pair[0]).name in line
    assert stranger.name in line
