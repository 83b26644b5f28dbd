"""`rl-plugins bench`: the tasks, the runs, and what becomes of a claim."""

from __future__ import annotations

import dataclasses
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

from rl_plugins.cards.claims import PaperClaim, decide, verdict_text
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench import chains, choice, combine, figures, page, published, runs, summary, tasks
from rl_plugins.lab.bench.claims import checked, outcome
from rl_plugins.lab.bench.differences import at_budget, difference
from rl_plugins.lab.bench.results import BenchRun, Results, is_current
from rl_plugins.lab.bench.runs import Waiting, run_missing
from rl_plugins.lab.bench.tasks import METRICS, TASKS, task_of
from rl_plugins.lab.bench.variants import BenchVariant

ROOT = Path(__file__).parents[1]

# ---- tasks


@pytest.mark.parametrize(
    ("prompt", "found"), [("7+5*3", [2, 6]), ("f:0-1", [9]), ("3*4*5-9+9", [2, 0, 1, 0]), ("l:9*9", [1])]
)
def test_values_of_a_chain(prompt, found):
    assert chains.values(prompt) == found and chains.solve(prompt) == str(found[-1])


@pytest.mark.parametrize("prompt", ["", "7", "7+", "a+b", "7/3", "x:7/3", "7+55"])
def test_what_is_no_chain(prompt):
    with pytest.raises(ValueError, match="is no chain"):
        chains.values(prompt)


CLEAN = chains.Style(slip=0.0, direct=0.0, dirty=0.0, shortcut=0.0)


@given(st.integers(0, 10**6), st.sampled_from(["", "l"]))
def test_a_demonstration_without_slips_is_right_and_clean(seed, mode):
    rng = random.Random(seed)
    prompt = chains.random_prompt(chains.Mix((1, 3, 9), mode=mode), rng)
    text = chains.write(prompt, CLEAN, rng)
    assert chains.right(None, [text], chain=[prompt]) == [1] == chains.clean(None, [text], chain=[prompt])
    spoiled = text[:-1] + str((int(text[-1]) + 1) % 10)
    assert chains.right(None, [spoiled], chain=[prompt]) == [0]


def test_forks_need_every_letter():
    assert chains.is_right("2a6a=6", "f:7+5*3") and not chains.is_right("2b6a=6", "f:7+5*3")
    assert not chains.is_right("=6", "f:7+5*3") and chains.is_right("=6", "7+5*3")


def test_marks_and_steps():
    rows = ["26=6", "2?6=6", "26=6!", "=6", "36=6"]
    of = dict(chain=["7+5*3"] * 5)
    assert chains.right(None, rows, **of) == [1] * 5
    assert chains.clean(None, rows, **of) == [1, 0, 0, 0, 0]
    assert chains.tidy(None, rows, **of) == [1, 0, 0, 1, 1]
    assert chains.steps(None, rows, **of) == [1, 1, 1, 0, 0.5]
    assert chains.solved(None, ["=6", "=5", "=5"], chain=["7+5*3", "7+5*3", "1+1"]) == [1, 1, 0]


def test_noise_turns_its_share_of_the_rewards_around():
    prompts = [r["chain"] for r in chains.build_rows(chains.Mix((4,)), 2000, 1)]
    told = ["=" + chains.solve(p) for p in prompts]
    for reward, share in ((chains.noisy_10, 0.1), (chains.noisy_30, 0.3)):
        wrong = 1 - np.mean(reward(None, told, chain=prompts))
        assert abs(wrong - share) < 4 * np.sqrt(share * (1 - share) / 2000)
    liked = np.mean(chains.biased(None, ["=x!"] * 2000, chain=prompts))
    assert abs(liked - 0.3) < 0.04 and sum(chains.biased(None, ["=x"] * 2000, chain=prompts)) == 0


def test_splits_share_no_prompt_and_the_unsolvable_share_is_kept():
    mix = TASKS["difficulty=unsolvable"].mix
    train, held_out = (chains.build_rows(mix, 400, 0, split) for split in ("train", "held_out"))
    assert not {r["chain"] for r in train} & {r["chain"] for r in held_out}
    assert abs(np.mean([r["task"] == "unsolvable" for r in train]) - 0.7) < 0.1


