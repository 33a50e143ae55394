"""vLLM's proposer beside helper processes that work, and beside those that do everything wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.vllm import Proposer
from paceline.vllm.helper_process import MOST_MISSES, HelperProcess
from paceline.vllm.step_message import ChainsMessage, StepMessage
from paceline.vllm.tier_client import MOST_WAIT_S
from tests.support.scripted_helper import VARIABLE
from tests.support.vllm_batch import VllmBatch, vllm_config

pytestmark = pytest.mark.usefixtures("scripted_helpers")

PATIENCE_S = 60.0
# A busy machine may take us off the CPU for so long; what blocks is far longer.
SLACK_S = 5.0


class Engine:
    """A batch, and a proposer that is asked after each step."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.batch = VllmBatch(max_model_len=60_000)
        config = vllm_config(str(folder), vocab_size=100_000, max_model_len=60_000)
        config.additional_config["paceline"].update(settings)
        self.proposer = Proposer(config)
        self.handed_out: dict[str, list[int]] = {}
        self.proposer.load_model("target")

    @property
    def helper(self) -> HelperProcess:
        assert self.proposer.client._helper is not None
        return self.proposer.client._helper

    @property
    def pid(self) -> int:
        assert self.helper._life is not None
        return self.helper._life.process.pid

    def step(self) -> list[list[int]]:
        sampled = self.batch.step(lambda name: [self.batch.texts[name][-1] + 1])
        self.batch.show(self.proposer, self.handed_out)
        began_s = time.monotonic()
        guesses = self.proposer.propose(sampled, self.batch.lengths, self.batch.token_ids, slot_mappings=None)
        assert time.monotonic() - began_s < MOST_WAIT_S + SLACK_S
        assert len(guesses) == len(self.batch.rows)
        self.handed_out = dict(zip(*self.proposer.take(), strict=True))
        assert [*self.handed_out.values()] == guesses
        return guesses

    def until(self, done: Callable[[list[list[int]]], object], pause_s: float = 0.002) -> list[list[int]]:
        """Steps until the guesses, or anything else, are as wanted."""
        end_s = time.monotonic() + PATIENCE_S
        while not done(guesses := self.step()):
            assert time.monotonic() < end_s
            time.sleep(pause_s)
        return guesses


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start_engine(script: str, **settings: str) -> Engine:
        monkeypatch.setenv(VARIABLE, script)
        started.append(Engine(tmp_path, **settings))
        started[-1].batch.admit("a", [10, 11, 12])
        return started[-1]

    yield start_engine
    for engine in started:
        engine.proposer.client.close()


def test_guesses_go_to_the_rows_they_are_for_and_are_no_longer_than_vllm_takes(start: Callable[[str], Engine]) -> None:
    engine = start("answers")
    engine.batch.admit("b", [500], reading=10**9)
    engine.batch.admit("c", [900])
    first, second, third = engine.until(any)
    last, other = engine.batch.texts["a"][-1], engine.batch.texts["c"][-1]
    assert first == [last + 1, last + 2, last + 3, last + 4]
    assert second == []
    assert third == [other + 1, other + 2, other + 3, other + 4]


LIMITED = {"speculation.max_draft_tokens": 2}
OFF: list[dict[str, Any]] = [
    {"extra_args": {"speculation.enabled": 0}},
    {"extra_args": {"speculation.max_draft_tokens": 0}},
    {"logit_bias": {5: 1.0}},
    {"min_p": 0.1},
]


@pytest.mark.parametrize("sampling", OFF)
@pytest.mark.parametrize("script", ["answers", "shows_trees"])
def test_requests_that_are_off_get_no_guess_and_others_as_many_as_they_take(
    start: Callable[[str], Engine], script: str, sampling: dict[str, Any]
) -> None:
    engine = start(script)
    engine.batch.admit("off", [500], **sampling)
    engine.batch.admit("limited", [900], extra_args=LIMITED)
    for _ in range(3):
        guesses = engine.until(all_but_one)
        assert [len(each) for each in guesses] == [4, 0, 2]


