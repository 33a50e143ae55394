"""Finds the checkpoints that a fleet serves: the demo pair, its widening in the user's cache, and any that are named.

Parameters are counted from headers alone. Widening adds neurons that have no effect to the demo target's
feed-forward layers: the new rows of the gate and up projections are small random numbers, the new columns of the down
projection are exactly zero. Every new neuron does real work whose result is multiplied by zero. So the model writes
what it wrote before and costs what a larger model costs. Benches must call it widened.

Adding zeros changes no sum. A kernel that splits a longer inner dimension at other places may still add the old terms
in another order: for the demo target, float32 logits came out bit-equal, and so did bfloat16 ones of few rows; with 128
rows in one bfloat16 product some differ by a rounding.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import paceline
from paceline.checkpoints.cached import KEY_CHARS, PackagedModel, made_once, packaged_model
from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.identity import vocab_hash
from paceline.checkpoints.json_files import parse_object, read_object
from paceline.checkpoints.safetensor_files import (
    CELLS,
    WEIGHTS_FILE,
    TensorShape,
    write_tensors,
)
from paceline.checkpoints.source import MODEL_FILES, folder_of, repository_of, unreadable_weights
from paceline.cluster.spec import FleetSpec
from paceline.core.errors import ConfigError
from paceline.core.params import DRAFT_MODEL, EAGLE3, GRAMMAR, MEDUSA, NGRAM

MODELS_FOLDER = Path(paceline.__file__).parent / "models"
DEMO_TARGET = MODELS_FOLDER / "demo-target"
DEMO_DRAFTER = MODELS_FOLDER / "demo-drafter"
DEMO_MEDUSA = MODELS_FOLDER / "demo-medusa"
DEMO_EAGLE3 = MODELS_FOLDER / "demo-eagle3"
WIDENED_NAME = "demo-target-widened-{preset}"
WIDENED_PRESET = "98m"
# Neurons of a feed-forward layer that take the demo target to about 98 and 398 million parameters.
WIDENED_SIZES = {"98m": 12_288, "400m": 51_200}
NEW_WEIGHT_STD = 0.02
# Methods that draft with heads: the key of --speculative-config that names their folder, and the demo target's.
HEADS = {MEDUSA: ("medusa_model", DEMO_MEDUSA), EAGLE3: ("eagle3_model", DEMO_EAGLE3)}
# Keys of --speculative-config that name checkpoints.
MODEL_KEYS = ("model", *(key for key, _ in HEADS.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Resolved checkpoint folders; drafters take the draft models in turn, and there are none without drafters."""

    target: Path
    drafts: tuple[Path, ...]

    def draft_of(self, drafter: int) -> Path:
        return self.drafts[drafter % len(self.drafts)]


def check_checkpoint(path: Path, flag: str) -> Path:
    """Returns the absolute path of a checkpoint folder.

    Raises:
        ConfigError: It is not one; names the flag and what is missing.
    """
    if not path.is_dir():
        raise ConfigError(f"{flag} {path}: no such folder")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{flag} {path}: holds no config.json, so it is no Hugging Face checkpoint folder")
    # On a Ray cluster those of a repository are fetched where they are needed.
    if repository_of(path) is None and not any(path.glob("*.safetensors")):
        raise unreadable_weights((file.name for file in path.iterdir()), f"{flag} {path}")
    return path.absolute()


def widened_demo_target(environ: Mapping[str, str], say: Callable[[str], None], preset: str = WIDENED_PRESET) -> Path:
    """Returns the demo target widened to 98 M parameters (or to 400 M), made now if it is not in the cache.

    Raises:
        ConfigError: It cannot be made.
    """
    if not (DEMO_TARGET / WEIGHTS_FILE).is_file():
        raise ConfigError(f"the demo pair is not in {MODELS_FOLDER}: name checkpoints with --model and --draft-model")
    digest = hashlib.sha256()
    for file in sorted(DEMO_TARGET.iterdir()):
        if file.suffix != ".md":
            digest.update(file.name.encode() + file.read_bytes())

    def make(out: Path) -> None:
        say(f"widening the demo target to {preset[:-1]} M parameters, once: {out.parent}")
        widen(DEMO_TARGET, out, WIDENED_SIZES[preset])

    return made_once(digest.hexdigest()[:KEY_CHARS], WIDENED_NAME.format(preset=preset), make, environ)