def test_every_task_has_a_config_and_its_rewards_exist(tmp_path):
    for task in TASKS.values():
        values = task.config(tmp_path, tmp_path)
        assert values["max_steps"] % values["eval_steps"] == 0
        for name in values["reward_funcs"]:
            if name.startswith("rl_plugins.lab.bench.chains."):
                assert callable(getattr(chains, name.rpartition(".")[2]))
        assert task.metric in METRICS


def test_rloo_plays_no_environments(tmp_path):
    with pytest.raises(ConfigError, match="RLOO plays no environments, so rloo does not run in agents=states"):
        choice.wanted(["rloo"], ["agents=states"], [], range(2))  # before anything is trained
    kept = BenchVariant.of("rloo@beta=0.1").config(TASKS["neutral"], TASKS["neutral"].config(tmp_path, tmp_path))
    assert kept["beta"] == 0.1 and not {"methods", "count_costs", "loss_type"} & set(kept)


def test_words_that_are_no_task_and_no_option():
    with pytest.raises(ConfigError, match="no task 'noise=7'"):
        task_of("noise=7")
    with pytest.raises(ConfigError, match="is no option"):
        BenchVariant.of("grpo@fast")
    with pytest.raises(ConfigError, match="mc_grpoo"):
        BenchVariant.of("mc_grpoo")
    assert BenchVariant.of("mc_grpo@learning_rate=1e-3,beta=0.04").options == {"learning_rate": 1e-3, "beta": 0.04}


# ---- verdicts


def made(task: str, variant: str, seed: int, values, tokens=100.0, name="eval_rewards/right/mean") -> BenchRun:
    run = BenchRun.of(task, variant, seed, [], "error")
    run.record["error"] = ""
    points = [
        ({"steps": 10.0 * i, "rows_trained": 640.0 * i, "tokens_decoded": tokens * i}, float(v))
        for i, v in enumerate(values)
    ]
    run.curves[name] = points
    run.curves["reward"] = points
    return run


def pairs(effect: float, spread: float, seeds: int = 8, variant: str = "mc_grpo", task: str = "neutral") -> Results:
    rng = np.random.default_rng(0)
    results = Results()
    noise = rng.normal(size=seeds)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * spread
    for seed in range(seeds):
        base = 0.5 + 0.05 * rng.normal()
        results.add(made(task, "grpo", seed, [0.2, base, base]))
        results.add(made(task, variant, seed, [0.2, base + effect + noise[seed], base + effect + noise[seed]]))
    return results


def claim(**given) -> PaperClaim:
    return PaperClaim(**{"method": "mc_grpo", "says": "It helps.", "task": "neutral", "control": "rloo", **given})


def test_a_difference_is_students_interval_of_the_pairs():
    found = difference(pairs(0.1, 0.03), "neutral", "mc_grpo", "grpo", "right")
    error = 0.03 / np.sqrt(8)
    half = stats.t.ppf(0.975, 7) * error
    assert (found.mean, found.seeds) == (pytest.approx(0.1), 8)
    assert (found.low, found.high) == (pytest.approx(0.1 - half), pytest.approx(0.1 + half))
    assert found.seen == pytest.approx(half + stats.t.ppf(0.8, 7) * error)


def with_control(results: Results, effect: float, spread: float = 0.01) -> Results:
    for run in pairs(effect, spread, variant="rloo").runs.values():
        if run.record["variant"] == "rloo":
            results.add(run)
    return results


@pytest.mark.parametrize(
    ("effect", "spread", "seeds", "control", "verdict"),
    [
        (0.1, 0.03, 8, 0.0, ("helps", "tokens")),
        (0.1, 0.03, 8, None, ("cannot be seen here", "control")),  # ahead, and the host's own way was not run
        (0.1, 0.01, 8, 0.1, ("within", "control")),  # ahead of GRPO, and the host's own way does the same
        (0.1, 0.06, 8, 0.1, ("cannot be seen here", "control")),
        (0.1, 0.03, 8, 0.2, ("harmful", "control")),
        (-0.1, 0.03, 8, 0.0, ("harmful", "")),
        (0.0, 0.005, 8, 0.0, ("within", "")),
        (0.01, 0.005, 8, 0.0, ("within", "")),  # above zero, and less than what matters
        (-0.01, 0.005, 8, 0.0, ("within", "")),
        (0.01, 0.03, 8, 0.0, ("cannot be seen here", "")),
        (0.1, 0.03, 7, 0.0, ("not run", "")),  # too few seeds
    ],
)
@pytest.mark.parametrize("better", ["higher", "lower"])
def test_what_becomes_of_a_claim(effect, spread, seeds, control, verdict, better):
    sign = 1 if better == "higher" else -1
    results = pairs(sign * effect, spread, seeds)
    if control is not None:
        with_control(results, sign * control)
    told = outcome(results, claim(better=better))
    found, by = decide(told)
    assert found == verdict[0] and (by or "tokens") == (verdict[1] or "tokens")
    assert verdict_text(told).startswith(found)
    if seeds == 8:
        assert told["mean"] == pytest.approx(sign * effect)


