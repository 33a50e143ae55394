"""The site of the docs: its links and its table of contents. `make docs` builds it and checks headings."""

from __future__ import annotations

from tests.support.site import broken_links, wrong_contents


def test_every_link_to_a_file_of_the_checkout_leads_to_one() -> None:
    assert list(broken_links()) == []


def test_the_table_of_contents_names_every_page_and_no_other() -> None:
    assert list(wrong_contents()) == []
