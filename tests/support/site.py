"""Builds the site of the docs: `make docs`, into reports/site.

Pages keep their places in the checkout, so that a link means the same in the site, on a code host and in an editor.
The site's tool has an environment of its own. It checks links to pages and headings; links to other files, and that
the table of contents names every page, are checked here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.environments import environment
from tools.processes import CommandFailedError

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ROOT / "mkdocs.yml"
WORK = ROOT / ".build" / "site"
SITE = ROOT / "reports" / "site"
BUILD_S = 120.0
_FENCED = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_ELSEWHERE = re.compile(r"[a-z]+:|#")


def main() -> int:
    """Returns the exit status."""
    wrong = [*broken_links(), *wrong_contents()]
    if wrong:
        sys.stderr.write("".join(f"{each}\n" for each in wrong))
        return 1
    try:
        tool = environment("docs", os.environ, print).with_name("zensical")
    except CommandFailedError as error:
        sys.stderr.write(f"no site: its tool cannot be installed: {error}\n")
        return 1
    _lay_out()
    command = [tool, "build", "--strict", "--clean", "--config-file", SETTINGS.name]
    built = subprocess.run(command, cwd=WORK, capture_output=True, text=True, check=False, timeout=BUILD_S)
    if built.returncode:
        sys.stderr.write(_COLOUR.sub("", built.stdout + built.stderr).partition("Traceback")[0])
        return 1
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.move(WORK / "site", SITE)
    sys.stdout.write(f"the site is in {SITE.relative_to(ROOT)}; open index.html\n")
    return 0


def pages() -> list[Path]:
    """The pages of the site."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def links(page: Path) -> Iterator[str]:
    """Links of a page to files of the checkout, without the heading that they may name."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    yield from (link.partition("#")[0] for link in _LINK.findall(text) if not _ELSEWHERE.match(link))


def broken_links() -> Iterator[str]:
    """What is wrong with links between files, a line each."""
    for page in pages():
        for link in links(page):
            if not (page.parent / link).is_file():
                yield f"{page.relative_to(ROOT)}: {link} is no file"


def wrong_contents() -> Iterator[str]:
    """Pages that the table of contents lacks, and those that are not there, a line each."""
    named = set(_named(settings()["nav"]))
    there = {page.relative_to(ROOT).as_posix() for page in pages()}
    yield from (f"{SETTINGS.name}: its nav lacks {page}" for page in sorted(there - named))
    yield from (f"{SETTINGS.name}: there is no {page}" for page in sorted(named - there))


def settings() -> Mapping[str, Any]:
    """What mkdocs.yml says."""
    said: Mapping[str, Any] = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    return said


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    for each in nav.values() if isinstance(nav, dict) else nav:
        yield from _named(each)


def _lay_out() -> None:
    """Puts pages, and the files that they link to, where the tool finds them."""
    shutil.rmtree(WORK, ignore_errors=True)
    linked = {(page.parent / link).resolve() for page in pages() for link in links(page)}
    styles = {ROOT / each for each in settings()["extra_css"]}
    for file in {*pages(), *linked, *styles}:
        copy = WORK / "pages" / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    shutil.copyfile(SETTINGS, WORK / SETTINGS.name)


if __name__ == "__main__":
    sys.exit(main())
