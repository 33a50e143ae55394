"""The pure parts of the peers' bench: jobs, answers, cases, deadlines. No peer is installed or run."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from loadtest.peers.bench import jobs_of, num_different
from loadtest.peers.inside.protocol import About, Case, Job, TokenIds, Wave, WaveClock, measure
from loadtest.peers.run import PeerFigure, figures_of, parse_answer

from paceline.cluster.checkpoints import DEMO_DRAFTER
from tools.environments import child_environ, recipe_of
from tools.processes import CommandFailedError, last_words, run_command

ENV = dict(os.environ)
PROMPTS = [[0, number] for number in range(32)]


def job(draft_length: int | None = None, streams: tuple[int, ...] = (1, 8)) -> Job:
    return Job(
        target="t",
        draft="d",
        draft_length=draft_length,
        prompts=PROMPTS,
        max_new_tokens=4,
        passes=2,
        cores=[0],
        cases=[Case(streams=each, num_prompts=8) for each in streams],
    )


def test_a_job_survives_its_json() -> None:
    assert Job.from_json(job(3).to_json()) == job(3)


def test_a_job_knows_the_room_an_engine_needs() -> None:
    assert (job().most_streams, job().longest) == (8, 6)


@pytest.mark.parametrize("text", ["[]", "{", '{"cases": []}', '{"cases": [{"streams": 1}]}'])
def test_what_is_no_job_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        Job.from_json(text)


def test_an_answer_is_an_object() -> None:
    assert parse_answer('{"streams": 1}') == {"streams": 1}
    for line in ("loading weights", "3", ""):
        with pytest.raises(ValueError, match="instead of a JSON object"):
            parse_answer(line)


def test_cases_run_whole_waves_one_process_a_draft_length() -> None:
    arguments = Namespace(draft=DEMO_DRAFTER, draft_lengths=[3, 5], streams=[1, 8, 32], max_tokens=4, passes=1)
    jobs = jobs_of(Path("t"), arguments)
    one, eight, most = (Case(streams=streams, num_prompts=count) for streams, count in ((1, 8), (8, 8), (32, 32)))
    assert {job.draft_length: job.cases for job in jobs} == {None: [one, eight, most], 3: [one, eight], 5: [one]}
    assert len(jobs[0].prompts) == 32


class FakePeer:
    """Decodes a token in 1 ms, after 10 ms of prefill."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def about(self) -> About:
        return About(version="1", precision="none")

    def run(self, prompts: TokenIds, max_new_tokens: int) -> Wave:
        self.asked.append((len(prompts), max_new_tokens))
        decoded = len(prompts) * (max_new_tokens - 1)
        seconds = 0.001 * (max_new_tokens - 1)
        token_ids = [[7] * max_new_tokens for _ in prompts]
        return Wave(token_ids=token_ids, seconds=0.010 + seconds, decode_tokens=decoded, decode_s=seconds)


def test_a_case_is_warmed_up_and_then_measured_in_waves() -> None:
    peer = FakePeer()
    answer = measure(peer, job(), Case(streams=4, num_prompts=8))
    assert peer.asked == [(4, 16), (4, 4), (4, 4), (4, 4), (4, 4)]
    assert answer["decode_tokens_per_s"] == pytest.approx(4_000)
    assert answer["total_tokens_per_s"] == pytest.approx(32 / 0.026)
    assert answer["num_tokens"] == 32
    assert answer["token_ids"] == [[7] * 4] * 8


def test_decode_counts_what_came_while_all_streams_decoded() -> None:
    clock = WaveClock(streams=2, max_new_tokens=8)
    for counts in ([3], [3, 0], [4, 2], [6, 3], [9, 4], [9, 8]):
        clock.note(counts)
    wave = clock.wave([[1] * 8, [1] * 8])
    assert (wave.num_tokens, wave.decode_tokens) == (16, 6)
    assert 0 < wave.decode_s < wave.seconds


