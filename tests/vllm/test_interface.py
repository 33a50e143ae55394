"""The sources of vLLM have what ours take of them: those installed, and those of releases without a CPU build."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.vllm.settings import READ
from tests.vllm.interface import missing

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DOWNLOAD_S = 540.0


def test_the_installed_vllm_has_all_that_is_taken_of_it() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    assert list(missing(Path(spec.submodule_search_locations[0]))) == []


@pytest.mark.parametrize("version", READ)
def test_a_release_that_was_read_has_it_too(version: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    try:
        fetched = subprocess.run([*command, f"vllm=={version}"], timeout=DOWNLOAD_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        pytest.skip(f"vLLM {version} cannot be fetched in {DOWNLOAD_S:g} s here")
    # An index that answers names the versions that it has.
    assert "(from versions: 0" not in fetched.stderr, fetched.stderr
    if fetched.returncode:
        pytest.skip(f"vLLM {version} cannot be fetched here")
    [wheel] = tmp_path.glob("*.whl")
    assert list(missing(zipfile.Path(wheel, "vllm/"))) == []


def test_what_has_changed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "v1" / "worker" / "gpu" / "spec_decode"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def init_speculator(vllm_config, req_states): ...\n")
    (folder / "speculator.py").write_text("class BaseSpeculator:\n    @abstractmethod\n    def rewind(self): ...\n")
    (folder.parent / "states.py").write_text(
        "class RequestState:\n    def __init__(self):\n        self.total_len = 1\n"
    )
    found = list(missing(tmp_path))
    place = "v1/worker/gpu/spec_decode"
    assert (
        f"{place}/__init__.py: init_speculator needs parameters vllm_config, device, req_states, "
        "has vllm_config, req_states"
    ) in found
    assert f"{place}/speculator.py: BaseSpeculator.rewind is abstract, too" in found
    assert "v1/worker/gpu/states.py: RequestState has no all_token_ids" in found
    assert "v1/worker/gpu/states.py: RequestState has no total_len" not in found
    assert "exceptions.py: no class VLLMClientError" in found
    assert "v1/worker/gpu_model_runner.py: the module has no build_logitsprocs" in found
