"""Reference pages of docs/, made from the code: `make references` writes those that differ.

Each module makes one page from what the services themselves read, and has a function `page` that returns its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.references import configuration, grpc_api, http_api, metrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration.page,
    "grpc-api.md": grpc_api.page,
    "http-api.md": http_api.page,
    "metrics.md": metrics.page,
}
