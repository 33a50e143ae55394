"""The set-up says all that is missing before it downloads anything, and installs no more than a target needs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def set_up() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up", CHECKOUT / "tools" / "set_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(target: str, venv: Path) -> str:
    """What make would run for a target."""
    command = ["make", "--dry-run", f"VENV={venv}", target]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_demo_and_a_fleet_need_what_serves_and_tests_need_the_rest(tmp_path: Path) -> None:
    for target in ("demo", "up"):
        assert f"tools/set_up.py serve --venv {tmp_path}\n" in planned(target, tmp_path)
        assert "set_up.py dev" not in planned(target, tmp_path)
    for target in ("test", "test-all"):
        assert f"tools/set_up.py dev --venv {tmp_path}\n" in planned(target, tmp_path)


def test_all_that_is_missing_is_said_at_once_and_nothing_is_run(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(set_up, "OLDEST_PYTHON", (99, 0))
    monkeypatch.setitem(set_up.MEGABYTES, "serve", 1e12)
    monkeypatch.setattr(set_up.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["set_up.py", "serve", "--venv", str(tmp_path / "venv")])
    with pytest.raises(SystemExit):
        set_up.main()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "set-up: nothing was downloaded, this machine lacks:"
    assert [line.split(":")[0] for line in said[1:]] == [
        f"  - Python 3.11 or newer ({sys.executable} is {sys.version.split()[0]})",
        "  - Python's venv module with ensurepip",
        "  - disk space",
    ]
    assert not list(tmp_path.iterdir())


def test_a_cuda_build_that_the_disk_cannot_hold_is_refused_before_it_comes(
    set_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up.sys, "platform", "linux")
    assert set_up.is_cuda("2.13.0")
    assert not set_up.is_cuda("2.13.0+cpu")
    with pytest.raises(set_up.SetUpError, match=r"disk space.*name an index or folder that has the CPU build"):
        set_up.check_build("2.13.0", 1e12, tmp_path / "venv")


def test_what_torch_tests_itself_with_is_left_out_and_what_it_runs_stays(set_up: ModuleType, tmp_path: Path) -> None:
    torch = tmp_path / "lib" / "python3.11" / "site-packages" / "torch"
    names = {"bin/torch_shm_manager", "lib/libtorch.so", "testing/__init__.py"}
    for name in names | {"bin/test_api", "bin/List_test", "bin/protoc", "test/test_jit"}:
        (torch / name).parent.mkdir(parents=True, exist_ok=True)
        (torch / name).write_bytes(bytes(1_000_000))
    assert set_up.drop_ballast(tmp_path) == 4
    assert {str(file.relative_to(torch)) for file in torch.rglob("*") if file.is_file()} == names
