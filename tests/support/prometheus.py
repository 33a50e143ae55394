"""Debian's Prometheus for tests: it scrapes once a second, and answers queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.spec import Ports

CHART = Path(__file__).parents[2] / "k8s" / "paceline"
ALERTS = CHART / "rules" / "alerts.yaml"
DASHBOARD = CHART / "dashboards" / "paceline.json"
TIMEOUT_S = 60.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool, Debian's package prometheus",
)


class Prometheus:
    """A running one.

    Args:
        client: Asks it.
        num_targets: Processes that it scrapes.
    """

    def __init__(self, client: httpx.Client, num_targets: int) -> None:
        self._num_targets = num_targets
        self._client = client

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the samples of an expression now; one that cannot be parsed fails the test."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        data = answer["data"]
        return data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]

    def rules(self) -> list[dict[str, Any]]:
        """Returns the rules it has loaded, each with its health."""
        groups = self._client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def until_scraped(self) -> None:
        """Returns when every target has been scraped once more, from now on."""
        since_s = time.time()
        self.until(lambda: len(self.query(f"timestamp(up) > {since_s} and up == 1")) == self._num_targets)

    @staticmethod
    def until(holds: Callable[[], bool]) -> None:
        """Asks until it holds; fails after a minute."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline_s, "Prometheus did not get there"
            time.sleep(0.1)

    def ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._client.get("/-/ready").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@contextmanager
def running_prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrapes `host:port` targets by job name, with the chart's alert rules loaded, until the block ends."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in targets.items()]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": jobs,
    }
    config_file = folder / "prometheus.yml"
    # JSON is YAML.
    config_file.write_text(json.dumps(config), encoding="utf-8")
    with ExitStack() as held:
        port = Ports("127.0.0.1", held).take(0, "--web.listen-address")
    command = [
        "prometheus",
        f"--config.file={config_file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "prometheus.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=TIMEOUT_S) as client:
            prometheus = Prometheus(client, len(targets))
            prometheus.until(lambda: process.poll() is not None or prometheus.ready())
            assert process.poll() is None, (folder / "prometheus.log").read_text(encoding="utf-8")
            yield prometheus
    finally:
        process.terminate()
        process.wait(30)
