"""Grammars that bind a part of an answer: what follows its reasoning, or calls amid free text, once they have begun.

Free text ends with a marker, which is spelled in text or is one added token; it holds no other added tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.gateway.grammars import LAYOUT, LOOSE, grammar_of_lark
from paceline.gateway.message_form import DEEPSEEK_R1, HERMES, LLAMA3_JSON, MISTRAL, QWEN3, begins_thinking
from paceline.gateway.reasoning import think
from paceline.gateway.tool_calls import hermes, llama3_json, mistral
from paceline.gateway.tools import Toolbox

Json = dict[str, Any]
# Id of an added token by its spelling; None: there is none.
TokenOf = Callable[[str], int | None]
# Families whose calls can be bound.
BOUND = (HERMES, LLAMA3_JSON, MISTRAL)
_ANSWER = "answer"
_GAP = r"GAP: /[ \n]*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What stands before the part that is bound.

    Attributes:
        reasoning: Family of the model's reasoning; empty: it has none.
        prompt_end: The end of the prompt, special tokens spelled out.
        token_of: Finds added tokens.
    """

    reasoning: str
    prompt_end: str
    token_of: TokenOf

    @property
    def may_reason(self) -> bool:
        """Whether the answer is within reasoning, or may begin it."""
        return self.reasoning in (QWEN3, DEEPSEEK_R1) and not self.prompt_end.rstrip().endswith(think.END)

    def rules(self, part: str) -> list[str]:
        """Returns rules from `start` to what is bound."""
        if not self.may_reason:
            return [f"start: {part}", _GAP]
        within = begins_thinking(self.reasoning, self.prompt_end)
        begun = f"start: to_thought GAP {part}"
        maybe = [f"start: {part} | GAP thinking to_thought GAP {part}", self.marker("thinking", think.BEGIN)]
        return [*([begun] if within else maybe), _GAP, *self.text_up_to("thought", think.END)]

    def marker(self, name: str, text: str) -> str:
        """Returns the rule of a marker."""
        token_id = self.token_of(text)
        return f"{name}: {json.dumps(text)}" + ("" if token_id is None else f" | <[{token_id}]>")

    def text_up_to(self, name: str, marker: str) -> Iterator[str]:
        """Yields the rules of free text with its marker, `to_NAME`, and of text without, `WITHOUT_NAME`."""
        token_id = self.token_of(marker)
        pattern = re.escape(marker).replace("/", r"\/")
        without = f"WITHOUT_{name.upper()}"
        yield f"to_{name}: {name}_spelled" + ("" if token_id is None else f" | {without} <[{token_id}]>")
        yield rf"{name}_spelled[lazy]: /(.|\n)*{pattern}/"
        yield rf"{without}: /(.|\n)*/ & ~/(.|\n)*{pattern}(.|\n)*/"


def after_reasoning(grammar: str, opening: Opening, *, field: str) -> str:
    """Returns a grammar that binds what follows the reasoning of an answer.

    Args:
        grammar: As sessions carry it.
        opening: Of the answer.
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: The two together are too large.
    """
    if not opening.may_reason:
        return grammar
    given = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = given["grammars"]
    parts = [{**first, "name": _ANSWER}, *others]
    return _joined(lambda opening: opening.rules(f"@{_ANSWER}"), parts, opening, field)


def calls_amid_text(toolbox: Toolbox, family: str, opening: Opening) -> str:
    """Returns a grammar of free text in which calls, once begun, are as the schemas of strict tools want them.

    Args:
        toolbox: The tools; arguments of those that are not strict are any object.
        family: How the model writes calls, one of `BOUND`.
        opening: Of the answer.

    Raises:
        InvalidRequestError: A schema cannot be compiled.
    """
    layout = {"x-guidance": {**LAYOUT, **LOOSE}}
    arguments = [
        {"name": f"tool_{at}", "json_schema": {**layout, **(schema if strict else {"type": "object"})}}
        for at, (schema, strict) in enumerate(toolbox.parameters)
    ]
    said = _FAMILIES[family]
    return _joined(lambda opening: [*opening.rules("said"), *said(toolbox, opening)], arguments, opening, "tools")


def _joined(make: Callable[[Opening], Sequence[str]], others: Sequence[Json], opening: Opening, field: str) -> str:
    """Returns one grammar of rules and of those that they name; it is checked without tokens, which are the model's."""

    def whole(rules: Sequence[str]) -> str:
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules) + "\n"}, *others]})

    grammar_of_lark(whole(make(replace(opening, token_of=lambda _: None))), field=field)
    return whole(make(opening))


def _calls(toolbox: Toolbox, key: str) -> str:
    """Returns the rule of one call as a JSON object."""
    forms: list[str] = []
    for at, name in enumerate(toolbox.names):
        head = f'{{"name": {_literal(name)}, "{key}": '
        forms.append(f"{_literal(head)} @tool_{at} {_literal('}')}")
    return f"call: {' | '.join(forms)}"


def _literal(text: str) -> str:
    """Returns a string of Lark, which is one of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _hermes(toolbox: Toolbox, opening: Opening) -> Iterator[str]:
    yield _amid_text("call GAP call_end", toolbox)
    yield from opening.text_up_to("call", hermes.BEGIN)
    yield opening.marker("call_end", hermes.END)
    yield _calls(toolbox, "arguments")


def _mistral(toolbox: Toolbox, opening: Opening) -> Iterator[str]:
    yield _amid_text("calls", toolbox)
    yield from opening.text_up_to("call", mistral.BEGIN)
    further = f" ({_literal(', ')} call)*" if toolbox.parallel else ""
    listed = f"{_literal('[')} call{further} {_literal(']')}"
    yield " | ".join([f"calls: {listed}", *(f"{_literal(n)} args? @tool_{at}" for at, n in enumerate(toolbox.names))])
    yield opening.marker("args", mistral.ARGS)
    yield _calls(toolbox, "arguments")


def _amid_text(call: str, toolbox: Toolbox) -> str:
    several = "said: (to_call GAP {})* WITHOUT_CALL"
    one = "said: WITHOUT_CALL | to_call GAP {} GAP"
    return (several if toolbox.parallel else one).format(call)


def _llama3(toolbox: Toolbox, opening: Opening) -> Iterator[str]:
    further = f" (GAP {_literal(';')} GAP call)*" if toolbox.parallel else ""
    yield f"said: OTHER | GAP tag? GAP call{further} GAP"
    yield r'OTHER: /(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/'
    yield opening.marker("tag", llama3_json.BEGIN)
    yield _calls(toolbox, "parameters")


_FAMILIES: Mapping[str, Callable[[Toolbox, Opening], Iterator[str]]] = {
    HERMES: _hermes,
    LLAMA3_JSON: _llama3,
    MISTRAL: _mistral,
}
