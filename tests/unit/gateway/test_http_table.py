"""The page of the HTTP API says what the models of requests say."""

from __future__ import annotations

from tests.support.http_table import PAGE, page


def test_the_page_of_the_http_api_is_that_of_the_models() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.support.http_table"