def widen(source: Path, out: Path, intermediate_size: int) -> None:
    """Writes a widened copy of a Llama-family checkpoint folder."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    readme = f"# {source.name}, widened\n\nBy `widen` of `paceline.cluster.checkpoints`, which says how.\n"
    (out / "README.md").write_text(readme, encoding="utf-8")
    config = read_object(source / "config.json")
    old = {"name": source.name, "intermediate_size": config["intermediate_size"]}
    config |= {"intermediate_size": intermediate_size, "paceline_widened_from": old}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _widen_weights(source / WEIGHTS_FILE, out / WEIGHTS_FILE, intermediate_size)


def _widen_weights(source: Path, out: Path, intermediate_size: int) -> None:
    from safetensors import deserialize

    generator, entries, tensors = np.random.default_rng(0), dict(deserialize(source.read_bytes())), {}
    for name, entry in sorted(entries.items()):
        cells = np.frombuffer(entry["data"], CELLS[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = _widened(name, cells, intermediate_size, generator)
    shapes = {name: TensorShape(dtype=entries[name]["dtype"], shape=cells.shape) for name, cells in tensors.items()}
    write_tensors(out, shapes, tensors.values())


def _widened(
    name: str, cells: npt.NDArray[Any], intermediate_size: int, generator: np.random.Generator
) -> npt.NDArray[Any]:
    if ".mlp." not in name:
        return cells
    axis = int("down_proj" in name)
    shape = list(cells.shape)
    shape[axis] = intermediate_size - cells.shape[axis]
    if axis:
        return np.concatenate([cells, np.zeros(shape, cells.dtype)], axis)
    floats = NEW_WEIGHT_STD * generator.standard_normal(shape, np.float32)
    bits = floats.view(np.uint32) >> (32 - 8 * cells.itemsize)
    return np.concatenate([cells, bits.astype(cells.dtype)])


def draft_settings(spec: FleetSpec) -> Mapping[str, Any]:
    """Returns `--speculative-config` decoded.

    Raises:
        ConfigError: It is no JSON object; its values are the verifier's to check.
    """
    return parse_object("--speculative-config", spec.speculative_config or "{}")


def fetch_models(spec: FleetSpec, say: Callable[[str], None], *, files: Sequence[str] = MODEL_FILES) -> FleetSpec:
    """Returns the settings with folders where they named checkpoints, heads among them.

    Args:
        say: Gets a line before something is fetched.
        files: Files of target and draft model that are needed here, see `folder_of`.

    Raises:
        ConfigError: A checkpoint cannot be fetched; names its setting and says what to do.
    """
    packaged = None if spec.model is None else packaged_model(spec.model)
    if packaged is not None:
        spec = _with_its_drafter(spec, packaged)
    settings = {
        key: str(folder_of(str(value), f"--speculative-config {key}", say=say))
        if value and key in MODEL_KEYS
        else value
        for key, value in draft_settings(spec).items()
    }
    spec = replace(spec, speculative_config=json.dumps(settings) if settings else "")
    if spec.model is not None:
        spec = replace(spec, model=folder_of(spec.model, "--model", files=files, say=say))
    if spec.draft_model is not None and spec.drafter:
        spec = replace(spec, draft_model=folder_of(spec.draft_model, "--draft-model", files=files, say=say))
    return spec


def _with_its_drafter(spec: FleetSpec, packaged: PackagedModel) -> FleetSpec:
    """Names the drafter that comes with a packaged target; where there is none, look-up inside the verifier drafts."""
    settings = draft_settings(spec)
    if not spec.drafter or spec.draft_model is not None or any(settings.get(key) for key in MODEL_KEYS):
        return spec
    folder = MODELS_FOLDER / packaged.drafter
    if not folder.is_dir():
        return replace(spec, drafter=False)
    if not is_eagle3(folder):
        return replace(spec, draft_model=folder)
    head = {"method": f"{EAGLE3}+{NGRAM}+{GRAMMAR}", **settings, "eagle3_model": str(folder)}
    return replace(spec, speculative_config=json.dumps(head))


def resolve_checkpoints(spec: FleetSpec, environ: Mapping[str, str], say: Callable[[str], None]) -> Checkpoints:
    """Finds the checkpoint folders a fleet is to serve; may make the widened demo target.

    Raises:
        ConfigError: A folder is none, or the draft model is not named.
    """
    # A simulated target has a real tokenizer only.
    own = spec.model or (DEMO_TARGET if spec.simulate else None)
    target = widened_demo_target(environ, say) if own is None else check_checkpoint(own, "--model")
    drafts = tuple(_check_draft(folder, target) for folder in _draft_folders(spec)) if spec.drafter else ()
    if len(drafts) > spec.num_drafters:
        names = " and ".join(draft.name for draft in drafts)
        raise ConfigError(f"--num-drafters: must be at least {len(drafts)} for the draft models {names}")
    return Checkpoints(target=target, drafts=drafts)


def _draft_folders(spec: FleetSpec) -> list[Path]:
    """Returns a folder for each method of the drafter tier.

    Raises:
        ConfigError: None is named.
    """
    settings = draft_settings(spec)
    methods = str(settings.get("method", DRAFT_MODEL)).split("+")
    folders: list[Path] = []
    if DRAFT_MODEL in methods or EAGLE3 not in methods:
        named = settings.get("model")
        draft = spec.draft_model or (Path(str(named)).expanduser() if named else None)
        if draft is None and spec.model is not None:
            raise ConfigError("--model needs --draft-model PATH beside it, or --no-drafter for plain decoding")
        folders.append(draft or DEMO_DRAFTER)
    if EAGLE3 in methods:
        if not settings.get("eagle3_model"):
            raise ConfigError("--speculative-config eagle3_model: must name the folder of the EAGLE-3 head")
        folders.append(Path(str(settings["eagle3_model"])))
    return folders


def _check_draft(folder: Path, target: Path) -> Path:
    draft = check_checkpoint(folder, "--draft-model")
    if not is_eagle3(draft) and vocab_hash(target) != vocab_hash(draft):
        raise ConfigError(
            f"draft model {draft.name!r} cannot draft for target {target.name!r}: their vocabularies differ; "
            "both need the same tokens with the same ids"
        )
    return draft


def with_heads(spec: FleetSpec) -> FleetSpec:
    """Checks the folders that methods need inside the verifier, and names the bundled ones for the demo target.

    Raises:
        ConfigError: A folder is none.
    """
    settings = dict(draft_settings(spec))
    if settings.get("placement") == "verifier":
        own = spec.draft_model or (DEMO_DRAFTER if spec.model is None else None)
        settings |= {} if own is None or "model" in settings else {"model": str(own)}
        spec = replace(spec, drafter=False)
    if settings.get("method") == EAGLE3 and "model" in settings:
        # vLLM's spelling.
        settings.setdefault("eagle3_model", settings["model"])
    for method in str(settings.get("method", "")).split("+"):
        key, bundled = HEADS.get(method, ("", None))
        if key and settings.get(key):
            settings[key] = str(check_checkpoint(Path(str(settings[key])).expanduser(), f"--speculative-config {key}"))
        elif spec.model is None and bundled is not None and bundled.is_dir():
            settings[key] = str(bundled)
    return replace(spec, speculative_config=json.dumps(settings) if settings else "")
