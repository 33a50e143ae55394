"""A first compilation of a grammar, in a process of its own: `python -m paceline.engine.grammar_trial` reads it.

llguidance's limits bound most of what a grammar costs, but not all of it: some of a hundred bytes compute for hours or
fill the memory, and nothing stops a thread. So a grammar that is new has to be compiled here first, within bounds of
processor time and memory that the system keeps.
"""

from __future__ import annotations

import logging
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

import paceline
from paceline.core.errors import InvalidRequestError, UnavailableError

logger = logging.getLogger(__name__)

# As `paceline.core.grammar` names it, whose imports would take most of a trial's time.
FIELD = "grammar"
# Processor time and memory of a trial. 1,000 properties with patterns take 0.3 s and 130 MB, imports included.
MOST_S, MOST_BYTES = 0.8, 1024**3
# Wall-clock time of a trial, which only a machine that stands still exceeds: at a load of 100 on two cores, one of
# 0.3 s of processor time at `NICENESS` takes a minute.
PATIENCE_S = 300.0
# Processor time of a mask but for the first, which every token of every session costs: the limits allow some 10 ms.
MOST_MASK_S = 0.1
# Bytes of text that a grammar may leave no choice of at one place. To cut so much into tokens takes 6 ms, and more in
# proportion: a schema of 3 KB whose array repeats a constant forced 3 MB, which took a second.
MOST_FORCED_BYTES = 16_384
# Output of a process that ran out of memory.
OUT_OF_MEMORY = (b"MemoryError", b"memory allocation of")
# Limits of a grammar: its lexer's work at first and in a step (some 14,000 a ms), items of its parser in a step (some
# 20,000 a ms), states (1 to 2 KiB each), and symbols.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Returns the beginning of a grammar.

    Raises:
        InvalidRequestError: It is invalid, or needs more than the limits allow.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    check_forced(matcher)
    # The first mask takes longest; copies know what it found.
    matcher.compute_bitmask()
    begun_s = time.thread_time()
    matcher.compute_bitmask()
    if time.thread_time() - begun_s > MOST_MASK_S:
        raise InvalidRequestError(FIELD, f"takes more than {MOST_MASK_S:g} s for each token")
    if matcher.is_error():
        raise InvalidRequestError(FIELD, " ".join(matcher.get_error().split()))
    return matcher


def check_forced(matcher: LLMatcher) -> int:
    """Returns how many bytes come next for sure, which is found once and known from then on.

    Raises:
        InvalidRequestError: They are too many.
    """
    count = len(matcher.compute_ff_bytes())
    if count > MOST_FORCED_BYTES:
        problem = f"leaves no choice of {count} bytes of text in a row, at most {MOST_FORCED_BYTES} are allowed"
        raise InvalidRequestError(FIELD, problem)
    return count


def try_out(grammar: str) -> None:
    """Compiles a grammar in another process; blocks.

    Raises:
        InvalidRequestError: It cannot be compiled, or takes too much.
        UnavailableError: The machine is too busy to tell.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name],
            input=grammar.encode(),
            capture_output=True,
            cwd=Path(paceline.__file__).parents[1],
            timeout=PATIENCE_S,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        raise UnavailableError("the machine is too busy to compile a grammar; try again") from None
    if done.returncode < 0 or any(sign in done.stderr for sign in OUT_OF_MEMORY):
        raise InvalidRequestError(FIELD, f"takes more than {MOST_S:g} s, or too much memory, to be compiled")
    if done.returncode:
        logger.error("grammars cannot be tried out", extra={"stderr": done.stderr.decode(errors="replace")[-2000:]})
        raise UnavailableError("grammars cannot be compiled here")
    if done.stdout:
        raise InvalidRequestError(FIELD, done.stdout.decode())


def main() -> None:
    """Writes why the grammar cannot be compiled; nothing: it can. Dies of one that takes too much."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    # Processor time, not wall-clock time: on a busy machine every grammar would be too slow.
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        # All models share only the vocabulary of bytes.
        compiled(LLTokenizer("byte"), sys.stdin.buffer.read().decode())
    except InvalidRequestError as error:
        sys.stdout.buffer.write(error.problem.encode())


if __name__ == "__main__":
    main()
