from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from training import demo
from training.__main__ import main

pytestmark = pytest.mark.full


def run(*words: str) -> int:
    try:
        main(words)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.py").write_text("def add(left, right):\n    return left + right\n\n" * 200, "utf-8")
    return folder


def test_what_is_not_there_is_named(target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(tmp_path / "out"))
    assert run("distill", "--target", str(tmp_path / "nowhere"), *out) == 2
    assert f"{tmp_path / 'nowhere'} holds no config.json" in capsys.readouterr().err
    assert run("distill", "--target", str(target_folder), *out, "--resume") == 2
    assert "no checkpoint.pt to resume from" in capsys.readouterr().err


def test_a_pair_of_two_vocabularies_is_refused(
    target_folder: Path, tiny_config: LlamaConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.vocab_size = 400
    LlamaForCausalLM(tiny_config).save_pretrained(tmp_path / "other")
    assert run("acceptance", "--target", str(target_folder), "--drafter", str(tmp_path / "other")) == 2
    assert "vocabulary of the target is 320, of the drafter 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["medusa --heads 2", "eagle3 --aux-layers 0 --aux-layers 1 --aux-layers 1 --draft-vocab-size 200"],
)
def test_heads_are_trained_exported_and_measured(
    command: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "heads"
    folders = ("--target", str(target_folder), "--corpus", str(write_corpus(tmp_path / "corpus")), "--out", str(out))
    assert run(*command.split(), *folders, "--steps", "1", "--batch-tokens", "1024") == 0
    shown = capsys.readouterr().out
    assert "| temperature | accepted up to draft 1 / 2" in shown
    assert shown in (out / "README.md").read_text("utf-8")
    assert "after 1 steps of 1,024 tokens" in (out / "README.md").read_text("utf-8")
    assert (out / "model.safetensors").is_file()
    assert run("acceptance", f"--target={target_folder}", f"--drafter={out}", "--prompts=2", "--tokens=8") == 0
    assert capsys.readouterr().out.splitlines()[:2] == shown.splitlines()[:2]


def test_the_demo_makes_four_models_and_begins_nothing_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool, str]] = []

    def note(config, out: Path | None = None) -> None:
        start = getattr(config, "start", None)
        made.append(((out or config.out).name, config.resume, start.name if start else ""))

    for name in ("make_target", "make_drafter", "make_medusa", "make_eagle3"):
        monkeypatch.setattr(demo, name, note)
    begun = tmp_path / "demo-drafter-2-run"
    begun.mkdir()
    (begun / "checkpoint.pt").touch()
    assert run("demo", "--out", str(tmp_path), "--resume") == 0
    assert made == [
        ("demo-target", False, ""),
        ("demo-drafter-1", False, ""),
        ("demo-drafter-2", True, "demo-drafter-1"),
        ("demo-drafter-3", False, "demo-drafter-2"),
        ("demo-drafter", False, "demo-drafter-3"),
        ("demo-medusa", False, ""),
        ("demo-eagle3", False, ""),
    ]