def test_a_wave_without_a_token_has_no_decode_speed() -> None:
    assert WaveClock(streams=1, max_new_tokens=8).wave([[]]).decode_tokens == 0


def test_figures_keep_what_was_measured_before_a_failure() -> None:
    answered = {
        "streams": 1,
        "decode_tokens_per_s": 9.04,
        "total_tokens_per_s": 8.0,
        "num_tokens": 4,
        "token_ids": [[1]],
    }
    done, lost = figures_of("vllm", job(3), [answered], "python ended with status 1")
    assert (done.mode, done.draft_length, done.decode_tokens_per_s, done.error) == ("draft", 3, 9.04, None)
    assert (lost.streams, lost.error) == (8, "python ended with status 1")
    assert json.loads(json.dumps(done.row()))["decode_tokens_per_s"] == 9.0


def test_texts_are_compared_with_the_peers_own_plain_run() -> None:
    plain = PeerFigure(peer="a", streams=1, token_ids=[[1, 2], [3, 4]])
    drafted = PeerFigure(peer="a", streams=1, mode="draft", draft_length=3, token_ids=[[1, 2], [3, 5]])
    stranger = PeerFigure(peer="b", streams=8, token_ids=[[1, 2]])
    assert num_different(drafted, [plain, drafted]) == 1
    assert num_different(stranger, [plain, stranger]) is None


def test_a_peer_inherits_nothing_of_ours_and_asks_no_network() -> None:
    inherited = {"PATH": "/bin", "PYTHONPATH": "services", "PACELINE_PORT": "1", "OMP_NUM_THREADS": "1"}
    env = child_environ(inherited)
    assert env["PATH"] == "/bin"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert not set(inherited) - {"PATH"} & set(env)


def test_lines_of_a_command_arrive_as_they_are_printed() -> None:
    lines: list[str] = []
    program = "import sys\nprint(sys.stdin.read())\nprint('two')"
    run_command([sys.executable, "-c", program], env=ENV, quiet_s=30, stdin="one", on_line=lines.append)
    assert lines == ["one", "two"]


def test_a_command_past_its_deadline_is_stopped_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(60)"
    )
    with pytest.raises(CommandFailedError, match=r"python\S* was not done within 2 s"):
        run_command([sys.executable, "-c", program, pid_file], env=ENV, quiet_s=2)
    child = Path("/proc", pid_file.read_text())
    for _ in range(100):
        # An orphan that ended may wait a moment for its new parent.
        if not child.exists() or "\nState:\tZ" in (child / "status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the command's child outlived it")


def test_a_failing_command_is_named_with_its_last_error() -> None:
    program = "import sys\nsys.stderr.write('loading\\nValueError: no such model\\nbye\\n')\nsys.exit(3)"
    with pytest.raises(CommandFailedError, match="ended with status 3: ValueError: no such model"):
        run_command([sys.executable, "-c", program], env=ENV, quiet_s=30)


def test_a_missing_program_is_one_line() -> None:
    with pytest.raises(CommandFailedError, match="engine does not start: No such file"):
        run_command(["/nowhere/engine"], env=ENV, quiet_s=30)


def test_silence_is_reported_too() -> None:
    assert last_words("\n \n") == "it printed nothing"


def test_a_job_says_how_guesses_come_about() -> None:
    assert [job().mode, job(3).mode, replace(job(3), drafters=["host:1"]).mode] == ["plain", "draft", "tier"]


def test_a_list_of_requirements_is_known_by_those_that_it_includes_too(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("# both\n-r other.txt\nb==1\n")
    (tmp_path / "other.txt").write_text("a==1\n")
    recipe = recipe_of(tmp_path / "own.txt")
    assert recipe == "# both\n-r other.txt\nb==1\na==1\n"
    (tmp_path / "other.txt").write_text("a==2\n")
    assert recipe_of(tmp_path / "own.txt") != recipe
