"""A process that compiles the grammars of clients: `python -m paceline.gateway.grammars.checker SECONDS`.

It reads one JSON object per line, `{"kind", "value", "options"}`, and answers with `{"grammar"}`, `{"schemas"}` or
`{"error"}`, and with the processor time that it took in `"seconds"`. It dies if an answer takes more than SECONDS of
processor time, because nothing else bounds the time of every grammar.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from paceline.engine.grammar import LIMITS, NICENESS
from paceline.gateway.message.schemas import BY_NAME, HOLDERS

MOST_BYTES = 2 * 1024**3
# All models share only the vocabulary of bytes.
_BYTES = LLTokenizer("byte")


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the grammar of a question, or the schemas, or why there is none."""
    kind, value = question["kind"], question["value"]
    try:
        if kind == "json_schema":
            return _of_schema(value, question["options"])
        grammar = LLMatcher.grammar_from_regex(value) if kind == "regex" else _as_it_is(value) or any_to_lark(value)
    except Exception as error:  # noqa: BLE001 - a converter may raise anything
        return {"error": f"cannot be read: {error}"}
    problem = _problem(grammar)
    return {"error": problem} if problem else {"grammar": grammar}


def _as_it_is(text: str) -> str:
    return text if text.lstrip().startswith("{") else ""


def _of_schema(schema: Any, options: Any) -> dict[str, str]:
    grammar = LLMatcher.grammar_from_json_schema(schema, defaults=options)
    problem = _problem(grammar)
    if not problem:
        return {"grammar": grammar}
    place = _place(schema, problem, options)
    return {"error": f"{place}: {problem}" if place else problem}


def _problem(grammar: str) -> str:
    """Returns why a grammar cannot be compiled; empty: it can."""
    matcher = LLMatcher(_BYTES, grammar, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    return " ".join(matcher.get_error().split())


def _place(schema: Any, problem: str, options: Any) -> str:
    """Returns the path of the innermost schema that has the problem by itself; empty: only the whole has it."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path: list[str] = []
    parts = list(_parts(schema))
    while parts:
        step, part = parts.pop(0)
        if not isinstance(part, dict):
            continue
        if _problem(LLMatcher.grammar_from_json_schema({**definitions, **part}, defaults=options)) == problem:
            path.append(step)
            parts = list(_parts(part))
    return ".".join(path)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, dict):
            yield from ((f"{keyword}.{name}", part) for name, part in value.items())
        elif keyword in HOLDERS and isinstance(value, list):
            yield from ((f"{keyword}[{index}]", part) for index, part in enumerate(value))
        elif keyword in HOLDERS:
            yield keyword, value


def main() -> None:
    """Answers until its input ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    most_s = float(sys.argv[1])
    for line in sys.stdin.buffer:
        # Processor time, not wall-clock time: on a busy machine every grammar would be too slow.
        signal.setitimer(signal.ITIMER_PROF, most_s)
        begun_s = time.process_time()
        answered = json.dumps({**answer(json.loads(line)), "seconds": time.process_time() - begun_s}).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answered)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
