"""Grammars of answers whose calls, once begun, follow the schemas of strict tools; other text is free, or has a format.

Each family of models writes calls in its own way (`paceline.gateway.message.tool_calls`). gpt-oss is missing, because
no engine that follows grammars serves it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.params import MAX_GRAMMAR_CHARS
from paceline.gateway.grammars.formats import LAYOUT, LOOSE, grammar_of_json_schema, loosened, text_of
from paceline.gateway.grammars.partial import Opening, joined, named, pattern, up_to
from paceline.gateway.message.form import HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC, QWEN3_CODER, call_in_reasoning
from paceline.gateway.message.schemas import TYPES, Definitions, Json, enumerated, followed, type_of, types_of, whole
from paceline.gateway.message.tool_calls import json_formats, pythonic, tagged
from paceline.gateway.message.tools import Toolbox

_GUIDANCE = {"x-guidance": {**LAYOUT, **LOOSE}}
# Name of the grammar of text that has a format.
_FORMAT = "format"
# Behind a bare value; the rule of a bare string holds most of it.
_VALUE_END = f"\n{tagged.PARAMETER_END}\n"
_ANY_TEXT = r'any_text "\n"'
# How a list of calls may begin.
_LIST = rf"[ \n]*({pattern(pythonic.BEGIN)})?[ \n]*\["


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How models of a family write calls.

    Attributes:
        schemas: Yields names and JSON schemas that the rules refer to.
        rules: Yields the rules of an answer; the last argument says whether text other than calls has a format.
        can_write: Whether the family can write the name of a tool or of an argument.
    """

    schemas: Callable[[Toolbox], Iterator[tuple[str, Json]]]
    rules: Callable[[Toolbox, Opening, bool], Iterator[str]]
    can_write: Callable[[str], bool] = lambda _: True


def calls_amid_text(toolbox: Toolbox, family: str, opening: Opening, content: str = "") -> str:
    """Returns the grammar of an answer: free text with calls in it, or either text of a format or calls.

    Args:
        toolbox: The tools; arguments of those that are not strict may have any form.
        family: How the model writes calls, one of `FAMILIES`.
        opening: The beginning of the answer.
        content: Grammar of the format; empty: text is free.

    Raises:
        InvalidRequestError: A schema is too large, or has a form that the family's calls cannot follow.
    """
    writes = FAMILIES[family]
    _check_names(toolbox, writes)
    rules = [
        *opening.rules("answer", call_in_reasoning(opening.reasoning, family)),
        *writes.rules(toolbox, opening, bool(content)),
    ]
    return joined(rules, [*(named(content, _FORMAT) if content else []), *_referred(writes.schemas(toolbox))], "tools")


def enforced_calls(toolbox: Toolbox) -> str:
    """Returns the grammar of calls that have to be made, in the one form for all families: of a named tool, arguments.

    Rules that no grammar can hold are ignored where a tool is not strict.

    Raises:
        InvalidRequestError: A schema is too large.
    """
    given = [schema if strict else loosened(schema, field="tools") for schema, strict in toolbox.parameters]
    if toolbox.named:
        return grammar_of_json_schema(given[toolbox.names.index(toolbox.named)], field="tools", exact=False)
    rules = [f"start: {_list(toolbox)}", _calls(toolbox, "parameters")]
    return joined(rules, _referred((f"tool_{at}", schema) for at, schema in enumerate(given)), "tools")


def _referred(schemas: Iterable[tuple[str, Json]]) -> list[Json]:
    """Returns the grammars of schemas that rules refer to by their names."""
    grammars, room = list[Json](), MAX_GRAMMAR_CHARS
    for name, schema in schemas:
        # Counted one by one: each argument has all that it refers to.
        room -= len(text_of(schema, field="tools"))
        if room < 0:
            raise InvalidRequestError("tools", f"must make a grammar of at most {MAX_GRAMMAR_CHARS} characters")
        grammars.append({"name": name, "json_schema": {**_GUIDANCE, **schema}})
    return grammars


def _check_names(toolbox: Toolbox, writes: CallFormat) -> None:
    """Refuses strict tools whose calls the reader of the family could not read."""
    for (schema, strict), name in zip(toolbox.parameters, toolbox.names, strict=True):
        properties = schema.get("properties")
        for each in (name, *(properties if isinstance(properties, dict) else ())) if strict else ():
            if not writes.can_write(each):
                raise InvalidRequestError("tools", f"this model cannot write a call with the name {each[:80]!r}")


