"""The `paceline` command: help everywhere, clear refusals, nothing heavy before it is needed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import paceline
from paceline import cli
from tools import set_up

ENV = os.environ | {"PYTHONPATH": "services"}


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {command} " in text for command in cli.COMMANDS)


def test_help_and_the_commands_of_a_client_load_nothing_heavy() -> None:
    program = (
        "import contextlib, sys\nfrom paceline.cli import main\n"
        "for argv in (['--help'], ['up', '--help'], ['generate', '--help']):\n"
        "    with contextlib.suppress(SystemExit): main(argv)\n"
        "heavy = {'torch', 'transformers', 'numba', 'starlette'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], env=ENV, check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "paceline", "--version"]
    ended = subprocess.run(command, env=ENV, check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout == f"paceline {paceline.__version__}\n"


def test_ctrl_c_ends_the_set_up_of_a_checkout_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["set_up.py", "serve"])
    monkeypatch.setattr(set_up, "set_up", interrupted)
    with pytest.raises(SystemExit) as caught:
        set_up.main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == ("set-up: interrupted; what was downloaded is kept, so start it again to go on\n")


def offer(folder: Path, version: str, *requirements: str) -> None:
    """A wheel of torch with nothing but its metadata, for pip to look through."""
    about = "".join(
        f"{line}\n" for line in ("Metadata-Version: 2.1", "Name: torch", f"Version: {version}", *requirements)
    )
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"torch-{version}.dist-info/METADATA", about)
        wheel.writestr(f"torch-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"torch-{version}.dist-info/RECORD", "")


def test_set_up_takes_the_cpu_build_where_pip_finds_one_and_stops_at_the_cuda_build_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [pinned] = re.findall(r"^torch==(\S+)$", (set_up.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(set_up.shutil, "which", {}.get)
    monkeypatch.delenv(set_up.WANTED_BUILD, raising=False)
    offer(tmp_path, pinned, 'Requires-Dist: nvidia-cublas==13.1; platform_system == "Linux"')
    assert set_up.torch_build(Path(sys.executable)) == (pinned, True)
    with pytest.raises(set_up.SetUpError, match="export PIP_EXTRA_INDEX_URL="):
        set_up.check_cuda(0, tmp_path)
    monkeypatch.setenv(set_up.WANTED_BUILD, "cuda")
    set_up.check_cuda(0, tmp_path)
    offer(tmp_path, f"{pinned}+cpu", "Requires-Dist: sympy>=1.13.3")
    assert set_up.torch_build(Path(sys.executable)) == (f"{pinned}+cpu", False)


def test_an_unknown_command_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["serve"], capsys)
    assert "no command 'serve'; there are up, gateway, verifier" in message


def test_a_missing_package_is_named_with_its_extra() -> None:
    program = "import sys\nsys.modules['pydantic'] = None\nfrom paceline.cli import main\nmain(['gateway'])"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=ENV, check=False, timeout=60, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr == "paceline gateway: error: needs the package pydantic: install paceline[gateway]\n"


def test_models_names_its_actions(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (["models"], ["models", "/nope"]):
        assert "models: error: needs the action fetch, such as: paceline models fetch ORG/NAME" in refusal(line, capsys)


TRIED = """source {script}
for line in {lines}; do
  read -ra COMP_WORDS <<< "$line"
  COMPREPLY=()
  COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
  _shtab_paceline
  echo "${{COMPREPLY[@]}}"
done
"""
COMPLETED = {
    "paceline dra": "drafter drain",
    "paceline models f": "fetch",
    "paceline models fetch --tok": "--tokenizer-only",
    "paceline verifier --dty": "--dtype",
    "paceline verifier --engine v": "vllm",
}


def completion(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    cli.main(["completion", shell])
    return capsys.readouterr().out


def test_bash_completes_commands_flags_and_their_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "paceline"
    script.write_text(completion("bash", capsys))
    program = TRIED.format(script=script, lines=" ".join(f"'{line}'" for line in COMPLETED))
    ended = subprocess.run(["bash", "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert dict(zip(COMPLETED, ended.stdout.splitlines(), strict=True)) == COMPLETED


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_all_commands_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = completion(shell, capsys)
    assert all(command in text for command in cli.COMMANDS)
    assert "tokenizer-only" in text


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--shell must be one of bash, zsh, fish, got 'tcsh'" in refusal(["completion", "tcsh"], capsys)
