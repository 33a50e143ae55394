"""A checkpoint is whole when all files of its commit are here, whoever was killed on the way."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from paceline.checkpoints.source import MODEL_FILES, TEXT_FILES
from paceline.core.errors import ConfigError
from tests.integration.test_checkpoint_source import environment, fetch, point_to
from tests.support.hub import Hub, Repo, serving

SHARDS = [f"model-0000{number}-of-00006.safetensors" for number in range(1, 7)]
FILES: dict[str, bytes] = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {"vocab": {}}}',
    "tokenizer_config.json": b'{"eos_token": null}',
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("abcdef", SHARDS, strict=True))}).encode(),
    **{name: random.Random(name).randbytes(200_000) for name in SHARDS},
}
# Fetches once for each place, in children of one process; each is killed at that call of a function that changes or
# reads something. Prints how many such calls a whole fetch has.
KILLED = """
import itertools, os, signal, sys, threading
from pathlib import Path
import httpx, huggingface_hub.utils.tqdm, huggingface_hub.file_download
from huggingface_hub import constants
from paceline.checkpoints.source import folder_of

CALLS = {"write", "update", "replace", "rename", "symlink", "mkdir", "open", "unlink", "remove", "recv", "read"}
constants.DOWNLOAD_CHUNK_SIZE = 1 << 14

def fetch(cache, place):
    count = itertools.count(1)
    def at(frame, event, function):
        if event == "c_call" and function.__name__ in CALLS and next(count) == place:
            os.kill(os.getpid(), signal.SIGKILL)
    constants.HF_HUB_CACHE = str(cache)
    threading.setprofile(at)
    sys.setprofile(at)
    folder_of("org/sharded@" + sys.argv[1], "--model", say=lambda line: None)
    sys.setprofile(None)
    return next(count)

folder, num_places = Path(sys.argv[2]), int(sys.argv[3])
read, write = os.pipe()
for number in range(num_places + 1):
    place = 0 if number == 0 else 1 + int(0.95 * total) * (number - 1) // (num_places - 1)
    pid = os.fork()
    if pid == 0:
        os.write(write, str(fetch(folder / str(number), place)).encode())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if number == 0:
        total = int(os.read(read, 20))
        print(total)
    else:
        # The number of calls varies a little, so that the last one may come to its end.
        assert os.WIFSIGNALED(status) or number == num_places, (number, place, status)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(sharded=Repo(files=dict(FILES))) as hub:
        point_to(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
    huggingface_hub.close_session()


def pinned(hub: Hub) -> str:
    return f"org/sharded@{hub.repos['org/sharded'].commit}"


def is_whole(folder: Path) -> bool:
    return {path.name: path.read_bytes() for path in folder.iterdir()} == FILES


def killed_and_started_again(hub: Hub, folder: Path, num_places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", KILLED, hub.repos["org/sharded"].commit, str(folder), str(num_places)]
    done = subprocess.run(
        command, env=environment(hub, folder), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 2 * num_places
    left = []
    for number in range(1, num_places + 1):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / str(number)))
        hub.requests.clear()
        assert is_whole(fetch(pinned(hub))), f"at place {number}"
        left.append(len(hub.fetched()))
        hub.requests.clear()
        assert is_whole(fetch(pinned(hub)))
        assert not hub.requests, "what is whole is not asked for"
    assert left[0] == len(FILES)
    assert min(left) < len(FILES), "what is here is not fetched again"


def test_a_start_that_is_killed_anywhere_is_finished_by_the_next(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_and_started_again(hub, tmp_path, 4, monkeypatch)


@pytest.mark.parametrize("byte", [1, 16_384, 199_999])
def test_a_hub_that_breaks_off_within_a_file_is_asked_again(byte: int, hub: Hub) -> None:
    hub.repos["org/sharded"].cut_after = byte
    assert is_whole(fetch(pinned(hub)))
    assert not hub.repos["org/sharded"].cut_after, "it broke off"


def test_a_part_that_another_program_has_fetched_is_not_taken_for_the_whole(hub: Hub) -> None:
    commit = hub.repos["org/sharded"].commit
    for name in ("config.json", SHARDS[0]):
        huggingface_hub.hf_hub_download("org/sharded", name, revision=commit)
    hub.requests.clear()
    assert is_whole(fetch(pinned(hub)))
    assert hub.fetched() == FILES.keys() - {"config.json", SHARDS[0]}


def test_what_one_service_needs_is_not_taken_for_what_another_needs(hub: Hub) -> None:
    for files in (TEXT_FILES, MODEL_FILES):
        folder = fetch(pinned(hub), files=files)
    assert is_whole(folder)


def test_without_the_hub_a_whole_snapshot_of_another_program_is_taken_and_a_torn_one_is_not(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub.snapshot_download("org/sharded")
    # Old releases of huggingface_hub keep no list of a commit's files.
    cache = shutil.copytree(tmp_path / "cache", tmp_path / "old", symlinks=True, ignore=lambda *_: ["trees"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = fetch("org/sharded")
    assert is_whole(folder)
    for name in (SHARDS[1], "model.safetensors.index.json"):
        (folder / name).unlink()
        for given in ("org/sharded", pinned(hub)):
            with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE forbids to ask the Hub, and it is not .wholly. in"):
                fetch(given)


def test_a_cache_that_cannot_be_written_names_hf_home(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(Exception, match=r"the cache .*/file/hub cannot be written .*: set HF_HOME to a folder"):
        fetch(pinned(hub))
    assert os.listdir(tmp_path) == ["file"]
