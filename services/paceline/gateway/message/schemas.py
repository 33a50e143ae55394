"""JSON schemas of tools: their references made independent of where they stand, and the types that values may have.

Pure. References within the schema are followed, by pointer, anchor and `$id`; nothing is fetched. Each schema is copied
once, and following references takes a number of steps that its size bounds.
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
# Keywords that only name a schema's address.
_PLACES = ("$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$defs", "definitions")
# The schemas that are written as booleans.
_ANYTHING: Json = {}
_NOTHING: Json = {"not": {}}
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
# Length limit of a reference or a name; each reference is joined with the name of its schema.
MAX_REFERENCE_CHARS = 2048
# Schemas looked at for one tool. Without a bound, references of 4 MiB kept the threads that read requests for hours.
STEPS_PER_SCHEMA, MORE_STEPS = 64, 1000


class Definitions(dict[str, Json]):
    """Schemas by name, and how many steps may still be taken to follow the references between them.

    Args:
        field: Request field, for errors.
    """

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field
        self.num_schemas = 0
        self._num_steps = 0

    def step(self) -> None:
        """Counts a schema that is looked at.

        Raises:
            InvalidRequestError: There were too many.
        """
        self._num_steps += 1
        most = MORE_STEPS + STEPS_PER_SCHEMA * self.num_schemas
        if self._num_steps > most:
            problem = f"holds a schema of {self.num_schemas} whose references take more than {most} steps to follow"
            raise InvalidRequestError(self.field, problem)


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


def definitions(schema: Mapping[str, Any], name: str, *, field: str) -> Definitions:
    """Returns a schema under a name, and under further names what it refers to.

    All references in them are `#/$defs/NAME`, but for those that lead nowhere, which stay as they are.

    Args:
        schema: A whole schema.
        name: Name of the schema; the further names begin with it.
        field: Request field, for the error.

    Raises:
        InvalidRequestError: It is nested too deeply, or a reference is too long.
    """
    try:
        return _Referred(dict(schema), name, field).found
    except RecursionError:
        raise InvalidRequestError(field, "holds a schema that is nested too deeply") from None


class _Referred:
    """Names what is referred to; wherever that stands within another schema, there is a reference to it, too."""

    def __init__(self, root: Json, name: str, field: str) -> None:
        self.found = Definitions(field)
        # By the place and the anchor there, which is empty for the whole.
        self._places: dict[tuple[str, str], Any] = {("", ""): root}
        # Schemas with the place that they stand in, and what their references lead to.
        self._noted: list[tuple[Json, str]] = []
        self._known: set[int] = set()
        self._targets: dict[tuple[int, str], Json] = {}
        self._note(root, "")
        for schema, base in self._noted:
            for key in REFERENCES:
                target = self._target(schema.get(key), base)
                if target is None:
                    continue
                self._targets[id(schema), key] = target
                # Where no keyword of schemas leads; the loop comes to what is noted now.
                self._note(target, "")
        self.found.num_schemas = len(self._noted)
        referred = {id(each): each for each in (root, *self._targets.values())}
        self._names = {each: f"{name}_{at}" if at else name for at, each in enumerate(referred)}
        for each, schema in referred.items():
            self.found[self._names[each]] = self._rewritten(schema)

    def _note(self, schema: Any, base: str) -> None:
        """Notes where a schema and those within it can be found, once."""
        if not isinstance(schema, dict) or id(schema) in self._known:
            return
        self._known.add(id(schema))
        own = schema.get("$id")
        if isinstance(own, str):
            base = self._joined(base, own).removesuffix("#")
            self._places.setdefault((base, ""), schema)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(key), str):
                self._places.setdefault((base, anchor), schema)
        self._noted.append((schema, base))
        for each in parts(schema):
            self._note(each, base)

    def _rewritten(self, schema: Json) -> Json:
        out: Json = mapped({key: schema[key] for key in schema if key not in _PLACES}, self._within)
        for key in REFERENCES:
            if (target := self._targets.get((id(schema), key))) is not None:
                del out[key]
                out["$ref"] = f"#/$defs/{self._names[id(target)]}"
        return out

    def _within(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        name = self._names.get(id(schema))
        return self._rewritten(schema) if name is None else {"$ref": f"#/$defs/{name}"}

    def _target(self, reference: Any, base: str) -> Json | None:
        """Returns the schema that a reference leads to; None: there is none."""
        if not isinstance(reference, str):
            return None
        place, fragment = urldefrag(self._joined(base, reference))
        if not fragment.startswith("/"):
            found = self._places.get((place, fragment))
        else:
            found = self._places.get((place, ""))
            for step in unquote(fragment)[1:].split("/"):
                found = _member(found, step.replace("~1", "/").replace("~0", "~"))
        if isinstance(found, bool):
            return _ANYTHING if found else _NOTHING
        return found if isinstance(found, dict) else None

    def _joined(self, base: str, reference: str) -> str:
        """Returns a reference as seen from a base; schemes that `urljoin` does not know have fragments, too."""
        within = reference.startswith("#")
        joined = base.partition("#")[0] + reference if within else urljoin(base, reference[: MAX_REFERENCE_CHARS + 1])
        if max(len(joined), len(reference)) > MAX_REFERENCE_CHARS:
            problem = f"holds a reference of {len(joined)} characters, at most {MAX_REFERENCE_CHARS} are followed"
            raise InvalidRequestError(self.found.field, problem)
        return joined


def _member(value: Any, step: str) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    return value[int(step)] if isinstance(value, list) and step.isdecimal() and int(step) < len(value) else None


def without(schema: Any, unfit: Callable[[str], bool], defined: Definitions) -> Any:
    """Returns a schema of `definitions` without references that lead nowhere and without some of its patterns.

    Args:
        unfit: Whether a regular expression is to be left out.
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


