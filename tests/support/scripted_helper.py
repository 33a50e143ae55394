"""A helper process that does one thing, good or bad: `python -m tests.support.scripted_helper --fd 5 --board 6`.

What it does stands in the environment variable `SCRIPTED_HELPER`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TypeAlias

from paceline.forest import ROOT
from paceline.vllm.board import BOARD_BYTES, BoardTree, SharedTrees
from paceline.vllm.step_message import NO_STEP, ChainsMessage, StepMessage
from tests.support.vllm_batch import HeldSessions

VARIABLE = "SCRIPTED_HELPER"
NUM_GUESSES = 9
Stream: TypeAlias = "Connection[ChainsMessage, StepMessage]"


def _steps(stream: Stream) -> Iterator[StepMessage]:
    with suppress(EOFError):
        while True:
            yield stream.recv()


def _tells(stream: Stream, step: int, *chains: list[int]) -> None:
    stream.send(ChainsMessage(step, True, chains))


def answers(stream: Stream, delay_s: float = 0.0, first: int = 0) -> None:
    """Guesses that each token is one more than the one before; ends at what does not fit what it holds."""
    held = HeldSessions()
    for step in _steps(stream):
        held.take(step.rows, step.closed)
        if not step.awaited:
            _tells(stream, step.step)
            continue
        time.sleep(delay_s)
        lasts = [held.tokens[row.session][-1] + first for row in step.rows]
        _tells(stream, step.step, *([last + guess for guess in range(1, NUM_GUESSES + 1)] for last in lasts))


def shows_trees(stream: Stream, board: SharedTrees) -> None:
    """The same guesses as `answers`, on the board; answers when it is asked nevertheless."""
    held = HeldSessions()
    for step in _steps(stream):
        held.take(step.rows, step.closed)
        texts = {row.session: held.tokens[row.session] for row in step.rows}
        chains = [[text[-1] + guess for guess in range(1, NUM_GUESSES + 1)] for text in texts.values()]
        _tells(stream, step.step, *(chains if step.awaited else ()))
        for (session, text), chain in zip(texts.items(), chains, strict=True):
            board.write(
                session,
                BoardTree(
                    committed_len=len(text),
                    least=0.1,
                    price=0.1,
                    child_share=0.5,
                    wait_share=math.nan,
                    weights=[-0.01 * (place + 1) for place in range(NUM_GUESSES)],
                    token_ids=chain,
                    parents=[ROOT, *range(NUM_GUESSES - 1)],
                ),
            )


def scribbles(stream: Stream, board: SharedTrees) -> None:
    """Answers, and fills the board with what is no tree."""
    board._memory[:] = bytes([0xA5]) * BOARD_BYTES
    answers(stream)


def rests(stream: Stream) -> None:
    """Reads all, and says nothing: drafters are at rest."""
    for _ in _steps(stream):
        pass


def is_slow(stream: Stream) -> None:
    """Answers, but later than anybody waits."""
    answers(stream, delay_s=0.4)


def leaves_the_vocabulary(stream: Stream) -> None:
    """Answers with ids that no model has."""
    answers(stream, first=1 << 40)


def forgets_rows(stream: Stream) -> None:
    """Answers with one chain too few."""
    for step in _steps(stream):
        _tells(stream, step.step, *([1] for _ in range(len(step.rows) + 1 if step.awaited else 0)))


def is_silent(stream: Stream) -> None:
    """Wants to be waited for, and then says nothing."""
    for count, step in enumerate(_steps(stream)):
        if not count:
            _tells(stream, step.step)


def reads_nothing(stream: Stream) -> None:
    """Freezes once it is ready."""
    time.sleep(600)


def sends_rubbish(stream: Stream) -> None:
    """Sends bytes that are no message."""
    next(_steps(stream))
    os.write(stream.fileno(), b"\xff" * 4096)
    time.sleep(600)


def floods(stream: Stream) -> None:
    """Sends messages of no use, without an end."""
    _tells(stream, 0)
    while True:
        _tells(stream, NO_STEP)


def dies(stream: Stream) -> None:
    """Answers a few steps, then dies."""
    for count, step in enumerate(_steps(stream)):
        if count == 5:
            sys.exit(3)
        _tells(stream, step.step, *([1] for _ in step.rows if step.awaited))


SCRIPTS: dict[str, Callable[[Stream], None]] = {
    script.__name__: script
    for script in (
        answers,
        rests,
        is_slow,
        leaves_the_vocabulary,
        forgets_rows,
        is_silent,
        reads_nothing,
        sends_rubbish,
        floods,
        dies,
    )
}
BOARD_SCRIPTS = {script.__name__: script for script in (shows_trees, scribbles)}


def main() -> None:
    """Runs the script that the environment names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--board", type=int, required=True)
    arguments = parser.parse_args()
    stream, script = Connection(arguments.fd), os.environ[VARIABLE]
    stream.recv()
    stream.send(ChainsMessage(NO_STEP, False))
    try:
        if script in BOARD_SCRIPTS:
            BOARD_SCRIPTS[script](stream, SharedTrees(arguments.board))
        else:
            SCRIPTS[script](stream)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)


if __name__ == "__main__":
    main()
