"""Writes the reference pages that are not what the code says; names them."""

from __future__ import annotations

import sys

from tests.support.references import DOCS, PAGES

if __name__ == "__main__":
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
