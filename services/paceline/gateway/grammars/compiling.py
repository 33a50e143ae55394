"""Makes a grammar, as sessions carry it, of what a client may say instead: a JSON schema, a pattern, choices.

Each is compiled once to see whether it can be, in a process of its own that is ended when that takes too long; a
verifier compiles it again for its own vocabulary. To be called off the event loop.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
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
from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.params import MAX_GRAMMAR_CHARS

MAX_CHOICES = 1024
# Of the processor's time for a compilation; of a clock's for it, however busy the machine is, and for the start of the
# process that does it.
MOST_S, PATIENCE_S, START_S = 0.8, 5.0, 20.0
# Answers that are kept: the same schema comes with every request of a client.
MOST_KEPT = 64
# As Python's `json.dumps` writes it: where the layout is fixed, most of an answer's scaffolding is forced.
LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LOOSE: Mapping[str, Any] = {"lenient": True, "coerce_one_of": True}


class _DiedError(Exception):
    """The process died of the question."""


class Checker:
    """The process that compiles; started by the first question, and again after one that ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        atexit.register(self.close)

    def ask(self, question: Mapping[str, Any]) -> dict[str, str]:
        """Returns the answer; see `paceline.gateway.grammars.checker`.

        Raises:
            UnavailableError: There is none yet, as the machine is too busy.
        """
        line = json.dumps(question).encode() + b"\n"
        key = hashlib.sha256(line).digest()
        with self._lock:
            known = self._kept.get(key) or self._answer(line)
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

    def _answer(self, line: bytes) -> dict[str, str]:
        try:
            if self._process is None:
                self._process = _start()
                self._exchange(b'{"kind": "regex", "value": "a"}\n', START_S)
            answer: dict[str, str] = json.loads(self._exchange(line, PATIENCE_S))
        except TimeoutError:
            self.close()
            raise UnavailableError("the machine is too busy to compile a grammar; try again") from None
        except (_DiedError, OSError):
            self.close()
            return {"error": f"takes more than {MOST_S:g} s, or too much memory, to be compiled"}
        return answer

    def _exchange(self, line: bytes, most_s: float) -> bytes:
        """Returns the answer to a line.

        Raises:
            TimeoutError: None came in time.
        """
        assert self._process is not None, "it is started before it is asked"
        assert self._process.stdin is not None, "it has pipes"
        assert self._process.stdout is not None, "it has pipes"
        until_s = time.monotonic() + most_s
        self._process.stdin.write(line)
        self._process.stdin.flush()
        output, received = self._process.stdout.fileno(), bytearray()
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
    """Returns the grammar of a JSON schema's values, written as `LAYOUT` says unless its `x-guidance` says otherwise.

    Args:
        schema: As JSON.
        field: Name of the request field, for the error.
        exact: Keywords that no grammar can hold are refused; otherwise they are ignored, and `oneOf` is `anyOf`.
        whitespace_pattern: What may stand between the tokens of JSON, as a regular expression; None: as in the layout.

    Raises:
        InvalidRequestError: It cannot be compiled, or not in time; says where.
    """
    spaced = {"whitespace_flexible": True, "whitespace_pattern": whitespace_pattern}
    layout = LAYOUT if whitespace_pattern is None else spaced
    return _grammar("json_schema", schema, field, {**layout, **({} if exact else LOOSE)})


def grammar_of_regex(pattern: str, *, field: str = "regex") -> str:
    """Returns the grammar of the texts that a regular expression matches as a whole.

    Raises:
        InvalidRequestError: It cannot be compiled, or not in time; says where.
    """
    return _grammar("regex", pattern, field)


def grammar_of_choices(choices: Sequence[str], *, field: str = "choice") -> str:
    """Returns the grammar of some texts, one of which the output is.

    Raises:
        InvalidRequestError: There is none, one is empty, or there are too many.
    """
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(field, f"must have from 1 to {MAX_CHOICES} entries, got {len(choices)}")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequestError(f"{field}[{index}]", "must not be empty")
    # A string of Lark is one of JSON.
    return _grammar("lark", "start: " + " | ".join(map(json.dumps, choices)), field)


def grammar_of_lark(text: str, *, field: str = "grammar") -> str:
    """Returns the grammar of a text in Lark, or in llama.cpp's GBNF, or in llguidance's own JSON.

    Raises:
        InvalidRequestError: It cannot be compiled, or not in time; says where.
    """
    return _grammar("lark", text, field)


def _grammar(kind: str, value: Any, field: str, options: Mapping[str, Any] | None = None) -> str:
    try:
        length = len(value if isinstance(value, str) else json.dumps(value))
        if length > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(field, f"must have at most {MAX_GRAMMAR_CHARS} characters, got {length}")
        answer = _CHECKER.ask({"kind": kind, "value": value, "options": options})
    except (RecursionError, ValueError) as error:
        raise InvalidRequestError(field, f"cannot be read: {type(error).__name__}") from None
    grammar = answer.get("grammar")
    if grammar is None:
        raise InvalidRequestError(field, answer["error"])
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(field, f"must have at most {MAX_GRAMMAR_CHARS} characters, compiled {len(grammar)}")
    return grammar
