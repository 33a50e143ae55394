"""The site of the docs: its links, its table of contents, its colours. `make docs` builds it and checks headings."""

from __future__ import annotations

import re

from tests.support.site import ROOT, broken_links, wrong_contents

CONSOLE = ROOT / "services" / "paceline" / "gateway" / "api" / "console" / "static" / "console.css"
COLOUR = re.compile(r"#[0-9a-f]{6}\b")


def test_every_link_to_a_file_of_the_checkout_leads_to_one() -> None:
    assert list(broken_links()) == []


def test_the_table_of_contents_names_every_page_and_no_other() -> None:
    assert list(wrong_contents()) == []


def test_the_site_has_the_colours_of_the_console() -> None:
    of_site = set(COLOUR.findall((ROOT / "docs" / "site.css").read_text(encoding="utf-8")))
    assert of_site
    assert of_site <= set(COLOUR.findall(CONSOLE.read_text(encoding="utf-8")))