def test_more_tokens_are_no_help():
    """Ahead at equal steps, with twice the tokens: GRPO that decodes as many is where the method is."""
    results, curve = Results(), np.array([0.0, 0.1, 0.2, 0.3, 0.4])
    for seed in range(8):
        noise = 0.01 * (-1) ** seed
        results.add(made("neutral", "grpo", seed, curve, tokens=100))
        results.add(made("neutral", "mc_grpo", seed, 2 * curve + noise, tokens=200))
    told = outcome(results, claim(control="", no_control="There is none."))
    assert told["low"] > 0.3
    assert "was not run" not in verdict_text({**told, "control": "rloo"})
    assert decide(told) == ("within", "tokens") and "at equal tokens" in verdict_text(told)


def test_a_control_may_be_of_another_task():
    results = pairs(0.1, 0.03)
    for run in pairs(0.0, 0.01, variant="rloo", task="noise=10").runs.values():
        results.add(run)
    told = outcome(results, claim(control="rloo in noise=10"))
    assert told["against"]["control"]["mean"] == pytest.approx(0.1)
    wanted = choice.wanted(["mc_grpo"], [], [claim(control="rloo in noise=10")], range(1))
    assert Waiting("noise=10", "rloo", 0) in wanted and Waiting("neutral", "rloo", 0) not in wanted


def test_fresh_seeds_decide_alone():
    """The first eight chose the claim, so they do not count once there are eight others."""
    lucky, fresh = pairs(0.2, 0.03), pairs(0.05, 0.03, 20)
    for (task, variant, seed), run in fresh.runs.items():
        if seed >= 8:
            lucky.runs[task, variant, seed] = run
    told = outcome(lucky, claim())
    assert told["seeds"] == 12 and told["mean"] < 0.1
    for seed in range(15, 20):
        del lucky.runs["neutral", "mc_grpo", seed]
    assert outcome(lucky, claim())["seeds"] == 15, "seven are too few"


def test_a_claim_that_is_not_tested_and_one_that_failed():
    results = pairs(0.1, 0.03)
    for seed in range(8):
        results.add(BenchRun.of("noise=10", "mc_grpo", seed, [], "ValueError: it broke"))
        results.add(made("noise=10", "grpo", seed, [0.2, 0.3, 0.4]))
    failed = outcome(results, claim(task="noise=10"))
    untested = outcome(results, claim(task="", control="", untested="It needs a large model."))
    assert (decide(failed)[0], failed["error"]) == ("failed", "ValueError: it broke")
    assert decide(untested)[0] == "not tested" == verdict_text(untested)


def test_rows_of_the_page_name_sign_and_controls():
    told = outcome(with_control(pairs(-0.1, 0.03), -0.09), claim(better="lower"))
    assert "was not run" in page.claim_row({k: v for k, v in told.items() if k != "against"})
    row = page.claim_row(told)
    assert "lower is better" in row and "-0.100" in row and "its control `rloo`" in row
    assert page.section_of(told) == "host" and page.section_of({**told, "against": {}}) == "waiting"


def test_equal_budgets_are_read_where_the_dearer_variant_ends():
    """The second variant decodes twice the tokens per step: at equal tokens it is read where the first one ends."""
    curve = [0.0, 0.1, 0.2, 0.3, 0.4]
    results = Results()
    for seed in range(8):
        results.add(made("neutral", "grpo", seed, curve, tokens=100))
        results.add(made("neutral", "mc_grpo", seed, [2 * v for v in curve], tokens=200))
    steps, tokens = (
        difference(results, "neutral", "mc_grpo", "grpo", "right", budget=b) for b in ("steps", "tokens_decoded")
    )
    assert steps.mean == pytest.approx(0.35) and tokens.mean == pytest.approx(0.0)
    assert at_budget([({"steps": 0.0}, 0.0), ({"steps": 40.0}, 1.0)], "steps", 20.0) == pytest.approx(0.4375)


