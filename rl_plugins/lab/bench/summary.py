"""From the raw results to what the package carries: `published.json` here, and `claims.json` of the cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_plugins.core.files import write_text
from rl_plugins.lab.bench.claims import claims, differences_from_grpo, outcome
from rl_plugins.lab.bench.combine import attributions, stacks
from rl_plugins.lab.bench.results import SEARCH_FROM, Results
from rl_plugins.lab.bench.verl_runs import agreement


def summary(results: Results, in_verl: Results | None = None) -> dict[str, Any]:
    """Everything that pages, cards and `suggest` say of the bench.

    Args:
        in_verl: results of the sample in verl.
    """
    variants = sorted({variant for _, variant, seed in results.runs if variant != "grpo" and seed < SEARCH_FROM})
    return {
        "runs": sum(not run.error for run in results.runs.values()),
        "last": max((run.record["date"] for run in results.runs.values()), default=""),
        "versions": sorted({run.record["versions"] for run in results.runs.values()}),
        "claims": [outcome(results, claim) for claim in claims()],
        "places": [place for variant in variants for place in differences_from_grpo(results, variant)],
        "stacks": stacks(results),
        "attributions": attributions(results),
        "hosts": list(agreement(results, in_verl or Results())),
    }


def write(package: Path, results: Results, in_verl: Results | None = None) -> dict[str, Any]:
    """Writes what the package carries, and returns the summary.

    Args:
        package: the folder `rl_plugins` of a checkout.
        in_verl: results of the sample in verl.
    """
    told = summary(results, in_verl)
    rest = {k: v for k, v in told.items() if k != "claims"}
    rows = ",\n".join(json.dumps(claim, ensure_ascii=False) for claim in told["claims"])
    write_text(package / "lab" / "bench" / "published.json", json.dumps(rest, indent=1) + "\n")
    write_text(package / "cards" / "claims.json", f"[\n{rows}\n]\n")
    return told
