"""Makes grammars, as sessions carry them, of JSON schemas, patterns and choices.

Each grammar is compiled once as a check, in a separate process that is killed if it takes too long; a verifier compiles
it again for its own vocabulary. These functions block: call them outside the event loop.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import paceline
from paceline.core.errors import InvalidRequestError, OverloadedError, UnavailableError
from paceline.core.params import MAX_GRAMMAR_CHARS
from paceline.gateway.access.allowance import Allowance
from paceline.gateway.access.callers import current_caller
from paceline.gateway.message.schemas import Json, definitions, whole, without

MAX_CHOICES = 1024
# Processor time for a compilation, wall-clock time for it on a busy machine, and time for the process to start.
MOST_S, PATIENCE_S, START_S = 0.8, 10.0, 20.0
# Processor time that a key may use for new grammars: a burst, such as all schemas of a client that has just started,
# then a tenth of a core. A verifier compiles each of them again. Without keys there is no bound.
BURST_S, SECONDS_PER_S = 10.0, 0.1
# Answers that are cached: the same schema comes with every request of a client.
MOST_KEPT = 64
# As Python's `json.dumps` writes it: with a fixed layout, most of the syntax of an answer is forced.
LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LOOSE: Mapping[str, Any] = {"lenient": True, "coerce_one_of": True}
# What patterns may say and no grammar holds: look-around, back-references, the edges of words.
_BEYOND_GRAMMARS = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")


class _DiedError(Exception):
    """The question killed the process."""


class Checker:
    """The process that compiles; the first question starts it, and so does the next one after it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allowance = Allowance(burst=BURST_S, per_s=SECONDS_PER_S)
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        atexit.register(self.close)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question, as `paceline.gateway.grammars.checker` gives it.

        What is new costs the current caller processor time; what is known is free.

        Raises:
            OverloadedError: The caller has used up its processor time; names the wait.
            UnavailableError: The machine is too busy to answer in time.
        """
        line = json.dumps(question).encode() + b"\n"
        key = hashlib.sha256(line).digest()
        with self._lock:
            known = self._kept.get(key) or self._new(line, current_caller().name)
            self._kept[key] = known
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        return known

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _new(self, line: bytes, caller: str) -> dict[str, Any]:
        if caller and (wait_s := self._allowance.wait_s(caller)):
            raise OverloadedError(
                f"API key {caller!r} has had its {BURST_S:g} s of compiling grammars, and gets {SECONDS_PER_S:g} s "
                "more each second; grammars that were asked for lately are free",
                retry_after_s=wait_s,
            )
        begun_s = time.monotonic()
        try:
            answer = self._answer(line)
        except UnavailableError:
            # Nobody knows how long it computed, at most as long as it may.
            self._allowance.use(caller, min(MOST_S, time.monotonic() - begun_s))
            raise
        self._allowance.use(caller, answer.pop("seconds"))
        return answer

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            if self._process is None:
                self._process = _start()
                self._exchange(b'{"kind": "regex", "value": "a"}\n', START_S)
            answer: dict[str, Any] = json.loads(self._exchange(line, PATIENCE_S))
        except TimeoutError:
            self.close()
            raise UnavailableError("the machine is too busy to compile a grammar; try again") from None
        except (_DiedError, OSError):
            self.close()
            return {"error": f"takes more than {MOST_S:g} s, or too much memory, to be compiled", "seconds": MOST_S}
        return answer

    def _exchange(self, line: bytes, most_s: float) -> bytes:
        """Returns the answer to a line.

        Raises:
            TimeoutError: None came in time.
        """
        process = self._process
        assert process is not None, "it is started before it is asked"
        assert process.stdin is not None, "it has pipes"
        assert process.stdout is not None, "it has pipes"
        until_s = time.monotonic() + most_s
        process.stdin.write(line)
        process.stdin.flush()
        output, received = process.stdout.fileno(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise TimeoutError
                part = os.read(output, 1 << 16)
                if not part:
                    raise _DiedError
                received += part
        return bytes(received)


def _start() -> subprocess.Popen[bytes]:
    source = str(Path(paceline.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.gateway.grammars.checker", str(MOST_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


_CHECKER = Checker()


def grammar_of_json_schema(
    schema: Mapping[str, Any], *, field: str = "schema", exact: bool = True, whitespace_pattern: str | None = None
) -> str:
    """Returns the grammar of a JSON schema's values, in the layout `LAYOUT` unless its `x-guidance` has another.

    Args:
        schema: As JSON.
        field: Name of the request field, for the error.
        exact: Whether keywords that no grammar can hold are refused; otherwise they are ignored, and `oneOf` means
            `anyOf`.
        whitespace_pattern: Regular expression of white space between the tokens of JSON; None: as in the layout.

    Raises:
        InvalidRequestError: It cannot be compiled, or not in time; names the place.
    """
    spaced = {"whitespace_flexible": True, "whitespace_pattern": whitespace_pattern}
    layout = LAYOUT if whitespace_pattern is None else spaced
    return _grammar("json_schema", schema, field, {**layout, **({} if exact else LOOSE)})


def loosened(schema: Mapping[str, Any], *, field: str) -> Json:
    """Returns a JSON schema without patterns that no grammar can hold and without references that lead nowhere.

    Args:
        schema: As JSON.
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: It is nested too deeply, or its references take too long to follow.
    """
    defined = definitions(schema, "schema", field=field)
    for name, each in defined.items():
        defined[name] = without(each, _is_beyond_grammars, defined)
    return whole(defined["schema"], defined)


def _is_beyond_grammars(pattern: str) -> bool:
    return _BEYOND_GRAMMARS.search(pattern.replace(r"\\", "")) is not None


def grammar_of_regex(pattern: str, *, field: str = "regex") -> str:
    """Returns the grammar of the texts that a regular expression matches as a whole.

    Raises:
        InvalidRequestError: It cannot be compiled, or not in time; names the place.
    """
    return _grammar("regex", pattern, field)


def grammar_of_choices(choices: Sequence[str], *, field: str = "choice") -> str:
    """Returns the grammar of an output that is one of several texts.

    Raises:
        InvalidRequestError: There are none or too many, or one is empty.
    """
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(field, f"must have from 1 to {MAX_CHOICES} entries, got {len(choices)}")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequestError(f"{field}[{index}]", "must not be empty")
    # Lark writes strings as JSON does.
    return _grammar("lark", "start: " + " | ".join(map(json.dumps, choices)), field)


def grammar_of_lark(text: str, *, field: str = "grammar") -> str:
    """Returns the grammar of a text in Lark, or in llama.cpp's GBNF, or in llguidance's own JSON.

    Raises:
        InvalidRequestError: It cannot be compiled, or not in time; names the place.
    """
    return _grammar("lark", text, field)


def _grammar(kind: str, value: Any, field: str, options: Mapping[str, Any] | None = None) -> str:
    grammar: str = _asked({"kind": kind, "value": value, "options": options}, field)["grammar"]
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(field, f"must have at most {MAX_GRAMMAR_CHARS} characters, compiled {len(grammar)}")
    return grammar


def _asked(question: Mapping[str, Any], field: str) -> dict[str, Any]:
    length = len(_text(question["value"], field))
    if length > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(field, f"must have at most {MAX_GRAMMAR_CHARS} characters, got {length}")
    answer = _CHECKER.ask(question)
    if "error" in answer:
        raise InvalidRequestError(field, answer["error"])
    return answer


def _text(value: Any, field: str) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (RecursionError, ValueError) as error:
        raise InvalidRequestError(field, f"cannot be read: {type(error).__name__}") from None
