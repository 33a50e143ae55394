"""Text of trainings: chats and prompts in the target's template, and rows that the target writes."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from training import text
from training.__main__ import main
from training.acceptance import ModelChain, measure
from training.models import hidden_states, load_model, load_tokenizer, write_rows
from training.text import TextConfig, TextSource, prompts_of, read_documents, read_prompts
from training.tokenizer import END_ID

CHAT = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "left + right"}]
RENDERED = "<|begin|><|user|>\nadd\n<|assistant|>\n"


@pytest.fixture
def tiny_config(tiny_config: LlamaConfig) -> LlamaConfig:
    """Deep enough for an EAGLE-3 head."""
    return LlamaConfig(**(tiny_config.to_dict() | {"num_hidden_layers": 4, "layer_types": None}))


@pytest.fixture
def target(target_folder: Path) -> PreTrainedModel:
    return load_model(target_folder)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def write_prompts(path: Path, count: int = 250) -> Path:
    return write_lines(path, *(f"add {number} to {number % 7}" for number in range(count)))


# Files


def test_chats_and_texts_are_documents_in_the_targets_template(tmp_path: Path, target_folder: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT}, "", {"text": "class Heap"})
    assert read_documents(path, target_folder) == [f"{RENDERED}left + right<|end|>", "class Heap"]


def test_prompts_end_where_the_answer_begins(tmp_path: Path, target_folder: Path) -> None:
    path = write_lines(tmp_path / "prompts", "add", {"prompt": "add"}, {"messages": CHAT}, {"messages": CHAT[:1]})
    tokenizer = load_tokenizer(target_folder)
    expected = tuple(tokenizer.encode(RENDERED, add_special_tokens=False).ids)
    assert prompts_of(path, target_folder) == [expected] * 4


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"words": "add"}, "prompts:2 must have `messages` or `prompt`, has words"),
        ("{add", "prompts:2 is no JSON"),
        ({"messages": [{"role": "user"}]}, "prompts:2: the chat template refuses the chat"),
        ({"messages": CHAT[1:]}, "prompts:2: the chat template refuses the chat"),
        ({"messages": ["hi"]}, r'prompts:2: `messages` must be a list of one object or more, is \["hi"\]'),
        ({"messages": "hi", "prompt": "hi"}, 'prompts:2: `messages` must be a list of one object or more, is "hi"'),
        ({"messages": []}, r"prompts:2: `messages` must be a list of one object or more, is \[\]"),
        ({"messages": None}, "prompts:2 must have `messages` or `prompt`, has nothing"),
    ],
)
def test_a_bad_line_is_named(line: object, problem: str, tmp_path: Path, target_folder: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        prompts_of(write_lines(tmp_path / "prompts", "add", line), target_folder)


def test_a_file_of_another_encoding_is_named(tmp_path: Path, target_folder: Path) -> None:
    path = tmp_path / "prompts"
    path.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match="prompts is not UTF-8"):
        prompts_of(path, target_folder)


def test_a_prompt_has_two_tokens_or_more(tmp_path: Path, target_folder: Path) -> None:
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (target_folder / name).unlink(missing_ok=True)
    for lines in ((), ("a",)):
        with pytest.raises(ValueError, match=r"--prompts-file .*prompts holds no prompt of two tokens or more"):
            prompts_of(write_lines(tmp_path / "prompts", *lines), target_folder)
    assert len(prompts_of(write_lines(tmp_path / "prompts", "a", "xyzzy"), target_folder)) == 1


def test_a_run_learns_no_chat_whose_prompt_is_held_out(tmp_path: Path, target: PreTrainedModel) -> None:
    folder = tmp_path / "target"
    chats = [{"messages": [{"role": "user", "content": f"add {number}"}, CHAT[1]]} for number in range(250)]
    config = TextConfig(
        target=folder, out=tmp_path / "out", corpus=write_lines(tmp_path / "chats.jsonl", *chats), row_tokens=64
    )
    prompts, tokenizer = read_prompts(config), load_tokenizer(folder)
    assert prompts is not None
    store = TextSource(config, target)._store
    assert store is not None
    learnt = tokenizer.decode(store.tokens.tolist(), skip_special_tokens=False)
    spelled = [tokenizer.decode(list(prompt), skip_special_tokens=False) for prompt in prompts.held_out]
    assert spelled
    assert not [prompt for prompt in spelled if prompt in learnt]
    assert learnt.count("left + right") == len(prompts.train)


def test_the_only_chat_is_learnt_and_measured(tmp_path: Path, target: PreTrainedModel) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    config = TextConfig(target=tmp_path / "target", out=tmp_path / "out", corpus=chats)
    store = TextSource(config, target)._store
    assert store is not None
    assert len(store.tokens)


def test_some_prompts_are_held_out_whatever_stands_beside_them(tmp_path: Path, target_folder: Path) -> None:
    def read(count: int) -> text.Prompts:
        path = write_prompts(tmp_path / f"prompts{count}", count)
        found = read_prompts(TextConfig(target=target_folder, out=tmp_path / "out", prompts_file=path))
        assert found is not None
        return found

    few, many = read(200), read(400)
    assert 1 <= len(many.held_out) < len(many.train) / 10
    assert not set(many.held_out) & set(many.train)
    assert set(few.held_out) <= set(many.held_out)


def test_chats_of_a_corpus_are_prompts_and_files_of_code_are_none(tmp_path: Path, target_folder: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    texts = write_lines(tmp_path / "texts.jsonl", {"text": "class Heap"})
    config = {"target": target_folder, "out": tmp_path / "out"}
    found = read_prompts(TextConfig(**config, corpus=chats))
    assert found is not None
    assert load_tokenizer(target_folder).decode(list(found.train[0]), skip_special_tokens=False) == RENDERED
    for corpus in (texts, tmp_path, None):
        assert read_prompts(TextConfig(**config, corpus=corpus)) is None


# Rows


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


@torch.no_grad()
def continued(target: PreTrainedModel, ids: Sequence[int], length: int) -> list[int]:
    """Greedy ids by whole passes."""
    found = list(ids)
    while len(found) <= length:
        found.append(int(target(torch.tensor([found])).logits[0, -1].argmax()))
    return found


def test_a_row_is_what_the_target_says_alone_whatever_stands_beside_it(target: PreTrainedModel) -> None:
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 2), (30, 31, 32, 33)]
    rows = write_rows(target, iter(prompts), 3, 14, greedy, (0, 1))
    assert rows.ids.tolist() == [continued(target, prompt, 14) for prompt in prompts]
    torch.testing.assert_close(rows.states, hidden_states(target, rows.ids[:, :-1], (0, 1)), atol=1e-4, rtol=1e-4)
    for row, prompt in enumerate(prompts):
        assert rows.taught[row].tolist() == [at >= len(prompt) - 1 for at in range(14)]
        assert rows.best[row, len(prompt) - 1 :].tolist() == rows.ids[row, len(prompt) :].tolist()


def test_behind_an_end_a_row_goes_on_with_the_next_prompt(target: PreTrainedModel) -> None:
    first = continued(target, (5, 6, 7), 20)
    end = first[6]
    place = first.index(end, 3)
    rows = write_rows(target, iter([(5, 6, 7), (30, 31)]), 1, 20, greedy, (), {end})
    ids = rows.ids[0].tolist()
    assert ids[: place + 3] == [*first[: place + 1], 30, 31]
    assert ids[place + 3] == continued(target, ids[: place + 3], place + 3)[-1]
    taught = rows.taught[0].tolist()
    assert taught[: place + 4] == [False, False, *[True] * (place - 2), False, False, True, True]


def test_rows_end_with_the_last_answer(target: PreTrainedModel) -> None:
    written = continued(target, (5, 6, 7), 6)
    rows = write_rows(target, iter([(5, 6, 7)]), 1, 40, greedy, (), {written[3]})
    assert rows.ids.tolist() == [written[:4]]
    assert rows.taught.tolist() == [[False, False, True]]


def test_answers_of_any_length_are_measured_together_as_alone(target: PreTrainedModel) -> None:
    prompts = [(5, 6, 7), (9, 8, 7, 6, 5, 4, 3, 2), (30, 31, 32, 33)]
    drafter = ModelChain(target)
    together = measure(target, drafter, prompts, 0.0, num_new=12)
    assert together.num_tokens == 36
    # A target that drafts for itself is always right, up to the end of each answer.
    assert together.accepted == (1.0,) * 7
    assert together.mean_length == {3: 4.0, 5: 6.0, 7: 8.0}
    end = continued(target, prompts[0], 8)[5]
    ended = [measure(target, drafter, [prompt], 0.0, num_new=12, end_ids={end}).num_tokens for prompt in prompts]
    assert measure(target, drafter, prompts, 0.0, num_new=12, end_ids={end}).num_tokens == sum(ended) < 36


# Runs


def train(target_folder: Path, tmp_path: Path, *words: str) -> Path:
    out = tmp_path / "head"
    shape = ("--aux-layers=0", "--aux-layers=1", "--aux-layers=1", "--unrolled-steps=2", "--draft-vocab-size=9000")
    rows = ("--batch-tokens=128", "--row-tokens=64", "--round-rows=4", "--steps-per-round=1")
    main(["eagle3", f"--target={target_folder}", f"--out={out}", *shape, *rows, *words])
    return out


def test_a_head_learns_from_prompts_alone_and_its_card_says_so(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    prompts = f"--prompts-file={write_prompts(tmp_path / 'prompts')}"
    out = train(target_folder, tmp_path, prompts, "--steps=2", "--closing-prompts=0")
    shown = capsys.readouterr()
    assert shown.out == "", "no closing measurement"
    assert "round 0: 4 rows" in shown.err
    assert any("loading the target" in record.getMessage() for record in caplog.records)
    card = (out / "README.md").read_text("utf-8")
    assert "Answers of `target` to the prompts of `prompts`." in card
    assert "license: apache-2.0" in card, "the target's"
    assert "CPython" not in card
    assert json.loads((out / "config.json").read_text("utf-8"))["draft_vocab_size"] == 320
    said = ("--data=Recipes, under CC0.", "--licence=cc0-1.0")
    card = (
        train(target_folder, tmp_path, prompts, "--steps=0", *said, "--closing-prompts=2") / "README.md"
    ).read_text()
    assert "Recipes, under CC0." in card
    assert "license: cc0-1.0" in card
    table = capsys.readouterr().out
    assert table.strip() in card
    assert "2 held-out prompts" in card


def test_a_command_says_something_before_it_imports_torch() -> None:
    # The library's own lines would come after it.
    code = "import sys, training.__main__ as m; assert 'torch' not in sys.modules; m.main(['eagle3', '--help'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.splitlines()[0] == "loading torch and transformers"
    assert "--prompts-file" in ended.stdout


def test_rounds_are_written_once_for_all_runs_with_the_same_text(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = f"--prompts-file={write_prompts(tmp_path / 'prompts')}"
    common = (prompts, f"--rounds={tmp_path / 'rounds'}", "--steps=3", "--closing-prompts=0")
    train(target_folder, tmp_path, *common)
    names = sorted(path.name for path in (tmp_path / "rounds").iterdir())
    assert len(names) == 3
    with monkeypatch.context() as patch:
        patch.setattr(text, "write_rows", None)
        train(target_folder, tmp_path, *common, "--muon-lr=0.005")
    train(target_folder, tmp_path, *common, "--seed=1", "--steps=1")
    assert len(list((tmp_path / "rounds").iterdir())) == 4


def test_rounds_of_another_target_or_corpus_are_written_anew(
    tmp_path: Path, target: PreTrainedModel, tiny_config: LlamaConfig
) -> None:
    folder, corpus = tmp_path / "target", write_lines(tmp_path / "corpus.jsonl", {"text": "pass return"})

    def file() -> str:
        return TextSource(TextConfig(target=folder, out=tmp_path / "out", corpus=corpus), target)._file("0")

    first = file()
    assert file() == first
    write_lines(corpus, {"text": "return pass"})
    second = file()
    assert second != first
    torch.manual_seed(1)
    LlamaForCausalLM(tiny_config).save_pretrained(folder)
    assert file() != second


def test_prompts_that_leave_no_place_for_an_answer_are_refused(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "prompts", *(f"add {'one ' * 40}{number}" for number in range(3)))
    with pytest.raises(SystemExit):
        train(target_folder, tmp_path, f"--prompts-file={prompts}")
    assert "--row-tokens is 64, but prompts must fit half of it, and the shortest has " in capsys.readouterr().err


def test_acceptance_is_measured_on_a_file_of_prompts(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "prompts", "add", "subtract the smaller one")
    folders = (f"--target={target_folder}", f"--drafter={target_folder}", f"--prompts-file={prompts}")
    main(["acceptance", *folders, "--tokens=8"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 5
    assert 0 < int(rows[2].split("|")[-2]) <= 16
    assert END_ID in text.end_ids_of(load_model(target_folder))
