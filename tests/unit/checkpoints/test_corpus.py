from pathlib import Path

import pytest

from paceline.checkpoints.corpus import MAX_PROMPT_CHARS, is_held_out, load_corpus, unseen_prompts

FUNCTION = '''def area_{n}(width, height):
    """Return the area of a rectangle.

    The unit is that of the sides, squared; this text only makes the function long enough for a
    prompt, which needs more than two hundred characters of source.
    """
    product_{n} = width * height
    return product_{n}
'''


def make_library(root: Path) -> Path:
    """A small library: two held-out modules, several others, a copy, a test, a broken file."""
    (root / "json").mkdir(parents=True)
    (root / "test").mkdir()
    (root / "site-packages").mkdir()
    for n, name in enumerate(["heapq.py", "json/decoder.py", "alpha.py", "beta.py", "gamma.py"]):
        (root / name).write_text(FUNCTION.format(n=n), encoding="utf-8")
    (root / "copy_of_heapq.py").write_text(FUNCTION.format(n=0), encoding="utf-8")
    (root / "test" / "test_alpha.py").write_text("assert True\n", encoding="utf-8")
    (root / "latin.py").write_bytes(b"name = '\xe9'\n")
    (root / "site-packages" / "other.py").write_text("x = 1\n", encoding="utf-8")
    return root


def test_the_split_is_disjoint_and_leaves_out_copies_packages_and_undecodable_files(tmp_path: Path) -> None:
    corpus = load_corpus(make_library(tmp_path))
    train = {file.path for file in corpus.train}
    held_out = {file.path for file in corpus.held_out}
    assert not train & held_out
    assert {"heapq.py", "json/decoder.py"} <= held_out
    assert {"alpha.py", "test/test_alpha.py"} <= train | held_out
    assert not {"latin.py", "site-packages/other.py"} & (train | held_out)
    assert not any("area_0" in file.text for file in corpus.train), "a copy of a held-out file"


def test_the_split_hangs_on_relative_paths_only(tmp_path: Path) -> None:
    first = load_corpus(make_library(tmp_path / "a"))
    second = load_corpus(make_library(tmp_path / "b"))
    assert first == second


def test_about_two_percent_of_all_paths_are_held_out() -> None:
    count = sum(is_held_out(f"package/module_{n}.py") for n in range(10_000))
    assert 150 <= count <= 250


def test_prompts_come_from_held_out_files_in_an_order_the_seed_fixes(tmp_path: Path) -> None:
    root = make_library(tmp_path)
    prompts = unseen_prompts(2, seed=1, root=root)
    assert prompts == unseen_prompts(2, seed=1, root=root)
    held_out = [file.text for file in load_corpus(root).held_out]
    assert all(any(prompt in text for text in held_out) for prompt in prompts)
    assert all(prompt.lstrip().startswith("def ") for prompt in prompts)
    assert all(len(prompt) <= MAX_PROMPT_CHARS for prompt in prompts)


def test_asking_for_more_prompts_than_there_are_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="count is 1000"):
        unseen_prompts(1000, root=make_library(tmp_path))


def test_a_folder_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_corpus(tmp_path)
