"""Calls written as a list in Python: `[get_weather(city="Paris"), now()]`, and nothing else."""

from __future__ import annotations

import ast
import json
import re

from paceline.gateway.message.reader import (
    MAX_HEAD_CHARS,
    MAX_HELD_CHARS,
    CallArguments,
    CallBegin,
    Part,
    StatefulReader,
)
from paceline.gateway.message.tool_calls.json_call import BracketScanner

BEGIN, END = "<|python_start|>", "<|python_end|>"
_MAY_BEGIN = re.compile(r"\[\s*(?:\Z|[A-Za-z_][\w.]*\s*(?:\(|\Z))")
_BEGINS = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicCalls(StatefulReader):
    """Reads them once the list has ended."""

    def __init__(self) -> None:
        super().__init__(self._begin)
        self._before = ""
        self._extent = BracketScanner(quotes="\"'")
        self._num_scanned = 0

    def _begin(self) -> bool:
        bare = len(self.held) - len(self.held.lstrip())
        self._before += self.take(bare)
        if len(self._before) > MAX_HEAD_CHARS:
            return self._no_list()
        begins = self.begins(BEGIN)
        if begins:
            self._before += self.take(len(BEGIN))
            return True
        if begins is None:
            return False
        self.state = self._list
        return True

    def _list(self) -> bool:
        if not self._may_be_a_list():
            return self._no_list()
        length = self._extent.scan(self.held[self._num_scanned : MAX_HELD_CHARS])
        if length is None and len(self.held) <= MAX_HELD_CHARS and not self.final:
            self._num_scanned = len(self.held)
            return False
        calls = None if length is None else _calls(self.held[: self._num_scanned + length])
        if calls is None or length is None:
            return self._no_list()
        self.take(self._num_scanned + length)
        self.parts += calls
        self.state = self._end
        return True

    def _may_be_a_list(self) -> bool:
        if len(self.held) < MAX_HEAD_CHARS:
            return _MAY_BEGIN.match(self.held) is not None
        return _BEGINS.match(self.held, 0, MAX_HEAD_CHARS) is not None

    def _no_list(self) -> bool:
        self.held = self._before + self.held
        self.state = self.rest_is_content
        return True

    def _end(self) -> bool:
        return self.pass_marker(END, self._after)

    def _after(self) -> bool:
        self.skip_blank()
        if self.held:
            self.state = self.rest_is_content
        return bool(self.held)


def _calls(text: str) -> list[Part] | None:
    try:
        found = ast.parse(text.strip(), mode="eval").body
        if not isinstance(found, ast.List) or not found.elts:
            return None
        return [part for each in found.elts for part in _call(each)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonConstants(ast.NodeTransformer):
    """Reads JSON's own constants as Python's; raises ValueError for keys that are no strings."""

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("a key is no string")
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _call(node: ast.expr) -> list[Part]:
    """Returns the parts of a call; raises ValueError or TypeError if it is none, or has values that are not of JSON."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call")
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            raise ValueError("no name")
        arguments[each.arg] = ast.literal_eval(_JsonConstants().visit(each.value))
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return [CallBegin(ast.unparse(node.func)), CallArguments(written)]
