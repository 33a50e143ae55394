"""Checkpoints by their names: fetched from a server that speaks the Hub's protocol, and found again without it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from paceline import cli
from paceline.checkpoints.source import MODEL_FILES, TEXT_FILES, folder_of, parse, repository_of, served_name
from paceline.cluster.checkpoints import DEMO_DRAFTER, Checkpoints
from paceline.cluster.fleet_file import RayTier
from paceline.cluster.ray.host import ServiceSpec
from paceline.cluster.spec import FleetSpec, ServicePort
from paceline.core.errors import ConfigError
from paceline.engine.loading import model_identity
from paceline.gateway.config import model_folders
from tests.support.hub import TOKEN, Hub, Repo, serving


@pytest.fixture(scope="module")
def demo() -> Repo:
    return Repo.of(DEMO_DRAFTER)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: Repo) -> Iterator[Hub]:
    """A server with one repository, and an empty cache; huggingface_hub reads its variables when it is imported."""
    with serving(tiny=Repo(files=dict(demo.files))) as hub:
        point_to(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
    huggingface_hub.close_session()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def fetch(name: str, *, files: Sequence[str] = MODEL_FILES) -> Path:
    return folder_of(name, "--model", files=files)


def test_what_is_named_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert parse("here/model") == Path("here/model")
    assert parse(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert parse("/models/large") == Path("/models/large")
    assert parse("large") == Path("large")
    for given in ("hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B", Path("hf://Qwen/Qwen3-8B")):
        assert str(parse(given)) == "hf://Qwen/Qwen3-8B"
    assert str(parse("Qwen/Qwen3-8B@refs/pr/1")) == "hf://Qwen/Qwen3-8B@refs/pr/1"
    with pytest.raises(ConfigError, match="must be hf://ORG/NAME"):
        parse("hf://Qwen3-8B")


def test_the_first_start_fetches_what_is_needed_and_the_second_one_asks_nobody(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = ("README.md", "pytorch_model.bin", "model.gguf", "consolidated.safetensors", "original/params.json")
    hub.repos["org/tiny"].files |= dict.fromkeys(extra, b"not needed")
    folder = fetch("org/tiny")
    needed = {path.name for path in DEMO_DRAFTER.iterdir()} - {"README.md"}
    assert hub.fetched() == needed
    assert {path.name for path in folder.iterdir()} == needed
    own, fetched = model_identity(DEMO_DRAFTER), model_identity(folder)
    assert (fetched.name, fetched.weights_hash, fetched.vocab_hash) == ("org/tiny", own.weights_hash, own.vocab_hash)
    hub.requests.clear()
    assert fetch(f"org/tiny@{hub.repos['org/tiny'].commit}") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/tiny") == folder
    assert not hub.requests


def test_a_newer_revision_is_fetched_when_its_name_is_asked_for_again(hub: Hub) -> None:
    before = fetch("org/tiny")
    hub.repos["org/tiny"].files["generation_config.json"] = b'{"temperature": 0.5}'
    after = fetch("org/tiny")
    assert after != before
    assert '"temperature": 0.5' in (after / "generation_config.json").read_text()
    assert before.is_dir()


def test_without_the_server_the_cache_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("org/tiny")
    point_to("http://127.0.0.1:9", monkeypatch)
    assert fetch("org/tiny") == folder
    with pytest.raises(
        ConfigError, match=r"--model hf://org/other: it could not be fetched from http://127.0.0.1:9 .*"
    ):
        fetch("org/other")


def test_a_gateway_fetches_tokenizer_and_templates_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    named = "additional_chat_templates/tool_use.jinja"
    hub.repos["org/tiny"].files |= {named: b"{{ messages }}", "assets/chat_template.jinja": b"not needed"}
    (name, folder), *_ = model_folders(["org/tiny"], "").items()
    assert name == "org/tiny"
    assert "model.safetensors" not in hub.fetched()
    assert (folder / "tokenizer.json").is_file()
    assert (folder / named).is_file()
    assert not (folder / "assets").exists()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/tiny", files=TEXT_FILES) == folder
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids to ask the Hub, and it is not .* in the cache"):
        fetch("org/tiny")


def test_who_starts_before_a_service_fetches_for_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["models", "fetch", "hf://org/tiny", "--tokenizer-only"])
    assert "model.safetensors" not in hub.fetched()
    cli.main(["models", "fetch", "hf://org/tiny"])
    assert "model.safetensors" in hub.fetched()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert capsys.readouterr().out.splitlines()[-1] == str(fetch("hf://org/tiny"))


def test_a_broken_download_goes_on_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    # What it has when the connection breaks counts by whole pieces.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    hub.repos["org/tiny"].cut_after = 1_000_000
    folder = fetch("org/tiny")
    assert len(hub.ranges) == 1
    start = int(hub.ranges[0].removeprefix("bytes=").rstrip("-"))
    assert 0 < start <= 1_000_000
    assert (folder / "model.safetensors").read_bytes() == (DEMO_DRAFTER / "model.safetensors").read_bytes()


def test_a_gated_repository_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/tiny"].gated = True
    with pytest.raises(ConfigError, match=rf"Cannot access gated repo for url {hub.url}/org/tiny/.*; .* set HF_TOKEN"):
        fetch("org/tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch("org/tiny").is_dir()


def test_what_is_not_there_is_named(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"hf://org/none: there is no such folder here, .* Repository Not Found"):
        fetch("org/none")
    with pytest.raises(ConfigError, match=r"hf://org/tiny@v9: .* Revision Not Found"):
        fetch("hf://org/tiny@v9")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pytorch_model.bin", "pickled weights only .* convert models with"),
        ("model-q4.gguf", "GGUF weights only .* give one of these files on this machine"),
        ("weights.h5", "has no .*safetensors weights: name a checkpoint"),
    ],
)
def test_formats_that_are_not_read_are_refused_and_not_fetched(hub: Hub, file: str, said: str) -> None:
    files = hub.repos["org/tiny"].files
    files[file] = files.pop("model.safetensors")
    with pytest.raises(ConfigError, match=said):
        fetch("org/tiny")
    assert file not in hub.fetched()


def test_on_a_cluster_every_node_fetches_the_commit_that_the_launcher_found(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/tiny", files=TEXT_FILES)
    order = ServiceSpec(
        role="verifier",
        number=0,
        services=FleetSpec(),
        checkpoints=Checkpoints(target=folder, drafts=()),
        redis_url="",
        log_dir=tmp_path,
        tier=RayTier(),
    )
    endpoint = ServicePort(name="verifier-0", role="verifier", host="127.0.0.1", port=1, second_port=2)
    argv = order.child(endpoint).argv
    assert argv[argv.index("--model") + 1] == f"hf://org/tiny@{hub.repos['org/tiny'].commit}"
    assert str(repository_of(folder)) == f"hf://org/tiny@{hub.repos['org/tiny'].commit}"
    assert served_name(DEMO_DRAFTER) == "demo-drafter"


FETCH = "import sys; from paceline.checkpoints.source import folder_of; folder_of('org/tiny', '--model', say=print)"


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": "services", "HF_ENDPOINT": hub.url, "HF_HOME": str(cache)}


def test_a_terminal_sees_a_bar_and_a_log_one_line(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FETCH]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    shown = bytearray()
    with subprocess.Popen(command, env=environment(hub, tmp_path / "a"), stderr=theirs) as process:
        os.close(theirs)
        # A terminal whose last writer has gone gives an error.
        with suppress(OSError):
            while chunk := os.read(ours, 65536):
                shown += chunk
        assert process.wait(60) == 0
    os.close(ours)
    assert b"100%" in shown
    ended = subprocess.run(
        command, env=environment(hub, tmp_path / "b"), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr == ""
    assert re.fullmatch(rf"hf://org/tiny: what is not in .* is fetched from {hub.url}\n", ended.stdout)
