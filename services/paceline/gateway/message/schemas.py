"""JSON schemas of tools: their references made independent of where they stand, and the types that values may have.

Pure. References within the schema are followed, by pointer, anchor and `$id`; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from paceline.core.errors import InvalidRequestError

Json = dict[str, Any]

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that hold schemas by name, and those that hold one or a list of them.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
HOLDERS = (
    *("anyOf", "allOf", "oneOf", "prefixItems", "items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
)
# What only says where a schema can be found.
_PLACES = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$defs", "definitions")
# The schemas that are written as booleans.
_ANYTHING: Json = {}
_NOTHING: Json = {"not": {}}
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def mapped(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a schema with the schemas directly within it changed."""
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            out[key] = {name: change(each) for name, each in value.items()}
        elif key in HOLDERS and isinstance(value, list):
            out[key] = [change(each) for each in value]
        elif key in HOLDERS:
            out[key] = change(value)
    return out


def parts(schema: Any) -> list[Any]:
    """Returns the schemas directly within a schema."""
    found: list[Any] = []
    mapped(schema, found.append)
    return found


def definitions(schema: Mapping[str, Any], name: str, *, field: str) -> dict[str, Json]:
    """Returns a schema under a name, and under further names what it refers to.

    All references in them are `#/$defs/NAME`, but for those that lead nowhere, which stay as they are.

    Args:
        schema: A whole schema.
        name: Of the schema; the further names begin with it.
        field: Of the request, for the error.

    Raises:
        InvalidRequestError: It is nested too deeply.
    """
    try:
        return _Definitions(dict(schema), name).found
    except RecursionError:
        raise InvalidRequestError(field, "holds a schema that is nested too deeply") from None


