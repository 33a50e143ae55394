"""Files that other engines are measured with."""

from pathlib import Path

import pytest
from loadtest.peers import run

from paceline.checkpoints.cached import SMOLLM2
from tools.processes import CommandFailedError


def test_llama_cpp_reads_the_file_that_its_package_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    python = tmp_path / "bin" / "python"
    made: list[object] = []

    def make(command: list[object], name: str, environ: object) -> Path:
        made.extend([*command, name])
        return tmp_path / name

    monkeypatch.setattr(run, "made_by", make)
    shipped = str(packages / SMOLLM2.file)
    assert run.prepared(run.LLAMA_CPP_4_BITS, Path("cache") / SMOLLM2.name, python, print) == shipped
    assert not made
    wide = run.prepared(run.LLAMA_CPP, Path("cache") / SMOLLM2.name, python, print)
    assert wide.endswith("SmolLM2-135M-Instruct.Q4_1-f16.gguf")
    assert made[0] == python
    assert str(made[2]) == shipped


@pytest.mark.parametrize("name", [run.LLAMA_CPP, run.LLAMA_CPP_4_BITS])
def test_llama_cpp_has_nothing_to_read_of_another_model(name: str) -> None:
    with pytest.raises(CommandFailedError, match="reads GGUF files: --pair smollm2"):
        run.prepared(name, Path("models/demo-target"), Path("bin/python"), print)
