"""`compare` between one agent and several: the measures of coordination, from logs as a run writes them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from test_compare import plan

from rl_plugins.lab.compare import report
from rl_plugins.lab.compare.report import Interval

TEAM = "m_grpo_rollout+m_grpo"


def logs(comparison, of_variant, steps=20):
    """`of_variant[label](seed, step)` are the logged values; "tokens" and "rows" of a step are summed up."""
    for run in comparison.runs:
        run.folder.mkdir(parents=True, exist_ok=True)
        lines, tokens, rows = [], 0.0, 0.0
        for i in range(1, steps + 1):
            values = dict(of_variant[run.variant.label](run.seed, i))
            tokens, rows = tokens + values.pop("tokens"), rows + values.pop("rows")
            totals = {"rl_plugins/tokens_decoded": tokens, "rl_plugins/rows_made": rows}
            lines.append({"step": i, "max_steps": steps, "seconds": float(i), **totals, **values})
        run.log_file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def one(seed, step):
    return {"reward": 0.6 + 0.05 * seed, "tokens": 160 + 40 * (step > 18), "rows": 20}


def team(tokens=10.5, **more):
    def of(seed, step):
        p = "m_grpo_rollout/"
        values = {"reward": 0.5 + 0.05 * seed, "tokens": 210, "rows": 40, f"{p}agent_turns": 4.0 + seed}
        values |= {f"{p}agent_tokens": tokens, f"{p}messages": 5.0, f"{p}redundancy": 0.25, f"{p}turns": 2.0}
        return values | more

    return of


def summarized(tmp_path, one=one, several=None, metrics=("reward",), cost_unit="steps"):
    comparison = plan(tmp_path, [TEAM])
    logs(comparison, {"grpo": one, TEAM: several or team()})
    return report.summarize(comparison, list(metrics), cost_unit=cost_unit)


def test_by_hand(tmp_path):
    """One agent has one turn and, in the last tenth of the run, 200 tokens in 20 rows."""
    summary = summarized(tmp_path)
    found = summary["agents"]
    assert found["one"] == "grpo" and found["metric"] == "reward" and list(found["variants"]) == [TEAM]
    of = found["variants"][TEAM]
    assert of["overhead"] == pytest.approx([3.0, 4.0, 5.0])
    assert of["message_density"] == pytest.approx([5 / 4, 5 / 5, 5 / 6])
    assert of["redundancy"] == pytest.approx([0.25] * 3)
    assert of["efficiency"] == pytest.approx([0.5 / 4, 0.55 / 5, 0.6 / 6])
    assert of["tokens_ratio"] == pytest.approx([1.05] * 3)
    assert of["error_amplification"] == pytest.approx([0.5 / 0.4, 0.45 / 0.35, 0.4 / 0.3])
    text = report.text(summary)
    assert "Several agents against one (grpo); success is reward, in training:" in text
    assert f"| turns more than one agent, relative | {Interval.of([3.0, 4.0, 5.0])} |" in text
    assert f"| tokens per rollout / those of one agent | {Interval.of([1.05] * 3)} |" in text
    assert "Errors are not compared" not in text


def test_errors_at_unequal_tokens(tmp_path):
    """Not compared by steps; with a budget in tokens each variant is read where it has decoded as many."""
    summary = summarized(tmp_path / "a", several=team(20.0))
    assert all(map(math.isnan, summary["agents"]["variants"][TEAM]["error_amplification"]))
    text = report.text(summary)
    assert "| errors / errors of one agent, at equal tokens | - |" in text and "With --budget tokens_decoded" in text
    by_tokens = summarized(tmp_path / "b", several=team(20.0), cost_unit="tokens_decoded")
    amplified = by_tokens["agents"]["variants"][TEAM]["error_amplification"]
    assert amplified == pytest.approx([0.5 / 0.4, 0.45 / 0.35, 0.4 / 0.3])
    assert "With --budget tokens_decoded" not in report.text(by_tokens)


def test_a_reward_that_is_no_share_of_successes(tmp_path):
    summary = summarized(tmp_path, several=team(reward=1.5))
    of = summary["agents"]["variants"][TEAM]
    assert all(map(math.isnan, of["efficiency"] + of["error_amplification"])) and of["overhead"] == [3.0, 4.0, 5.0]
    assert "Errors are not compared: reward, in training is not in [0, 1]" in report.text(summary)


def test_a_single_agent_without_errors(tmp_path):
    summary = summarized(tmp_path, one=lambda s, i: one(s, i) | {"reward": 1.0})
    assert "| infinite: one agent makes no error |" in report.text(summary)


@pytest.mark.parametrize(
    ("logged", "turns"),
    [
        ({"turn_control/turns": 2.0}, 2.0),
        ({"num_turns/mean": 4.0}, 2.0),
        ({"tools/call_frequency": 0.5}, math.nan),
        ({}, 1.0),
    ],
)
def test_turns_of_a_single_agent(tmp_path, logged, turns):
    summary = summarized(tmp_path, one=lambda s, i: one(s, i) | logged)
    np.testing.assert_allclose(
        summary["agents"]["variants"][TEAM]["overhead"], [(t - turns) / turns for t in (4, 5, 6)]
    )


def test_without_an_variant_of_either_kind_nothing_is_told(tmp_path):
    summary = summarized(tmp_path, several=one)
    assert summary["agents"] == {} and "Several agents" not in report.text(summary)
    both = summarized(tmp_path, one=team())
    assert both["agents"] == {}


def test_what_the_host_did_not_count_is_not_known(tmp_path):
    comparison = plan(tmp_path, [TEAM])
    logs(comparison, {"grpo": one, TEAM: team()})
    for run in comparison.runs:
        lines = [json.loads(line) for line in run.log_file.read_text().splitlines()]
        kept = [{k: v for k, v in line.items() if not k.startswith("rl_plugins/")} for line in lines]
        run.log_file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    summary = report.write(comparison, ["reward"])
    of = summary["agents"]["variants"][TEAM]
    assert all(map(math.isnan, of["tokens_ratio"] + of["error_amplification"])) and of["overhead"] == [3.0, 4.0, 5.0]
    saved = json.loads((comparison.out / "summary.json").read_text())
    assert saved["agents"]["variants"][TEAM]["tokens_ratio"] == [None] * 3
