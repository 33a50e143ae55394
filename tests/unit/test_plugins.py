"""Names of methods and rules: ours, those of installed packages, and what is said of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.service.plugins import SOURCES
from paceline.verifier.config import speculation_from


def declare(folder: Path, package: str, entries: str) -> None:
    """A package on the path, as pip leaves one."""
    metadata = folder / f"{package}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(entries, encoding="utf-8")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_method_of_a_package_is_known_while_it_is_installed(path: Path) -> None:
    assert "mine" not in SOURCES
    with pytest.raises(ConfigError, match=r"method must be one of draft_model, eagle3, ngram.*got 'mine'"):
        speculation_from('{"method": "ngram+mine"}')
    declare(path, "mine", "[paceline.sources]\nmine = nowhere:make\n")
    assert "mine" in SOURCES.names
    assert speculation_from('{"method": "ngram+mine"}').methods == ("ngram", "mine")
    with pytest.raises(ConfigError, match="'mine' cannot be made by nowhere:make: No module named 'nowhere'"):
        SOURCES.make("mine")


def test_a_name_of_ours_cannot_be_taken_over(path: Path) -> None:
    declare(path, "thief", "[paceline.sources]\nngram = nowhere:make\n[paceline.rules]\nblock = nowhere:make\n")
    assert SOURCES.names.count("ngram") == 1
    with pytest.raises(ConfigError, match="make_sources:text"):
        SOURCES.make("ngram")
    assert speculation_from('{"acceptance": "block"}').rules.more == ()


def test_two_packages_of_one_name_are_refused(path: Path) -> None:
    declare(path, "one", "[paceline.rules]\nmine = one:make\n")
    declare(path, "two", "[paceline.rules]\nmine = two:make\n")
    with pytest.raises(ConfigError, match="2 packages declare it"):
        speculation_from('{"acceptance": "coupled+mine"}')


def test_a_rule_takes_its_options_and_needs_leave_to_be_lossy(path: Path) -> None:
    (path / "lenient.py").write_text(
        "class Rule:\n    name, lossy, drafts = 'lenient', True, 'coupled'\n"
        "    def __init__(self, k=1):\n        self.k = k\n",
        encoding="utf-8",
    )
    declare(path, "lenient", "[paceline.rules]\nlenient = lenient:Rule\n")
    with pytest.raises(ConfigError, match='acceptance lenient is lossy, and needs "lossy": true'):
        speculation_from('{"acceptance": "coupled+lenient"}')
    speculation = speculation_from('{"acceptance": "lenient", "lossy": true, "options": {"lenient": {"k": 4}}}')
    assert speculation.rules.names(("ngram",)) == ("lenient", "coupled")
    assert vars(speculation.rules.more[-1]) == {"k": 4}
    with pytest.raises(ConfigError, match="unexpected keyword argument 'depth'"):
        speculation_from('{"acceptance": "lenient", "lossy": true, "options": {"lenient": {"depth": 4}}}')
    with pytest.raises(ConfigError, match=r"options\.lenient must be a JSON object, got 4"):
        speculation_from('{"acceptance": "lenient", "lossy": true, "options": {"lenient": 4}}')


def test_a_rule_that_calls_itself_something_else_is_refused(path: Path) -> None:
    declare(path, "alias", "[paceline.rules]\nalias = paceline.core.acceptance_rules:Coupled\n")
    with pytest.raises(ConfigError, match=r"'alias' is what paceline\.core\.acceptance_rules:Coupled is declared as"):
        speculation_from('{"acceptance": "alias"}')


def test_a_rule_that_drafts_for_one_that_drafters_do_not_know_is_refused(path: Path) -> None:
    (path / "odd.py").write_text("class Rule:\n    name, lossy, drafts = 'odd', False, 'guesswork'\n", encoding="utf-8")
    declare(path, "odd", "[paceline.rules]\nodd = odd:Rule\n")
    with pytest.raises(ConfigError, match="acceptance odd drafts for 'guesswork'; drafters know coupled, rejection"):
        speculation_from('{"acceptance": "odd"}')
