"""What makes starting impossible is named in one line that says what to do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import drain
from paceline.cluster.checkpoints import DEMO_TARGET, fetch_models
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec
from paceline.cluster.up import fleet_settings
from paceline.core.errors import ConfigError
from paceline.drafter.config import DrafterConfig
from paceline.gateway.__main__ import serve_until_signal
from paceline.gateway.config import GatewayConfig, model_folders
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


@for_each_service
async def test_more_pages_than_memory_say_how_much_is_lacking(service):
    said = await refusal(service, DEMO_TARGET, "--num-kv-blocks", "10000000", "--dtype", "float32")
    assert "GB too few: lower --num-kv-blocks 10000000" in said


@for_each_service
async def test_a_registry_that_cannot_be_reached_is_named(tiny_pair, service):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert f"127.0.0.1:{port}" in await refusal(service, tiny_pair[0], "--redis-url", f"redis://127.0.0.1:{port}")


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


@dataclass
class Place:
    """What a bad configuration names: `{0}` is its folder."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "file").write_bytes(b"\xff\0\n")
        (self.folder / "dir" / "ca.pem").mkdir(parents=True)
        (self.folder / "dir" / "generation_config.json").write_text('{"a":' * 100_000)
        (self.folder / "deep.yaml").write_text("[" * 100_000)
        (self.folder / "date.yaml").write_text("verifier:\n  port: 2024-99-99\n")
        (self.folder / "code.yaml").write_text("!!python/object/apply:os.system [true]")
        (self.folder / "deep.json").write_text('{"a":' * 100_000)


# What any library raises while a setting is read is one line: it names the flag and the value.
URLS = ("redis://h?nonsense=1", "redis://h?ssl_cert_reqs=none", "redis://h?encoding=no", "redis://h:0x1", "http://h")
TLS = ("{0}/nowhere", "{0}/file", "{0}/dir", "{0}/" + "a" * 5000, "~nobody-at-all/x")
PLACES = ("host 1", "999.1.1.1", "a..b")
COLLECTORS = ("nonsense", "http://[::1", "ftp://h", "http://h:99999")
BAD: dict[str, list[tuple[str, ...]]] = {
    "gateway": [
        *(("--redis-url", url) for url in URLS),
        *(("--tls-dir", folder) for folder in TLS),
        *(("--host", host) for host in PLACES),
        *(("--otlp-traces-endpoint", url) for url in COLLECTORS),
        *(("--chat-template", file) for file in TLS),
        *(("--api-keys-file", file) for file in (TLS[0], *TLS[2:])),
        *(("--generation-config", folder) for folder in TLS[:4]),
        *(("--model", folder) for folder in TLS[:4]),
        ("--tls-cert", "{0}/file", "--tls-key", "{0}/file"),
        ("--forwarded-allow-ips", "proxy"),
    ],
    "verifier": [
        *(("--redis-url", url) for url in URLS[:2]),
        *(("--tls-dir", folder) for folder in TLS),
        *(("--host", host) for host in PLACES),
        *(("--model", folder) for folder in TLS[:2]),
        ("--otlp-traces-endpoint", "http://[::1"),
        ("--learned-dir", "~nobody-at-all/x"),
        *(("--profile", file, "--engine", "simulated") for file in ("nonsense", "{0}/dir", "{0}/deep.json")),
        *(("--speculative-config", text) for text in ("[]", '{"a":' * 100_000, '{"method": ["a"]}')),
    ],
    "drafter": [
        *(("--redis-url", url) for url in URLS[:2]),
        *(("--tls-dir", folder) for folder in TLS[:2]),
        *(("--model", folder) for folder in TLS[:2]),
        ("--profile", "{0}/file", "--engine", "simulated"),
    ],
    "drain": [("--redis-url", url) for url in URLS],
    "up": [
        *(("--redis-url", url) for url in (*URLS, "memory://")),
        *(("--fleet", file) for file in (*TLS, "{0}/deep.yaml", "{0}/date.yaml", "{0}/code.yaml")),
        *(("--tls-dir", folder) for folder in TLS),
        *(("--log-dir", folder) for folder in ("{0}/file", *TLS[3:])),
        ("--tls-cert", "{0}/file", "--tls-key", "{0}/file"),
    ],
}


async def start(command: str, argv: list[str]) -> None:
    """What a command does with its settings until it serves; raises as it would."""
    if command == "drain":
        await drain.drain(load(drain.DrainConfig, ["--replica=r", *argv], {}, "", ""))
    elif command == "up":
        await LocalFleet(fetch_models(fleet_settings(argv)[0], lambda _: None), environ=os.environ).__aenter__()
    else:
        argv = [*(() if "--model" in argv else ("--model", str(DEMO_TARGET))), *argv]
        argv += [] if "--redis-url" in argv else ["--redis-url", "memory://"]
        if command == "gateway":
            config = load(GatewayConfig, [*argv, "--port", "0", "--grpc-port", "0"], {}, "", "")
            await serve_until_signal(config, model_folders(config.model, ""))
        else:
            config = load(SERVICES[command], [*argv, *FREE_PORTS], {}, "", "")
            await import_module(f"paceline.{command}.__main__").serve(config)


@pytest.mark.parametrize("command", BAD)
async def test_a_bad_setting_is_one_line_that_names_flag_and_value(command, tmp_path, capsys):
    """An option of a Redis URL, and a file that recurses, used to end a service with a stack."""
    place, wrong = Place(tmp_path), []
    for row in BAD[command]:
        flag, value = (part.format(place.folder) if part.startswith("{0}") else part for part in row[:2])
        argv = [part.format(place.folder) if part.startswith("{0}") else part for part in row]
        try:
            async with asyncio.timeout(60):
                await start(command, argv)
            said = "it started"
        except ConfigError as error:
            said = str(error)
        except SystemExit:
            said = capsys.readouterr().err
        except Exception as error:  # noqa: BLE001 - that is the question
            said = f"{type(error).__name__}: {error}"
        shown = value.partition("?")[0][:60]
        if flag not in said or (shown not in said and value[0] not in "[{"):
            wrong.append((flag, value[:80], said[:200]))
    assert wrong == []