def whole(schema: Json, defined: Definitions) -> Json:
    """Returns a schema of `definitions`, or one within, with all that it refers to."""
    found: dict[str, Json] = {}
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        defined.step()
        name = _referred(each)
        if name in defined and name not in found:
            found[name] = defined[name]
            left.append(defined[name])
        left += parts(each)
    return {**schema, "$defs": found} if found else schema


def followed(schema: Any, defined: Definitions) -> Any:
    """Returns what a schema of `definitions` that is only a reference leads to."""
    for _ in defined:
        name = _referred(schema)
        if name not in defined or not schema.keys() <= {"$ref", "description", "title"}:
            break
        defined.step()
        schema = defined[name]
    return schema


def _referred(schema: Any) -> str:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return reference.removeprefix("#/$defs/") if isinstance(reference, str) else ""


def types_of(schema: Any, defined: Definitions) -> frozenset[str]:
    """Returns the types of JSON that a value may have; an `integer` is no `number`, which is one with a fraction.

    Args:
        schema: A schema of `definitions`, or within one.
    """
    return _allowed(schema, defined, {}) or TYPES


def _allowed(schema: Any, defined: Definitions, known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Returns the types that a schema allows; of a definition that refers to itself nothing by that.

    Args:
        known: Types of the definitions that were looked at, by name.
    """
    defined.step()
    if not isinstance(schema, dict):
        return TYPES
    limits = [_listed(schema.get("type")), _of_values(schema)]
    if (name := _referred(schema)) in defined:
        if name not in known:
            known[name] = frozenset()
            known[name] = _allowed(defined[name], defined, known)
        limits.append(known[name])
    limits += [_allowed(each, defined, known) for each in _schemas(schema.get("allOf"))]
    limits += [
        frozenset[str]().union(*(_allowed(each, defined, known) for each in several))
        for several in (_schemas(schema.get(key)) for key in ("anyOf", "oneOf"))
        if several
    ]
    allowed = frozenset.intersection(*limits)
    return allowed | {"null"} if schema.get("nullable") is True else allowed


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
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return next((name for kind, name in _KINDS if isinstance(value, kind)), "null")


_KINDS = ((str, "string"), (int, "integer"), (list, "array"), (dict, "object"))


def _schemas(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
