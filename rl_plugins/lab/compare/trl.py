"""Runs of TRL: `trl grpo` on the user's YAML config, or `rl-plugins trl masked_grpo`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.lab.compare.plan import CONFIG, Variant


@dataclass(frozen=True)
class Trl:
    """Text of a YAML config, and options that follow it on the command line.

    Args:
        masked: the trainer of masked diffusion language models trains all variants.
        trace: variants with methods write a trace of some groups of every tenth batch.
    """

    config: str
    extra: tuple[str, ...] = ()
    masked: bool = False
    trace: bool = False
    sets = "`--seed`, `--output_dir`, `--count_costs`, `--methods` and `--method_params`"

    @property
    def worker(self) -> str:
        return f"rl_plugins.lab.compare.{'masked' if self.masked else 'trl'}_worker"

    def arguments(
        self, variant: Variant, seed: int, folder: Path, params: Mapping[str, Mapping[str, Any]]
    ) -> list[str]:
        return [
            "--config",
            str(folder.absolute() / CONFIG),
            *self.extra,
            *variant.options,
            "--seed",
            str(seed),
            "--output_dir",
            str(folder / "trainer"),
            *(("--trace", json.dumps({"every": 10, "groups": 8})) if self.trace and variant.methods else ()),
            "--count_costs",  # of the baseline, too
            "True",
            "--method_params",
            json.dumps(params),
            "--methods",
            *(variant.methods or ("",)),
        ]
