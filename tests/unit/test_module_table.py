"""The page of modules says what the sources say."""

from __future__ import annotations

from tests.support.module_table import TABLE, page


def test_the_page_of_modules_is_that_of_the_sources() -> None:
    assert TABLE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.support.module_table"
