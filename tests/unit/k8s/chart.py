"""The chart as Helm renders it: documents, and the parts of them that tests look at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import helm_python
import yaml

REPOSITORY = Path(__file__).parents[3]
K8S = REPOSITORY / "k8s"
CHART = K8S / "paceline"
TIERS = ("gateway", "verifier", "drafter")
WORKLOADS = ("Deployment", "StatefulSet")
RELEASE, NAMESPACE = "paceline", "llm"

Document = dict[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """All documents of one set of values."""

    documents: tuple[Document, ...]

    def of_kind(self, *kinds: str) -> list[Document]:
        """Documents of these kinds."""
        return [document for document in self.documents if document["kind"] in kinds]

    def named(self, kind: str, tier: str) -> Document:
        """The document of a kind that belongs to a tier."""
        (found,) = [each for each in self.of_kind(kind) if each["metadata"]["name"] == f"{RELEASE}-{tier}"]
        return found

    @cached_property
    def workloads(self) -> dict[str, Document]:
        """Deployments and StatefulSets by tier."""
        return {component(each["metadata"]["labels"]): each for each in self.of_kind(*WORKLOADS)}

    def pod(self, tier: str) -> Document:
        """The pod template of a tier."""
        template: Document = self.workloads[tier]["spec"]["template"]
        return template

    def container(self, tier: str) -> Document:
        """The one container of a tier."""
        (container,) = self.pod(tier)["spec"]["containers"]
        found: Document = container
        return found

    def init_containers(self, tier: str) -> dict[str, Document]:
        """Containers of a tier that run before its own, by name."""
        return {each["name"]: each for each in self.pod(tier)["spec"].get("initContainers", ())}

    def volumes(self, tier: str) -> dict[str, Document]:
        """Volumes of a tier's pods by name, those of claims that each replica keeps among them."""
        claims = self.workloads[tier]["spec"].get("volumeClaimTemplates", ())
        kept = {each["metadata"]["name"]: each for each in claims}
        return kept | {each["name"]: each for each in self.pod(tier)["spec"]["volumes"]}

    def ports(self, tier: str) -> dict[str, int]:
        """Container ports of a tier by name."""
        return {port["name"]: port["containerPort"] for port in self.container(tier)["ports"]}

    def variables(self, tier: str) -> dict[str, str]:
        """Environment of a tier, as the kubelet would fill it in."""
        known = {
            "metadata.name": f"{RELEASE}-{tier}-0",
            "metadata.labels['topology.kubernetes.io/zone']": "zone-1",
            "status.podIP": "10.1.2.3",
            "url": "redis://10.1.2.4:6379",
        }
        filled: dict[str, str] = {}
        for entry in self.container(tier)["env"]:
            source = entry.get("valueFrom", {})
            given = source.get("fieldRef", {}).get("fieldPath") or source.get("secretKeyRef", {}).get("key")
            text = known.get(given, f"<{given}>") if given else entry["value"]
            for name, value in filled.items():
                text = text.replace(f"$({name})", value)
            filled[entry["name"]] = text
        return filled


def component(labels: dict[str, str]) -> str:
    """The tier that labels name."""
    return labels["app.kubernetes.io/component"]


def values_files() -> dict[str, Values]:
    """The chart's defaults and its values files, by name."""
    files = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "values").glob("*.yaml"))}
    return {"defaults": {}, **files}


def render(values: Values) -> Rendered:
    """Renders the chart; `helm_python.HelmError` says why not."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        templates = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in sorted(templates.items()) if name.endswith(".yaml")]
    return Rendered(tuple(document for text in texts for document in yaml.safe_load_all(text) if document))
