"""What a fusion would do, checked before anything is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_plugins.commands.fuse.folder import FLOATS, INDEX, OTHER_WEIGHTS, ModelFolder
from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.tools.fusion import FusionRule

NOT_COPIED = ("readme.md", "training_args.bin", "trainer_state.json", "rollout_state.json", "fusion.json")


@dataclass(frozen=True)
class FusionPlan:
    """A fusion whose inputs fit each other.

    Attributes:
        base: the folder all experts were trained from.
        experts: by name, in the order of their names.
        out: folder that is written; it does not exist yet, or is empty.
        rule: what is done.
        copied: files of the base that are copied: config, tokenizer, code.
        skipped: files and folders of the base that are not.
    """

    base: ModelFolder
    experts: Sequence[ModelFolder]
    out: Path
    rule: FusionRule
    copied: Sequence[Path]
    skipped: Sequence[str]

    @classmethod
    def of(cls, base: Path, experts: Sequence[str], out: Path, rule: FusionRule) -> FusionPlan:
        """Reads all headers and checks that the folders fit.

        Args:
            base: folder.
            experts: `folder` or `name=folder`; without a name it is the folder's.
            out: folder that would be written.
            rule: what is done.

        Raises:
            ConfigError: a folder cannot be fused with the others, or `out` cannot be written.
        """
        _check_out(out)
        start = ModelFolder.open("base", base)
        others = [ModelFolder.open(name, path) for name, path in sorted(_named(experts).items())]
        for expert in others:
            _check_fits(start, expert)
        copied, skipped = _beside(base)
        plan = cls(start, others, out, rule, copied, skipped)
        free, needed = shutil.disk_usage(_existing(out)).free, plan.writes
        if free < needed:
            raise ConfigError(
                f"{out} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free. Give another --out."
            )
        return plan

    @property
    def fused(self) -> list[str]:
        """Tensors that are fused."""
        return [name for name, tensor in self.base.tensors.items() if tensor.dtype in FLOATS]

    @property
    def writes(self) -> int:
        """Bytes of the tensors that are written."""
        return sum(tensor.length for tensor in self.base.tensors.values())

    @property
    def memory(self) -> int:
        """Bytes of the largest tensor's float32 deltas, and of one more such array where elements are selected."""
        arrays = len(self.experts) + (self.rule.select_topk < 1 and len(self.experts) > 1)
        return 4 * arrays * max((self.base.tensors[name].size for name in self.fused), default=0)


def _named(words: Sequence[str]) -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or Path(word).is_dir():
            name, folder = Path(os.path.abspath(word)).name, word
        if not name or not folder:
            raise ConfigError(f"the expert {shortened(word)} has no name or no folder. Write FOLDER or NAME=FOLDER.")
        if name in found:
            raise ConfigError(
                f"two experts have the name {name}: {found[name]} and {folder}. The dropout depends on the name. Give "
                f"each its own: math={found[name]} code={folder}"
            )
        if name == "base":
            raise ConfigError(f"the expert {folder} has the name `base`. Give another: math={folder}")
        found[name] = Path(folder)
    return found


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not an empty folder. Nothing was written. Give another name.")
    if not os.access(_existing(out), os.W_OK):
        raise ConfigError(f"--out {out} cannot be written: no permission in {_existing(out)}. Give another folder.")


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())


def _check_fits(base: ModelFolder, expert: ModelFolder) -> None:
    mine, theirs = base.tensors, expert.tensors
    for name in sorted(set(mine) ^ set(theirs)):
        has, lacks = (expert, base) if name in theirs else (base, expert)
        twin = has.shared.get(name) or next((n for n, first in has.shared.items() if first == name), None)
        if twin:
            why = (
                f"There it is tied to {twin}; one folder stores tied weights once, the other twice. Load `{has.name}` "
                f"and call `save_pretrained`, which stores them once."
            )
        elif "head" in name or "embed" in name:
            why = (
                "If these are output weights, one model ties them to the embeddings and the other trained them "
                "apart. Such models cannot be fused."
            )
        else:
            why = "Fuse models of one architecture that were trained from this base."
        raise ConfigError(f"the tensor {name} is in `{has.name}` and not in `{lacks.name}`. {why}")
    for name, tensor in mine.items():
        other = theirs[name]
        if tensor.shape != other.shape:
            raise ConfigError(
                f"the tensor {name} has the shape {list(tensor.shape)} in the base and {list(other.shape)} in "
                f"`{expert.name}`. Fuse models of one architecture and vocabulary."
            )
        if tensor.dtype != other.dtype and not {tensor.dtype, other.dtype} <= set(FLOATS):
            raise ConfigError(
                f"the tensor {name} is {tensor.dtype} in the base and {other.dtype} in `{expert.name}`. Save both "
                f"alike."
            )
    for tied in sorted(base.shared.items() ^ expert.shared.items()):
        has, lacks = (base, expert) if tied in base.shared.items() else (expert, base)
        raise ConfigError(
            f"the tensors {tied[0]} and {tied[1]} are the same weights in `{has.name}` and differ in `{lacks.name}`. "
            f"They are tied in one and apart in the other. If they were never tied, set "
            f"tie_word_embeddings to false in the config.json of both."
        )


def _beside(base: Path) -> tuple[list[Path], list[str]]:
    copied, skipped = [], []
    for path in sorted(base.iterdir()):
        if path.suffix == ".safetensors" or path.name.endswith(INDEX):
            continue
        unwanted = path.suffix in OTHER_WEIGHTS or path.name.lower() in NOT_COPIED or path.name.startswith(".")
        if path.is_dir() or unwanted:
            skipped.append(path.name + "/" * path.is_dir())
        else:
            copied.append(path)
    return copied, skipped