def all_but_one(guesses: list[list[int]]) -> bool:
    return sum(map(bool, guesses)) == len(guesses) - 1


def test_nobody_waits_for_guesses_where_all_requests_are_off(
    start: Callable[[str], Engine], told: list[StepMessage]
) -> None:
    engine = start("answers")
    engine.batch.admit("off", [500], **OFF[0])
    engine.until(any)
    engine.batch.end("a")
    del told[:]
    for _ in range(3):
        assert engine.step() == [[]]
    assert len(told) == 3
    assert not any(message.awaited or message.taken for message in told)


def test_guesses_are_handed_out_once(start: Callable[[str], Engine]) -> None:
    engine = start("answers")
    engine.until(any)
    # As near the greatest length, where vLLM asks for no guesses.
    assert engine.proposer.take() == ((), ())


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[StepMessage]:
    """All messages to helpers."""
    messages: list[StepMessage] = []
    exchange = HelperProcess.exchange

    def recorded(self: HelperProcess, message: StepMessage, deadline_s: float) -> ChainsMessage | None:
        messages.append(message)
        return exchange(self, message, deadline_s)

    monkeypatch.setattr(HelperProcess, "exchange", recorded)
    return messages


def test_guesses_on_the_board_are_taken_without_asking_and_the_helper_is_told(
    start: Callable[[str], Engine], told: list[StepMessage]
) -> None:
    engine = start("shows_trees")
    engine.batch.admit("b", [500])
    # Where the helper is late, what is left of its last tree is taken, too.
    guesses = engine.until(lambda guesses: told and told[-1].taken and {*map(len, guesses)} == {4})
    assert not told[-1].awaited
    assert [*told[-1].taken] == guesses == [[engine.batch.texts[name][-1] + n for n in (1, 2, 3, 4)] for name in "ab"]
    # What a row is shown for the first time is asked for.
    engine.batch.admit("c", [900])
    engine.until(all)
    assert any(message.awaited and message.rows[-1].base_len == 0 for message in told)


def test_a_board_full_of_rubbish_gives_no_guess_and_the_helper_is_asked(start: Callable[[str], Engine]) -> None:
    engine = start("scribbles")
    (guesses,) = engine.until(any)
    last = engine.batch.texts["a"][-1]
    assert guesses == [last + 1, last + 2, last + 3, last + 4]
    assert not engine.proposer.client.failures


def test_near_the_largest_length_chains_are_cut(start: Callable[[str], Engine]) -> None:
    engine = start("answers")
    engine.until(any)
    engine.batch.admit("b", [])
    guesses: list[list[int]] = [[], []]
    while not guesses[1]:
        engine.batch.texts["b"] = list(range(59_996))
        guesses = engine.step()
    assert guesses[1] == [59_997, 59_998]


@pytest.mark.parametrize("script", ["rests", "reads_nothing"])
def test_nobody_waits_until_the_helper_says_so(start: Callable[[str], Engine], script: str) -> None:
    engine = start(script)
    engine.until(lambda _: engine.helper.connected)
    assert not engine.helper.awaits
    assert engine.step() == [[]]


def test_after_the_death_of_a_helper_another_one_is_told_everything_again(start: Callable[[str], Engine]) -> None:
    engine = start("answers")
    engine.until(any)
    os.kill(killed := engine.pid, signal.SIGKILL)
    guesses = engine.until(lambda guesses: any(guesses) and engine.helper.connected and engine.pid != killed)
    assert guesses[0][0] == engine.batch.texts["a"][-1] + 1


@pytest.mark.parametrize(
    "script", ["is_silent", "is_slow", "leaves_the_vocabulary", "forgets_rows", "sends_rubbish", "dies"]
)
def test_a_helper_that_goes_wrong_is_replaced_and_gives_nothing(start: Callable[[str], Engine], script: str) -> None:
    engine = start(script)
    engine.until(lambda _: engine.helper.connected)
    pid = engine.pid
    guesses = engine.until(lambda _: engine.helper.connected and engine.pid != pid)
    assert guesses == [[]]