class _Definitions:
    """Names what is referred to, each target once, so that recursive schemas end."""

    def __init__(self, root: Json, name: str) -> None:
        self.found: dict[str, Json] = {}
        self._name = name
        self._bases: dict[int, str] = {}
        self._places: dict[str, Any] = {"": root}
        self._names: dict[int, str] = {}
        self._note(root, "")
        self._defined(root)

    def _note(self, schema: Any, base: str) -> None:
        """Notes where a schema and those within it can be found."""
        if not isinstance(schema, dict):
            return
        own = schema.get("$id")
        if isinstance(own, str):
            base = _joined(base, own).removesuffix("#")
            self._places.setdefault(base, schema)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(key), str):
                self._places.setdefault(f"{base}#{anchor}", schema)
        self._bases[id(schema)] = base
        for each in parts(schema):
            self._note(each, base)

    def _defined(self, schema: Json) -> str:
        """Returns the name of a target; defines it the first time."""
        if id(schema) not in self._names:
            name = f"{self._name}_{len(self._names)}" if self._names else self._name
            self._names[id(schema)] = name
            self.found[name] = {}
            self.found[name] = self._rewritten({key: schema[key] for key in schema if key not in _PLACES}, schema)
        return self._names[id(schema)]

    def _rewritten(self, schema: Json, original: Json) -> Json:
        out: Json = mapped(schema, lambda each: self._within(each))
        for key in REFERENCES:
            reference = out.get(key)
            if isinstance(reference, str):
                target = self._target(reference, self._bases.get(id(original), ""))
                if target is not None:
                    del out[key]
                    out["$ref"] = f"#/$defs/{self._defined(target)}"
        return out

    def _within(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        return self._rewritten({key: schema[key] for key in schema if key not in _PLACES}, schema)

    def _target(self, reference: str, base: str) -> Json | None:
        """Returns the schema that a reference leads to; None: there is none."""
        place, fragment = urldefrag(_joined(base, reference))
        found = self._places.get(place)
        if fragment.startswith("/"):
            for step in unquote(fragment)[1:].split("/"):
                found = _member(found, step.replace("~1", "/").replace("~0", "~"))
        elif fragment:
            found = self._places.get(f"{place}#{fragment}")
        if isinstance(found, bool):
            return _ANYTHING if found else _NOTHING
        return found if isinstance(found, dict) else None


def _joined(base: str, reference: str) -> str:
    """Returns a reference as seen from a base; schemes that `urljoin` does not know have fragments, too."""
    return base.partition("#")[0] + reference if reference.startswith("#") else urljoin(base, reference)


def _member(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    return value[int(step)] if isinstance(value, list) and step.isdecimal() and int(step) < len(value) else None


def without(schema: Any, unfit: Callable[[str], bool], defined: Mapping[str, Json]) -> Any:
    """Returns a schema of `definitions` without references that lead nowhere and without some of its patterns.

    Args:
        schema: The schema.
        unfit: Whether a regular expression is to be left out.
        defined: All definitions.
    """
    if not isinstance(schema, dict):
        return schema
    out: Json = mapped(schema, lambda each: without(each, unfit, defined))
    named = out.get("patternProperties")
    if isinstance(named, dict) and any(map(unfit, named)):
        out["patternProperties"] = {name: each for name, each in named.items() if not unfit(name)}
        # It would forbid what the patterns allowed.
        out.pop("additionalProperties", None)
    if isinstance(out.get("pattern"), str) and unfit(out["pattern"]):
        del out["pattern"]
    leads_nowhere = any(key in out for key in REFERENCES) and _referred(out) not in defined
    return {key: each for key, each in out.items() if key not in REFERENCES} if leads_nowhere else out


def whole(schema: Json, defined: Mapping[str, Json]) -> Json:
    """Returns a schema of `definitions`, or one within, with all that it refers to."""
    found: dict[str, Json] = {}
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        name = _referred(each)
        if name in defined and name not in found:
            found[name] = defined[name]
            left.append(defined[name])
        left += parts(each)
    return {**schema, "$defs": found} if found else schema


def followed(schema: Any, defined: Mapping[str, Json]) -> Any:
    """Returns what a schema of `definitions` that is only a reference leads to."""
    for _ in defined:
        name = _referred(schema)
        if name not in defined or not schema.keys() <= {"$ref", "description", "title"}:
            break
        schema = defined[name]
    return schema


def _referred(schema: Any) -> str:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


def types_of(schema: Any, defined: Mapping[str, Json]) -> frozenset[str]:
    """Returns the types of JSON that a value may have; an `integer` is no `number`, which is one with a fraction.

    Args:
        schema: One of `definitions`, or within one.
        defined: All of them.
    """
    return _Types(defined).of(schema) or TYPES


class _Types:
    """Looks at each definition once; one that refers to itself allows nothing by that."""

    def __init__(self, defined: Mapping[str, Json]) -> None:
        self._defined = defined
        self._known: dict[str, frozenset[str]] = {}

    def of(self, schema: Any) -> frozenset[str]:
        if not isinstance(schema, dict):
            return TYPES
        limits = [_listed(schema.get("type")), _of_values(schema), self._referred(_referred(schema))]
        limits += [self.of(each) for each in _schemas(schema.get("allOf"))]
        limits += [
            frozenset[str]().union(*map(self.of, several))
            for several in (_schemas(schema.get(key)) for key in ("anyOf", "oneOf"))
            if several
        ]
        allowed = frozenset.intersection(*limits)
        return allowed | {"null"} if schema.get("nullable") is True else allowed

    def _referred(self, name: str) -> frozenset[str]:
        if name not in self._defined:
            return TYPES
        if name not in self._known:
            self._known[name] = frozenset()
            self._known[name] = self.of(self._defined[name])
        return self._known[name]


def _listed(given: Any) -> frozenset[str]:
    """Returns the types that the keyword `type` names; all, if it names none that JSON has."""
    listed = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)} & TYPES
    return frozenset(listed | {"integer"} if "number" in listed else listed) or TYPES


def _of_values(schema: Json) -> frozenset[str]:
    values = enumerated(schema)
    return TYPES if values is None else frozenset(map(type_of, values))


def enumerated(schema: Json) -> list[Any] | None:
    """Returns the values that a schema lists; None: it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def type_of(value: Any) -> str:
    """Returns the type of a value of JSON."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")


_KINDS = ((str, "string"), (int, "integer"), (list, "array"), (dict, "object"))


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
