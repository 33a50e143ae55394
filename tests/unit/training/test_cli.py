import argparse
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.training.cli import add_arguments, main


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="paceline train")
    add_arguments(parser)
    return main(parser.parse_args(words))


def test_help_shows_the_commands_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    text = capsys.readouterr().out
    assert all(word in text for word in ("demo", "distill", "medusa", "eagle3", "evaluate", "examples:"))


def test_a_target_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nowhere"
    assert run("distill", "--target", str(missing), "--out", str(tmp_path / "out")) == 2
    assert f"{missing} holds no config.json" in capsys.readouterr().err


def test_resuming_a_distillation_that_never_began_is_refused(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run("distill", "--target", str(target_folder), "--out", str(tmp_path / "out"), "--resume")
    assert status == 2
    assert "no checkpoint.pt to resume from" in capsys.readouterr().err


def test_a_pair_of_two_vocabularies_is_refused(
    target_folder: Path,
    tiny_config: LlamaConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_config.vocab_size = 400
    LlamaForCausalLM(tiny_config).save_pretrained(tmp_path / "other")
    words = ("--target", str(target_folder), "--drafter", str(tmp_path / "other"))
    assert run("evaluate", *words) == 2
    assert "vocabulary of the target is 320, of the drafter 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "guesses"),
    [("medusa --heads 2", "1 / 2"), ("eagle3 --aux-layers 0 1 1 --draft-vocab-size 200", "1 / 2")],
)
def test_heads_are_trained_exported_and_measured(
    command: str, guesses: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.py").write_text("def add(left, right):\n    return left + right\n\n" * 200, "utf-8")
    out = tmp_path / "heads"
    folders = ("--target", str(target_folder), "--corpus", str(tmp_path / "corpus"), "--out", str(out))
    assert run(*command.split(), *folders, "--steps", "1", "--batch-tokens", "1024") == 0
    shown = capsys.readouterr().out
    assert f"| temperature | accepted up to draft {guesses}" in shown
    assert shown in (out / "README.md").read_text("utf-8")
    assert "after 1 steps of 1,024 tokens" in (out / "README.md").read_text("utf-8")
    assert (out / "model.safetensors").is_file()
    few = ("--prompts", "2", "--tokens", "8")
    assert run("evaluate", "--target", str(target_folder), "--drafter", str(out), *few) == 0
    assert capsys.readouterr().out.splitlines()[:2] == shown.splitlines()[:2]
