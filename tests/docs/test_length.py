"""Pages are short enough to be read: a page has one subject, and says it once."""

from __future__ import annotations

import pytest

from tests.support.references import PAGES
from tests.support.site import ROOT, pages

MOST_WORDS, MOST_WORDS_OF_README = 1800, 1000
# A list of releases grows, and nobody reads it from begin to end.
LISTS = ("CHANGELOG.md",)
WRITTEN = [page.relative_to(ROOT).as_posix() for page in pages() if page.name not in {*LISTS, *PAGES}]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_that_people_read_is_short(name: str) -> None:
    num_words = len((ROOT / name).read_text(encoding="utf-8").split())
    assert num_words <= (MOST_WORDS_OF_README if name == "README.md" else MOST_WORDS)
