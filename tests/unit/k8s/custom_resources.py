"""Schemas of the custom resources that the chart makes, taken from the projects' own definitions.

python -m tests.unit.k8s.custom_resources VERSION=DEFINITION.yaml ...    # from the top of the checkout: writes schemas/

Of a definition's OpenAPI schema everything is kept that refuses a document, but for rules in CEL. Fields that it does
not know are refused, as `kubectl apply --validate=strict` does. Pod templates inside are left to the schemas of
Kubernetes.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

from tests.unit.k8s.chart import Document

FOLDER = Path(__file__).parent / "schemas"
# What only describes, or says how documents are merged and stored.
DESCRIBING = {"description", "default", "example", "format", "title"}
OF_KUBERNETES = "x-kubernetes-"
INT_OR_STRING = "x-kubernetes-int-or-string"
PRESERVED = "x-kubernetes-preserve-unknown-fields"
# API servers fill these in.
METADATA = {"type": "object", "required": ["name"]}


def is_custom(document: Document) -> bool:
    """Whether a document is of a kind that comes with another project."""
    return (FOLDER / f"{document['kind']}.json").is_file()


def validate(document: Document) -> None:
    """Holds a custom resource to its project's definition.

    Raises:
        jsonschema_rs.ValidationError: A field is unknown, missing or has a wrong value.
        KeyError: The definition has no such version.
    """
    schema = _definition(document["kind"])
    assert document["apiVersion"].startswith(schema["group"] + "/")
    jsonschema_rs.validate(schema["versions"][document["apiVersion"].partition("/")[2]], document)


@functools.cache
def _definition(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{kind}.json").read_text())
    return found


def strict(schema: Any) -> Any:
    """Returns an OpenAPI schema as JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if _is_pod_template(schema):
        return {"type": "object"}
    if schema.get(INT_OR_STRING):
        return {"type": ["integer", "string"]}
    kept = {
        name: ({field: strict(each) for field, each in value.items()} if name == "properties" else strict(value))
        for name, value in schema.items()
        if name not in DESCRIBING and not name.startswith(OF_KUBERNETES)
    }
    if "properties" in kept and "additionalProperties" not in kept and not schema.get(PRESERVED):
        kept["additionalProperties"] = False
    return kept


def _is_pod_template(schema: dict[str, Any]) -> bool:
    properties = schema.get("properties", {})
    return set(properties) == {"metadata", "spec"} and "containers" in properties["spec"].get("properties", {})


def main() -> None:
    """Writes the schemas of the definitions named on the command line."""
    for argument in sys.argv[1:]:
        release, _, path = argument.partition("=")
        spec = yaml.safe_load(Path(path).read_text())["spec"]
        versions = {each["name"]: strict(each["schema"]["openAPIV3Schema"]) for each in spec["versions"]}
        for schema in versions.values():
            schema["properties"]["metadata"] = METADATA
            schema["properties"].pop("status", None)
        found = {"group": spec["group"], "release": release, "versions": versions}
        (FOLDER / f"{spec['names']['kind']}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