def test_a_claim_needs_a_task_or_a_reason():
    for fields in (
        {"task": ""},
        {"untested": "no"},
        {"task": "nowhere"},
        {"metric": "beauty"},
        {"budget": "euros"},
        {"control": ""},
        {"no_control": "There is none."},
        {"control": "rloo in nowhere"},
    ):
        with pytest.raises(ConfigError, match="mc_grpo"):
            checked(claim(**fields))


# ---- results


def test_results_are_read_as_they_were_written(tmp_path):
    results = pairs(0.1, 0.03)
    results.add(BenchRun.of("noise=10", "mc_grpo", 0, [], "ValueError: it broke"))
    results.write(tmp_path)
    again = Results.read(tmp_path)
    assert again.runs.keys() == results.runs.keys()
    for key, run in results.runs.items():
        assert again.runs[key].curves == run.curves and again.runs[key].error == run.error
    assert pq.read_table(tmp_path / "runs.parquet").num_rows == 17
    (tmp_path / "curves.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="cannot be read"):
        Results.read(tmp_path)


def test_results_of_other_settings_are_made_again(monkeypatch):
    results = pairs(0.1, 0.03)
    run = results.runs["neutral", "mc_grpo", 0]
    assert is_current(run) and results.has("neutral", "mc_grpo", 0)
    changed = dataclasses.replace(TASKS["neutral"], prompts=7)
    monkeypatch.setitem(TASKS, "neutral", changed)  # type: ignore[arg-type]
    assert not is_current(run) and not results.has("neutral", "mc_grpo", 0)
    assert results.seeds("neutral", "mc_grpo") == [], "and are compared with nothing"


def test_a_fingerprint_does_not_know_modules_and_classes():
    here, there = (tasks.fingerprint_of({"rewards": [name]}) for name in ("rl_plugins.a.b.right", "rl_plugins.c:right"))
    assert here == there != tasks.fingerprint_of({"rewards": ["rl_plugins.a.b.wrong"]})
    neutral = TASKS["neutral"]
    assert dataclasses.replace(neutral, about="other words").fingerprint == neutral.fingerprint


def test_the_package_carries_what_the_raw_results_say(tmp_path):
    """All stored runs are of the tasks and variants of now, and the files that `--publish` makes of them are ours."""
    kept = Results.read(ROOT / "benchmarks" / "bench")
    assert len(kept.runs) > 1000 and all(map(is_current, kept.runs.values()))
    for folder in ("cards", "lab/bench"):
        (tmp_path / folder).mkdir(parents=True)
    summary.write(tmp_path, kept)
    written = [file.relative_to(tmp_path) for file in tmp_path.rglob("*.json")]
    assert len(written) == 2
    for file in written:
        assert (tmp_path / file).read_text() == (ROOT / "rl_plugins" / file).read_text(), file


def test_the_summary_that_the_package_carries():
    told = summary.summary(pairs(0.1, 0.03))
    (place,) = told["places"]
    assert place["mean"] == place["tokens"]["mean"] == pytest.approx(0.1) and told["runs"] == 16
    assert place["costs"] == {"rows_trained": 1.0, "tokens_decoded": 1.0}
    assert published.published().keys() == told.keys()


def test_every_method_with_a_claim_has_its_curves_and_no_figure_is_cut_off(tmp_path):
    """Also where a run logged a value less often than the others, and where a metric was not logged."""
    results = pairs(0.1, 0.03, variant="fapo")
    del results.runs["neutral", "fapo", 0].curves["eval_rewards/right/mean"][1]
    told = summary.summary(results)
    assert published.methods_run(told) == ["fapo"]
    figures.draw(results, told, tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == {f"{n}{dark}.png" for n in ("claims", "baseline", "fapo") for dark in ("", "-dark")}
    assert [p[:2] for p in figures.panels_of(results, "fapo")] == [("neutral", "clean"), ("neutral", "right")]
    assert not figures.draw_method(results, "vade", tmp_path / "vade.png") and not (tmp_path / "vade.png").exists()
    for file in tmp_path.glob("*.png"):
        assert not ink_at_an_edge(file), file.name


def ink_at_an_edge(file: Path) -> list[str]:
    """Edges of a figure that something other than the page touches."""
    with Image.open(file) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    edges = {"top": pixels[0], "bottom": pixels[-1], "left": pixels[:, 0], "right": pixels[:, -1]}
    return [name for name, edge in edges.items() if np.abs(edge - pixels[0, 0]).max() > 8]


def test_no_figure_of_the_pages_is_cut_off():
    folders = [ROOT / "docs" / "figures" / name for name in ("bench", "evidence")]
    found = [file for folder in folders for file in folder.glob("*.png") if not file.stem.endswith("-dark")]
    assert len(found) > 80 and {file.name: edges for file in found if (edges := ink_at_an_edge(file))} == {}


# ---- real runs


@pytest.fixture(scope="module")
def short_policy(tmp_path_factory):
    from rl_plugins.lab.bench import policy

    folder = tmp_path_factory.mktemp("policy") / "policy"
    policy._build(folder, policy.BenchStart(steps=20, warmup_steps=2, sloppy_steps=5, batch_size=16), None)
    return folder


def test_real_runs(tmp_path, short_policy, capfd):
    """Two variants and one that fails: curves in every cost unit, the same again bit for bit, nothing made twice."""
    few = "max_steps=2,eval_steps=2,max_completion_length=4,per_device_train_batch_size=16"
    variants = [f"grpo@{few}", f"mc_grpo@{few}", f"grpo@{few},loss_type=none", f"rloo@{few}"]
    wanted = [Waiting("neutral", variant, 3) for variant in variants]
    results = run_missing(wanted, tmp_path / "a", 2, lambda _: short_policy)
    grpo, ours_, failed, rloo = (results.runs["neutral", variant, 3] for variant in variants)
    assert (
        failed.error == "ValueError: Unknown loss type: none"
        and not failed.curves
        and not grpo.error
        and not ours_.error
    )
    right = grpo.curves["eval_rewards/right/mean"]
    assert [cost["steps"] for cost, _ in right] == [0, 2]
    assert [cost["rows_trained"] for cost, _ in right] == [0, 32]
    tokens = {name: run.curves["rl_plugins/tokens_decoded"][-1][1] for name, run in (("g", grpo), ("m", ours_))}
    assert tokens["m"] > tokens["g"] > 0, "a spare rollout per prompt"
    costs = [[cost for cost, _ in run.curves["eval_rewards/right/mean"]] for run in (grpo, rloo)]
    assert [c["rows_trained"] for c in costs[0]] == [c["rows_trained"] for c in costs[1]], "TRL's RLOO, counted by us"
    first = [run.curves["reward"][0] for run in (grpo, rloo)]
    assert first[0][1] == first[1][1] and first[0][0]["tokens_decoded"] == first[1][0]["tokens_decoded"]
    again = run_missing(wanted, tmp_path / "a", 2, lambda _: pytest.fail("nothing is missing"))
    assert again.runs.keys() == results.runs.keys()
    other = run_missing(wanted[:1], tmp_path / "b", 1, lambda _: short_policy)
    values = [[v for _, v in r.runs["neutral", variants[0], 3].curves["reward"]] for r in (results, other)]
    assert values[0] == values[1]


def test_a_run_that_refuses_says_why():
    refused = ["rl-plugins: methods in effect, in this order", "rl-plugins: `minpro` needs it.", "SystemExit: 2"]
    assert runs._reason(refused) == "`minpro` needs it."
    assert runs._reason([*refused[:2], "KeyError: 'x'"]) == "KeyError: 'x'"
    assert runs._reason([refused[0], refused[2]]) == "SystemExit: 2", "what took effect is no reason"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_command_leaves_no_run_behind(how):
    """Or it would go on writing the log of the run that the next command begins anew."""
    code = """
import multiprocessing, os, time
from rl_plugins.runtime import processes

def run(variables):
    os.environ |= variables
    processes.end_with_command()
    time.sleep(100)

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(processes.environment(),))
    process.start()
    print(process.pid, flush=True)
    process.join()
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        command = subprocess.Popen([sys.executable, file.name], stdout=subprocess.PIPE, text=True)
        run = psutil.Process(int(command.stdout.readline()))
        time.sleep(2)
        assert run.is_running()
        command.send_signal(how)
        command.wait()
        assert not psutil.wait_procs([run], timeout=20)[1]


# ---- methods together


def test_stacks_grow_while_that_helps_and_are_confirmed_on_other_seeds(monkeypatch):
    """The truth is additive: vade +0.1, gdpo +0.05, mc_grpo -0.1; what has two of a kind cannot run."""
    truth = {"vade": 0.1, "gdpo": 0.05, "mc_grpo": -0.1}
    results, asked = Results(), []

    def run(wanted):
        asked.extend(wanted)
        for w in wanted:
            names = [] if w.variant.partition("@")[0] in ("grpo", "dr_grpo") else w.variant.split("+")
            noise = 0.001 * random.Random(f"{w.variant}{w.seed}").random()
            value = 0.3 + sum(truth[n] for n in names) + noise + 0.02 * (w.variant == "grpo@beta=0.04")
            results.add(made(w.task, w.variant, w.seed, [0.2, value, value]))
        return results

    found = combine.grow("neutral", ["mc_grpo", "gdpo", "vade"], run)
    assert found == ["vade", "gdpo"], "then mc_grpo would cost"
    assert {w.seed for w in asked} == {100, 101, 102, 103}
    assert combine.tuned(results, "neutral") == "grpo@beta=0.04"
    variant = "+".join(found)
    run([Waiting("neutral", a, s) for a in (variant, "grpo", "grpo@beta=0.04") for s in combine.CONFIRM])
    (told,) = combine.stacks(results)
    assert told["variant"] == variant and told["grpo"]["mean"] == pytest.approx(0.15, abs=0.002)
    assert told["tuned"]["mean"] == pytest.approx(0.13, abs=0.002) and told["tuned"]["seeds"] == 8
    assert results.seeds("neutral", variant) == [], "claims do not see the search"
    assert not combine.composes("mc_grpo+gdpo"), "two that replace the advantages"


def test_what_each_method_brought():
    results = Results()
    for variant in combine.subsets(["vade", "gdpo", "minpro"]):
        for seed in range(8):
            value = 0.3 + 0.1 * ("vade" in variant) + 0.06 * ("gdpo" in variant and "minpro" in variant)
            results.add(made("neutral", variant, seed, [0.2, value, value]))
    (found,) = combine.attributions(results)
    values = {m: v["value"] for m, v in found["methods"].items()}
    assert values == pytest.approx({"vade": 0.1, "gdpo": 0.03, "minpro": 0.03}) and found["total"] == pytest.approx(
        0.16
    )


# ---- verl


def test_a_task_in_verl_has_the_numbers_of_trl(tmp_path):
    from rl_plugins.lab.bench import verl_runs
    from rl_plugins.verl.config import compose

    task = TASKS["neutral"]
    data = verl_runs.write_data(task, tmp_path / "data")
    config = compose(verl_runs.overrides(task, data, tmp_path / "policy", tmp_path))
    trl, rollout = task.config(tmp_path, tmp_path), config.actor_rollout_ref.rollout
    assert rollout.n == trl["num_generations"] and config.actor_rollout_ref.actor.optim.lr == trl["learning_rate"]
    assert config.data.train_batch_size * rollout.n == trl["per_device_train_batch_size"]
    assert config.trainer.total_training_steps == trl["max_steps"]
    assert config.data.max_response_length == trl["max_completion_length"]
    row = pq.read_table(data / "test.parquet").to_pylist()[0]
    chain = row["reward_model"]["ground_truth"]
    right = verl_runs.compute_score("", f"={chains.solve(chain)}", chain)
    assert right["score"] == right["right"] == 1 and right["clean"] == 0
    for name in ("group=4", "agents=states", "rewards=10x"):
        assert not verl_runs.possible(TASKS[name])
    with pytest.raises(ConfigError, match=r"mc_grpo in group=4 is not made in verl"):
        verl_runs.run_verl([Waiting("group=4", "mc_grpo", 0)], tmp_path / "out", tmp_path)


@pytest.mark.parametrize(("effect", "agree"), [(0.1, True), (-0.1, False)])
def test_whether_both_hosts_agree(effect, agree):
    from rl_plugins.lab.bench.verl_runs import agreement

    (told,) = agreement(pairs(0.1, 0.03), pairs(effect, 0.03))
    assert told["agree"] is agree and told["trl"] == pytest.approx(0.1) and told["verl"] == pytest.approx(effect)
