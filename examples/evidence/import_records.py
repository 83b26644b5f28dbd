"""Writes records of the figures that were measured before the scripts wrote records: run once, in a checkout.

The figures are those of the cards and of docs/evidence.md at the commit before the move. Where neither has an interval,
the record has none. A script of this folder replaces its file of records when it runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from typing import Any

from common import RECORDS, difference_of, write_records

from rl_plugins.cards.results import Result

COMMIT = "e10ccbd"
OLD_CARDS = """
import json
from dataclasses import astuple
from rl_plugins.method import Bundle
from rl_plugins.runtime import registry
from rl_plugins.supervised import card_of
names = [n for n in registry.all_names() if "rl_plugins." in registry.origins_of(n)[0].where]
found = {n: registry.load(n) for n in sorted(names, key=lambda n: isinstance(registry.load(n), Bundle))}
rows = [(n, *astuple(m)) for n, f in found.items()
        for m in (f.measured if isinstance(f, Bundle) else vars(f).get("measured", ()))]
print(json.dumps(rows + [("otr", *astuple(m)) for m in card_of("otr").measured]))
"""
OLD = {"not told apart": "no significant difference"}

X = r"([+-]?\d*\.?\d+)"
TWO = re.compile(
    rf"{X}(?: ± {X})?( %)?(?: [^±;,]*?)? against {X}(?: ± {X})?(?: %)?(?: of \d+| at [\d.]+)?(?: \(([^)]*)\))?"
)
ONE = re.compile(rf"{X} ± {X}( %| points)?(?: \(([^)]*)\))?")
RATIO = re.compile(rf"{X} \({X} to {X}\) times (.*)")
PAIRED = re.compile(rf"(?:paired(?: difference)? |, (?=\+)){X} ± {X}")
BASELINE = re.compile(r",? minus (?:those of )?(.+?)(?=,| \(|$)")

# Metrics of which less is better; of all others more is.
LOWER = re.compile(
    r"^(spread|share of stale|mean staleness|updates (until|that lower)|tries until|batches until|squared (error|bias)"
    r"|noise|variance|share of groups without|weighted standard error|advantages with the wrong sign|flawed rollouts"
    r"|share of right answers reached|turns generated|cost of|false alarms)"
)
BUDGET = {
    "rollouts": r"equal rollouts|same number of rollouts|same rows|equal budgets",
    "samples": r"equal samples",
    "sampled tokens": r"equal sampled tokens",
    "trained transitions": r"equal trained transitions",
    "passes of the model": r"equal passes",
    "updates": r"equally many updates",
}
# What a pattern cannot read; the figures are those of the section of docs/evidence.md.
SAME_WAYS = "pass@16 of 8 heads, difficulty goes with the kind of solution, simulated"
BY_HAND: dict[tuple[str, str], dict[str, Any]] = {
    ("aepo_rollout", "spread of branches"): {
        "value": [0.35], "other": [0.35], "baseline": "without it", "note": "Gini coefficients"
    },
    ("aepo_advantages", "success against"): {"baseline": "PPO's advantages", "claim": "success"},
    ("brorl", "updates that lower"): {
        "value": [2.4, 0.5], "other": [0, 0], "unit": "%", "baseline": "16 rollouts", "difference": (), "paired": False
    },
    ("difficulty_slices", "the same minus"): {"claim": SAME_WAYS, "baseline": "8 heads on random slices"},
    ("difficulty_slices", "the same where"): {
        "claim": "pass@16 of 8 heads, difficulty says nothing of the kind of solution, simulated"
    },
    ("fapo", "flawed rollouts at"): {"value": [0.006, 0], "note": "as fast at the start"},  # the card had 0.001
    ("fapo", "flawless rollouts"): {"value": [0, 0], "other": [0, 0], "baseline": "GRPO"},
    ("fission_grpo", "right answers after an error on new tasks, simulated"): {
        "value": [0.08], "other": [0.025], "note": "0.087 are possible"
    },
    ("fission_grpo", "right answers after an error on new tasks, simulated, empty"): {"value": [0.039]},
    ("gdro_rollout", "weighted"): {
        "none": 1, "baseline": "equal groups", "note": "the least that is possible is 0.971 times"
    },
    ("gigpo", "cosine of one"): {
        "difference": (0.08, 0.04), "paired": True, "note": "the smallest gain, with the widest interval"
    },
    ("hgpo", "cosine"): {"note": "0.90 ± 0.06 with `mean_norm`"},
    ("latr", "distinct answers of 8"): {"note": "85 % of the groups without variance against 25 %"},
    ("mc_grpo", "advantages with the wrong sign, two"): {"value": [0, 0], "other": [0, 0], "unit": "%"},
    ("ps_grpo", "sign of"): {
        "claim": "share of advantages with the right sign, the paper's sample, simulated",
        "value": [0.733, 0.006], "other": [1, 0], "baseline": "exact rewards",
    },
    ("reward_audit", "wrong rows"): {
        "note": "6660 of 6660 with a wrong sign for one source, 385 of 385 with a word, no right row called wrong"
    },
    ("reward_audit", "a fault in"): {
        "difference": (1, 0.83, 1), "baseline": "no audit",
        "note": "a warning in 20 of 20 runs; a verifier of 5 % of the rollouts convicts in 6 of 20",
    },
    ("reward_audit", "false"): {"note": "a warning in 2 of 80 runs, nothing taken out"},
    ("sol_rl", "the same reward"): {
        "claim": "reward of a small policy of images, 6 of 24 seeds explored in FP4, at equal passes of both models",
        "difference": (-0.083, 0.018), "paired": True, "baseline": "6 of 6 samples",
    },
    ("turn_control", "cost of an agent"): {"none": 100, "baseline": "the unlimited loop's"},
    ("vcpo", "variance of"): {"none": 1, "baseline": "the group mean's"},
}  # fmt: skip
# Section -> scripts; where there are several, the method decides.
SCRIPTS = {
    "gdpo-against-grpo-in-trl": "headline",
    "prompts-and-rollouts": "prompts",
    "corrections-for-stale": "staleness",
    "credit-per-turn": "credit",
    "in-trl-on-the-embedded": "demo",
    "the-advantage-methods": "demo",
    "ui_s1-and-m_grpo-in-trl": "semi_online delegate",
    "branch_grpo-on-images": "branch_grpo",
    "turn_control-cleaner": "turn_control cleaner",
    "training_free_grpo-rtv_pdr": "training_free_grpo rtv_pdr",
    "ui_s1-m_grpo": "ui_s1 m_grpo",
    "v0_5-v0-brpo": "v0_5 v0 brpo",
    "echo-aepo": "echo aepo",
    "gigpo": "gigpo hgpo",
    "latr": "latr arrol scope fission_grpo",
}
OF_METHOD = {"ui_s1": "semi_online", "m_grpo": "delegate"}


def script_of(method: str, claim: str, where: str) -> str:
    """The file of records that a result belongs to."""
    if "demo, 2 seeds" in claim:
        return "demo"
    names = next((v for k, v in SCRIPTS.items() if where.startswith(k)), where.partition("-")[0]).split()
    if "delegate" in names:
        return OF_METHOD[method]
    fitting = [n for n in names if method == n or method.startswith(n + "_")]
    return max(fitting, key=len) if fitting else names[0]


def seeds_of(method: str, where: str) -> int:
    """By the heading; one with two numbers has those of its first word, then of the others."""
    numbers = re.findall(r"(\d+)-(?:other-)?seeds", where)
    if not numbers:
        return 5 if method == "ui_s1" else 3
    return int(numbers[0] if where.startswith(method) else numbers[-1])


def record(method: str, claim: str, text: str, where: str) -> dict[str, Any]:
    """The record that the text of an old card stands for."""
    given: dict[str, Any] = {"method": method, "claim": claim, "baseline": "", "unit": "", "note": ""}
    if found := BASELINE.search(claim):
        given |= {"baseline": found[1], "claim": BASELINE.sub("", claim)}
    if found := PAIRED.search(text):
        given |= {"difference": (float(found[1]), float(found[2])), "paired": True}
    if found := RATIO.match(text):
        given |= {"difference": tuple(map(float, found.groups()[:3])), "none": 1, "baseline": found[4]}
    elif found := TWO.match(text):
        a, half, percent, b, other, baseline = found.groups()
        given |= {"value": [float(x) for x in (a, half) if x], "other": [float(x) for x in (b, other) if x]}
        given |= {"unit": (percent or "").strip(), "baseline": baseline or given["baseline"]}
    elif found := ONE.match(text):
        given |= {"difference": (float(found[1]), float(found[2])), "unit": (found[3] or "").strip(), "paired": True}
        given |= {"baseline": found[4] or given["baseline"]}
    else:
        given["note"] = text
    for (of, start), values in BY_HAND.items():
        if of == method and claim.startswith(start):
            given |= {"note": ""} | values
    if "none" in given and not given.get("value") and "difference" in given:
        given["paired"] = False
    value, other = given.get("value", []), given.get("other", [])
    interval = difference_of(value, other, given.pop("difference", ()))
    budget = next((name for name, pattern in BUDGET.items() if re.search(pattern, claim)), "")
    result = {
        "better": "lower" if LOWER.search(claim) else "higher",
        "seeds": seeds_of(method, where),
        "budget": budget,
    }
    return {k: v for k, v in (given | result | interval).items() if v is not False and v not in ("", [])} | {
        "where": where,
        "imported": True,
    }


def old_cards() -> list[tuple[str, ...]]:
    """Method, claim, verdict, numbers, section and page of every result; a bundle's own ones only."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", COMMIT, "rl_plugins"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        command = [sys.executable, "-c", OLD_CARDS]
        rows = json.loads(subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout)
    seen: set[tuple[str, ...]] = set()
    own = []
    for row in map(tuple, rows):  # a bundle repeats results of its parts, and parts share some
        if row[0] in ("areal", "aepo", "dars_b", "dots_rr", "echo", "xrpo") and row[1:] in seen:
            continue
        seen.add(row[1:])
        own.append(row)
    return own


def main() -> None:
    """Writes the files, and prints where the figures say something else than the card did."""
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    counts: dict[bool, int] = defaultdict(int)
    for method, claim, verdict, numbers, where, page in old_cards():
        assert page == "evidence.md"
        given = record(method, claim, numbers, where)
        made[script_of(method, claim, where)].append(given)
        found = Result(**given)
        counts[found.verdict == OLD.get(verdict, verdict)] += 1
        if found.verdict != OLD.get(verdict, verdict):
            print(f"{method}: {claim}\n    typed: {verdict}, {numbers}\n    now: {found.verdict}, {found.numbers}")
    for script, records in sorted(made.items()):
        write_records(RECORDS / f"{script}.json", records)
    print(
        f"{sum(counts.values())} records in {len(made)} files; verdict as typed: {counts[True]}, other: {counts[False]}"
    )


if __name__ == "__main__":
    main()