def _of_arguments(toolbox: Toolbox) -> Iterator[tuple[str, Json]]:
    """Yields one schema per tool, for families that write arguments as JSON."""
    for at, (schema, strict) in enumerate(toolbox.parameters):
        yield f"tool_{at}", schema if strict else {"type": "object"}


def _of_each_argument(toolbox: Toolbox, *, bare: bool = False) -> Iterator[tuple[str, Json]]:
    """Yields one schema per argument, for families that write each argument by itself.

    Args:
        bare: Whether the family writes strings bare: its schemas leave them out, if there is more.
    """
    yield "any", {}
    for at, strict in enumerate(toolbox.strict):
        for number, argument in enumerate(_arguments(toolbox, at) if strict else ()):
            schema, types = argument.schema, argument.types if bare else TYPES
            others = sorted(types - {"string"})
            if others and types != TYPES and "string" in types:
                schema = {"allOf": [schema, {"type": others}]}
            yield f"tool_{at}_{number}", whole(schema, argument.defined)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """An argument of a tool.

    Attributes:
        defined: Definitions that the schema refers to; see `definitions`.
        required: Whether every call has it.
    """

    name: str
    schema: Json
    defined: Definitions
    required: bool

    @property
    def types(self) -> frozenset[str]:
        return types_of(self.schema, self.defined)


def _arguments(toolbox: Toolbox, at: int) -> Iterator[_Argument]:
    """Yields the arguments of a tool.

    Raises:
        InvalidRequestError: The schema lists no arguments.
    """
    defined = toolbox.defined(at)
    schema = followed(defined[f"tool_{at}"], defined)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    known = schema.get("type", "object") == "object" and isinstance(properties, dict) and isinstance(required, list)
    if not known or not schema.keys().isdisjoint(("$ref", "allOf", "anyOf", "oneOf")):
        name = toolbox.names[at][:80]
        raise InvalidRequestError(
            "tools", f"the parameters of {name!r}, which is strict, must be an object with properties"
        )
    for name, argument in properties.items():
        given = argument if isinstance(argument, dict) else {}
        yield _Argument(name=name, schema=given, defined=defined, required=name in required)


def _calls(toolbox: Toolbox, key: str, *, cut: bool = False) -> str:
    """Returns the rule of one call as a JSON object.

    Args:
        key: Key of the arguments.
        cut: Whether the call is cut as JSON is, because text that may be JSON begins alike: of several terminals that
            fit, the longest wins, even if the text does not go on as it does.
    """
    forms: list[str] = []
    for at, name in enumerate(toolbox.names):
        head = ["{", '"name"', ": ", _literal(name), ", ", f'"{key}"', ": "]
        written = " ".join(map(_literal, head if cut else ["".join(head)]))
        forms.append(f"{written} @tool_{at} {_literal('}')}")
    return f"call: {' | '.join(forms)}"


def _list(toolbox: Toolbox) -> str:
    """Returns the rule of a JSON list of calls."""
    return f"{_literal('[')} call{_further(toolbox)} {_literal(']')}"


def _further(toolbox: Toolbox) -> str:
    return f" ({_literal(', ')} call)*" if toolbox.parallel else ""


def _literal(text: str) -> str:
    """Returns a string of Lark, which is written as in JSON."""
    return json.dumps(text, ensure_ascii=False)


def _hermes(toolbox: Toolbox, opening: Opening, bound: bool) -> Iterator[str]:
    yield from _marked("GAP call GAP call_end", toolbox, bound)
    yield from _to_call("call", opening, bound, json_formats.HERMES_BEGIN)
    yield opening.marker("call_end", json_formats.HERMES_END)
    yield _calls(toolbox, "arguments")


def _mistral(toolbox: Toolbox, opening: Opening, bound: bool) -> Iterator[str]:
    yield from _marked("GAP calls", toolbox, bound)
    yield from _to_call("call", opening, bound, json_formats.MISTRAL_BEGIN)
    yield " | ".join(
        [f"calls: {_list(toolbox)}", *(f"{_literal(n)} args? @tool_{at}" for at, n in enumerate(toolbox.names))]
    )
    yield opening.marker("args", json_formats.ARGS)
    yield _calls(toolbox, "arguments")


