"""What the chart must know of the services' settings, read from their configuration classes.

python -m tests.unit.k8s.settings    # from the top of the checkout: writes it into values.schema.json
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from paceline.drafter.config import DrafterConfig
from paceline.gateway.config import GatewayConfig
from paceline.service.config import Setting, setting_of
from paceline.verifier.config import VerifierConfig
from tests.unit.k8s.chart import CHART

CONFIG_OF = {"gateway": GatewayConfig, "verifier": VerifierConfig, "drafter": DrafterConfig}
# Read by `paceline drain` in preStop.
DRAIN_VARIABLES = {"PACELINE_REPLICA"}
# Settings that the chart's own values decide; as `settings` they are refused.
MANAGED = {
    "announce",
    "api_keys_file",
    "device",
    "engine",
    "grace_s",
    "grpc_port",
    "health_port",
    "host",
    "metrics_port",
    "model",
    "model_name",
    "otlp_traces_endpoint",
    "port",
    "profile",
    "redis_url",
    "replica_id",
    "tls_cert",
    "tls_dir",
    "tls_key",
    "trace_sample_ratio",
    "vllm_arg",
    "zone",
}
SCHEMA_FILE = CHART / "values.schema.json"
JSON_TYPES = {int: "integer", float: "number", bool: "boolean"}


def names(tier: str) -> set[str]:
    """Fields of a service's configuration."""
    return {field.name for field in dataclasses.fields(CONFIG_OF[tier])}


def known_variables(tier: str) -> set[str]:
    """Variables that a service reads."""
    return set(map(variable, names(tier)))


def variable(name: str) -> str:
    """The environment variable of a field."""
    return "PACELINE_" + name.upper()


def settings_schema(tier: str) -> dict[str, Any]:
    """JSON schema of a tier's `settings`: every flag that the chart does not set itself, with its type and limits."""
    config_class = CONFIG_OF[tier]
    hints = typing.get_type_hints(config_class)
    properties = {
        field.name.replace("_", "-"): _property(setting_of(config_class, field.name), hints[field.name])
        for field in sorted(dataclasses.fields(config_class), key=lambda field: field.name)
        if field.name not in MANAGED
    }
    if "speculative-config" in properties:
        # Read as JSON; YAML's own mappings do as well.
        properties["speculative-config"] = {"type": ["string", "object"]}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(setting: Setting, hint: Any) -> dict[str, Any]:
    # What may be left out is what it is where it is given.
    kinds = [kind for kind in (*typing.get_args(hint), hint) if kind in JSON_TYPES]
    described: dict[str, Any] = {"type": JSON_TYPES[kinds[0]] if kinds else "string"}
    if setting.choices is not None:
        described["enum"] = list(setting.choices)
    if setting.low is not None:
        described["minimum"] = setting.low
    if setting.high is not None:
        described["maximum"] = setting.high
    return described


def main() -> None:
    """Writes the settings that the services take now into the chart's schema."""
    schema = json.loads(SCHEMA_FILE.read_text())
    schema["$defs"] |= {f"{tier}Settings": settings_schema(tier) for tier in CONFIG_OF}
    SCHEMA_FILE.write_text(json.dumps(schema, indent=2) + "\n")


if __name__ == "__main__":
    main()
