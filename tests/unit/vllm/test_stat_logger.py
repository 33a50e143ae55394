"""The helper's metrics among vLLM's own."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import REGISTRY, generate_latest

from paceline.core.errors import ConfigError
from paceline.vllm import stat_logger
from paceline.vllm.places import metrics_socket, metrics_sockets
from paceline.vllm.stat_logger import TierCollector
from tests.support.vllm_batch import vllm_config

TEXT = b"""# HELP paceline:helper_steps_total Steps told.
# TYPE paceline:helper_steps_total counter
paceline:helper_steps_total{mode="plain"} 3.0
# TYPE python_info gauge
python_info 1.0
"""


@contextmanager
def served(path: Path, text: bytes, holds: bool = False) -> Iterator[None]:
    """Answers one reader with a text; does not end it if it holds."""
    done = threading.Event()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            stream, _ = listening.accept()
            with stream:
                stream.sendall(text)
                if holds:
                    done.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        done.set()
        thread.join()
    path.unlink()


@pytest.fixture(autouse=True)
def _temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def shown(instance_id: str = "17") -> list[str]:
    families = TierCollector(lambda: metrics_sockets(instance_id)).collect()
    return [f"{sample.name} {sample.labels} {sample.value}" for family in families for sample in family.samples]


def test_our_families_are_shown_with_the_number_of_their_engine() -> None:
    with served(metrics_socket("17", 0), TEXT), served(metrics_socket("17_dp1", 1), TEXT):
        assert shown() == [
            "paceline:helper_steps_total {'mode': 'plain', 'engine': '0'} 3.0",
            "paceline:helper_steps_total {'mode': 'plain', 'engine': '1'} 3.0",
        ]


def test_a_helper_of_another_vllm_is_not_asked() -> None:
    with served(metrics_socket("17", 0), TEXT):
        assert shown("18") == []
        assert shown() != []


@pytest.mark.parametrize("text", [b"\xff\xfe", b"paceline:x{ 1 2 3"])
def test_a_helper_that_says_nonsense_gives_none(text: bytes) -> None:
    with served(metrics_socket("17", 0), text):
        assert shown() == []


def test_a_helper_that_does_not_end_is_left_after_a_moment() -> None:
    began_s = time.monotonic()
    with served(metrics_socket("17", 0), TEXT, holds=True):
        assert shown() == []
        assert time.monotonic() - began_s < 20


def test_a_helper_that_is_away_gives_none() -> None:
    path = metrics_socket("17", 0)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert shown() == []


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = metrics_socket("17", 0).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="nobody else can write to"):
        metrics_socket("17", 0)


def test_vllm_finds_a_class_of_its_own_kind_that_shows_the_tier_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.AggregateStatLoggerBase = type("AggregateStatLoggerBase", (), {})  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, loggers.__name__, loggers)
    config = vllm_config(str(tmp_path))
    made = stat_logger.TierStatLogger
    assert issubclass(made, loggers.AggregateStatLoggerBase)
    for _ in range(2):
        made(vllm_config=config, engine_indexes=[0])
        with served(metrics_socket("17", 0), TEXT):
            assert generate_latest(REGISTRY).count(b'paceline:helper_steps_total{engine="0",mode="plain"} 3.0') == 1
    config.speculative_config = None
    config.instance_id = "19"
    made(vllm_config=config, engine_indexes=[0])
    with served(metrics_socket("17", 0), TEXT):
        assert b"paceline:helper_steps" in generate_latest(REGISTRY)
    REGISTRY.unregister(stat_logger._registered.pop())