def _marked(call: str, toolbox: Toolbox, bound: bool, other: str = "") -> Iterator[str]:
    """Yields the rules of an answer whose calls have a marker, and of what follows a call that has begun.

    Args:
        call: Grammar of the text after the marker.
        bound: Whether text has a format.
        other: Another form of a call, its marker included.
    """
    whole_call = f"(to_call {call}{f' | {other}' if other else ''})"
    if bound:
        yield f"answer: @{_FORMAT} | {whole_call} further"
    elif toolbox.parallel:
        yield f"answer: {whole_call}* WITHOUT_CALL"
    else:
        yield f"answer: WITHOUT_CALL | {whole_call} further"
    yield f"begun: {call} {'answer' if toolbox.parallel and not bound else 'further'}"
    yield f"further: (GAP {whole_call})* GAP" if toolbox.parallel and bound else "further: GAP"


def _to_call(name: str, opening: Opening, bound: bool, marker: str, *others: str) -> Iterator[str]:
    """Yields the rules up to a call: its marker, behind free text if text has no format."""
    if bound:
        yield opening.marker(f"to_{name}", marker)
    else:
        yield from opening.text_up_to(name, marker, *others)


def _llama3(toolbox: Toolbox, opening: Opening, bound: bool) -> Iterator[str]:
    further = f" (GAP {_literal(';')} GAP call)*" if toolbox.parallel else ""
    yield f"answer: {f'@{_FORMAT} |' if bound else 'OTHER | GAP'} (tag GAP)? call{further} GAP"
    if not bound:
        yield r'OTHER: /(.|\n)*/ & ~/\s*\{\s*"name"(.|\n)*/'
    yield opening.marker("tag", json_formats.LLAMA3_BEGIN)
    yield _calls(toolbox, "parameters", cut=bound)


def _qwen3_coder(toolbox: Toolbox, opening: Opening, bound: bool) -> Iterator[str]:
    """The outer tag may be missing."""
    yield from _marked(f"GAP {_literal(tagged.FUNCTION)} call GAP call_end", toolbox, bound, "to_function call")
    yield from _to_call("call", opening, bound, tagged.OUTER, tagged.FUNCTION)
    if bound:
        yield f"to_function: {_literal(tagged.FUNCTION)}"
    else:
        yield "to_function: function_spelled"
        yield up_to("function_spelled", tagged.FUNCTION)
    yield opening.marker("call_end", tagged.OUTER_END)
    yield "call: " + " | ".join(f"call_{at}" for at in range(len(toolbox.names)))
    yield up_to("any_arguments", tagged.FUNCTION_END)
    # As for its reader, a value ends with the first such tag.
    yield up_to("any_text", tagged.PARAMETER_END)
    for at, strict in enumerate(toolbox.strict):
        yield from _coder_call(toolbox, at) if strict else [f"call_{at}: {_coder_head(toolbox, at)} any_arguments"]


def _coder_head(toolbox: Toolbox, at: int) -> str:
    return _literal(f"{toolbox.names[at]}>\n")


def _coder_call(toolbox: Toolbox, at: int) -> Iterator[str]:
    """Yields the rules of a call of a strict tool, behind its first tag's beginning."""
    arguments = list(_arguments(toolbox, at))
    members = [f"argument_{at}_{n}{'' if each.required else '?'}" for n, each in enumerate(arguments)]
    yield f"call_{at}: {' '.join([_coder_head(toolbox, at), *members, _literal(tagged.FUNCTION_END)])}"
    for number, each in enumerate(arguments):
        value = _bare_value(each, f"@tool_{at}_{number}")
        yield f"argument_{at}_{number}: {_literal(f'{tagged.PARAMETER}{each.name}>' + chr(10))} {value}"


def _fits_into_a_tag(name: str) -> bool:
    return name == name.strip() and 0 < len(name) <= tagged.MAX_NAME_CHARS and not set(name) & set("<>\n")


def _bare_value(argument: _Argument, reference: str) -> str:
    """Returns the form of a value and the end of its tag: strings are bare, other values are JSON."""
    as_json = f"{reference} {_literal(_VALUE_END)}"
    forms = dict.fromkeys(_bare_values(argument.schema, argument.defined, TYPES, as_json, set())) or [as_json]
    return _ANY_TEXT if _ANY_TEXT in forms else f"({' | '.join(forms)})"