def test_a_helper_that_floods_is_given_up(start: Callable[[str], Engine], caplog: pytest.LogCaptureFixture) -> None:
    assert start("floods").until(lambda _: "messages at once" in caplog.text) == [[]]


def test_a_helper_that_reads_nothing_is_replaced_when_its_socket_is_full(start: Callable[[str], Engine]) -> None:
    engine = start("reads_nothing")
    engine.until(lambda _: engine.helper.connected)
    pid = engine.pid
    engine.batch.texts["a"] = list(range(50_000))
    engine.until(lambda _: not engine.helper.connected)
    engine.batch.texts["a"] = [1]
    engine.until(lambda _: engine.helper.connected and engine.pid != pid)


def test_a_helper_that_was_stopped_in_mid_run_gives_nothing_until_it_is_replaced(
    start: Callable[[str], Engine],
) -> None:
    engine = start("answers")
    engine.until(any)
    os.kill(stopped := engine.pid, signal.SIGSTOP)
    for _ in range(MOST_MISSES):
        engine.step()
    assert not engine.helper.connected
    engine.until(lambda guesses: any(guesses) and engine.pid != stopped)


def test_what_vllm_hands_over_wrongly_is_counted_and_told_once(
    start: Callable[[str], Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("answers")
    engine.until(any)
    for _ in range(2):
        assert engine.proposer.propose([[1]], None, None) == [[]]  # type: ignore[arg-type]
        engine.until(any)
    assert engine.proposer.client.failures == {"TypeError": 2}
    assert sum("without guesses" in record.message for record in caplog.records) == 1


def test_the_helper_runs_on_the_cpus_that_were_chosen_for_it(start: Callable[..., Engine]) -> None:
    cpu = max(os.sched_getaffinity(0))
    engine = start("answers", cpus=str(cpu))
    engine.until(any)
    assert os.sched_getaffinity(engine.pid) == {cpu}


def test_cpus_that_do_not_exist_are_told_of_and_the_helper_works(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    start("answers", cpus="8191").until(any)
    assert "cannot be chosen" in caplog.text


def test_other_ranks_have_no_helper_and_no_guesses(tmp_path: Path) -> None:
    other = Proposer(vllm_config(str(tmp_path), rank=1, tensor_parallel_size=2))
    other.load_model()
    batch = VllmBatch()
    batch.admit("a", [1, 2])
    batch.show(other, {})
    assert other.propose(batch.step(), batch.lengths, batch.token_ids) == [[]]
    assert other.client._helper is None
    other.client.close()


def test_the_first_rank_of_the_last_stage_has_the_helper(tmp_path: Path) -> None:
    assert Proposer(vllm_config(str(tmp_path), rank=2, tensor_parallel_size=2)).client._helper is not None


def test_a_helper_ends_with_its_proposer(start: Callable[[str], Engine]) -> None:
    engine = start("answers")
    engine.until(lambda _: engine.helper.connected)
    assert engine.helper._life is not None
    process = engine.helper._life.process
    engine.proposer.client.close()
    assert process.returncode is not None
    assert engine.step() == [[]]


def test_a_version_that_was_not_tested_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1"))
    config = vllm_config(str(tmp_path))
    with pytest.raises(ConfigError, match=r'vLLM 0\.99\.1 .* known: 0\.32\.0, 0\.33\.0; .*"untested": true'):
        Proposer(config)
    config.additional_config["paceline"]["untested"] = True
    Proposer(config)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (None, "--additional-config must hold a section paceline"),
        ({}, "needs drafters"),
        ({"drafters": ["nowhere"]}, "host:port"),
        ({"drafters": ["h:1"], "drafter": "h:1"}, "is no setting"),
        ({"drafters": ["h:1"], "cpus": "1-"}, r"paceline\.cpus must be a list of CPUs"),
    ],
)
def test_a_wrong_setting_ends_the_start_with_its_message(tmp_path: Path, section: object, said: str) -> None:
    config = vllm_config(str(tmp_path))
    config.additional_config = {"paceline": section}
    with pytest.raises(ConfigError, match=said):
        Proposer(config)
