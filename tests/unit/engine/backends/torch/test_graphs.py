"""When steps are recorded and replayed; and that the CUDA capture says to torch what torch understands."""

from __future__ import annotations

import contextlib
import logging
from unittest import mock

import pytest
import torch

from paceline.engine.backends.torch.graphs import CudaCapture, GraphCache, Unrecorded


class Script:
    """A capture that writes down what is asked of it; recording may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.said: list[str] = []
        self.error = error

    def warm_up(self, work):
        self.said.append("warm up")
        work()

    def record(self, work):
        self.said.append("record")
        if self.error is not None:
            raise self.error
        return lambda: self.said.append("replay")

    def run(self, cache, bucket):
        """Runs a bucket once; returns what happened."""
        self.said.clear()
        cache.run(bucket, lambda: self.said.append("work"))
        return self.said.copy()


def test_the_first_step_of_a_bucket_warms_up_the_second_records_the_rest_replay():
    script = Script()
    cache = GraphCache(script, limit=4)
    assert [script.run(cache, "a") for _ in range(3)] == [["warm up", "work"], ["record", "replay"], ["replay"]]
    assert script.run(cache, "b") == ["warm up", "work"]
    assert cache.num_recorded == 1


def test_the_least_recently_used_graph_goes_when_there_are_too_many():
    script = Script()
    cache = GraphCache(script, limit=2)
    for bucket in "aabba":
        script.run(cache, bucket)
    assert script.run(cache, "c") == ["warm up", "work"]
    assert script.run(cache, "a") == ["replay"]
    assert script.run(cache, "b") == ["warm up", "work"]
    assert script.run(cache, "c") == ["warm up", "work"]
    assert cache.num_recorded == 0


def test_a_recording_that_fails_is_logged_once_and_steps_run_on_unrecorded(caplog):
    script = Script(RuntimeError("operation not permitted when stream is capturing"))
    cache = GraphCache(script, limit=4)
    with caplog.at_level(logging.ERROR):
        happened = [script.run(cache, "a") for _ in range(4)]
    assert happened == [["warm up", "work"], ["record", "work"], ["work"], ["work"]]
    assert script.run(cache, "b") == ["work"]
    assert cache.failed
    assert [record.message for record in caplog.records] == [
        "a step of a cannot be recorded as a graph; steps run unrecorded from now on"
    ]


def test_a_step_that_fails_by_itself_is_no_failed_recording():
    def broken():
        raise RuntimeError("out of memory")

    cache = GraphCache(Unrecorded(), limit=4)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.run("a", broken)
    assert not cache.failed


class FakeCuda:
    """`torch.cuda` with the arguments of the real one, and a list of what happened in which stream."""

    def __init__(self, monkeypatch):
        self.said: list[str] = []
        self.streams = ["default"]
        stream, graph = mock.Mock(), mock.Mock()
        stream.wait_stream = lambda other: self.said.append("side waits")
        default = mock.Mock()
        default.wait_stream = lambda other: self.said.append("default waits")
        graph.replay = lambda: self.said.append("replay")
        self.stream = stream
        recording = mock.create_autospec(torch.cuda.graph, side_effect=self.recording)
        for name, value in {
            "Stream": lambda device: stream,
            "current_stream": lambda device: default,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: graph,
            "stream": lambda each: self.inside("side"),
            "graph": recording,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def inside(self, name):
        self.streams.append(name)
        yield
        self.streams.pop()

    def recording(self, graph, pool, stream, capture_error_mode):
        assert (pool, stream, capture_error_mode) == ((0, 1), self.stream, "thread_local")
        return self.inside("recording")

    def work(self):
        self.said.append(f"work in {self.streams[-1]}")


def test_cuda_warms_up_on_a_stream_of_its_own_and_replays_what_it_recorded_there(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    cache = GraphCache(CudaCapture(torch.device("cuda", 0)), limit=2)
    for _ in range(3):
        cache.run("a", cuda.work)
    assert cuda.said == ["side waits", "work in side", "default waits", "work in recording", "replay", "replay"]