def _bare_values(
    schema: Any, defined: Definitions, types: frozenset[str], as_json: str, seen: set[int]
) -> Iterator[str]:
    """Yields the forms of a value that is one of these types as well as one of the schema's.

    Args:
        schema: A schema of `definitions`, or one within.
        types: Types that a value may have.
        as_json: The form of a value that is no bare string.
        seen: Schemas that were looked at: one may refer to itself.
    """
    schema = followed(schema, defined)
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    types &= types_of(schema, defined)
    values = enumerated(schema)
    several = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    if values is not None:
        allowed = [each for each in values if type_of(each) in types]
        yield from (_literal((each if isinstance(each, str) else json.dumps(each)) + _VALUE_END) for each in allowed)
    elif several:
        for each in several:
            yield from _bare_values(each, defined, types, as_json, seen)
    else:
        yield _ANY_TEXT if "string" in types and types != TYPES else as_json


def _pythonic(toolbox: Toolbox, opening: Opening, bound: bool) -> Iterator[str]:
    further = _further(toolbox)
    if bound:
        yield f'answer: @{_FORMAT} | (list_begin GAP)? "[" call{further} "]" GAP list_end? GAP'
        yield opening.marker("list_begin", pythonic.BEGIN)
    else:
        yield f'answer: OTHER | first_call{further} "]" GAP list_end? GAP'
        yield from _first_pythonic_call(toolbox, opening)
    yield opening.marker("list_end", pythonic.END)
    yield "call: " + " | ".join(f"{_literal(f'{name}(')} rest_{at}" for at, name in enumerate(toolbox.names))
    yield 'any_argument: /[A-Za-z_]\\w*/ "=" @any'
    yield 'any_arguments: (any_argument (", " any_argument)*)?'
    for at, strict in enumerate(toolbox.strict):
        yield f'rest_{at}: {f"first_{at}_0" if strict else "any_arguments"} ")"'
        if strict:
            yield from _keywords(list(_arguments(toolbox, at)), at)


def _first_pythonic_call(toolbox: Toolbox, opening: Opening) -> Iterator[str]:
    """Yields the rules of free text, and of a list of calls up to the arguments of its first one."""
    yield rf"OTHER: /(.|\n)*/ & ~/{_LIST}[A-Za-z_][\w.]*\s*\((.|\n)*/"
    yield "first_call: " + " | ".join(f"head_{at} rest_{at}" for at in range(len(toolbox.names)))
    token_id = opening.token_of(pythonic.BEGIN)
    for at, name in enumerate(toolbox.names):
        # A single pattern, up to where it is no other text: the longest match wins.
        begun = "" if token_id is None else f" | GAP <[{token_id}]> GAP {_literal(f'[{name}(')}"
        yield rf"head_{at}: /{_LIST}{pattern(f'{name}(')}/{begun}"


def _is_python_name(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not iskeyword(name)


def _keywords(arguments: list[_Argument], at: int) -> Iterator[str]:
    """Yields the rules of the arguments in order, each as the first one written and as a further one."""
    for number, each in enumerate(arguments):
        for place, comma in (("first", ""), ("further", ", ")):
            written = f"{_literal(f'{comma}{each.name}=')} @tool_{at}_{number} further_{at}_{number + 1}"
            yield f"{place}_{at}_{number}: {written}" + ("" if each.required else f" | {place}_{at}_{number + 1}")
    yield f'first_{at}_{len(arguments)}: ""'
    yield f'further_{at}_{len(arguments)}: ""'


FAMILIES: Mapping[str, CallFormat] = {
    HERMES: CallFormat(schemas=_of_arguments, rules=_hermes),
    LLAMA3_JSON: CallFormat(schemas=_of_arguments, rules=_llama3),
    MISTRAL: CallFormat(schemas=_of_arguments, rules=_mistral),
    QWEN3_CODER: CallFormat(
        schemas=partial(_of_each_argument, bare=True), rules=_qwen3_coder, can_write=_fits_into_a_tag
    ),
    PYTHONIC: CallFormat(schemas=_of_each_argument, rules=_pythonic, can_write=_is_python_name),
}
