"""`rl-plugins suggest` on described runs: what it finds, what it proposes, and what it says it cannot tell."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_plugins.cards import problems
from rl_plugins.cards.catalog import Card, cards
from rl_plugins.cards.problems import ANSWERS, HOSTS, PROBLEMS, said
from rl_plugins.cards.usage import usage_of
from rl_plugins.commands import suggest
from rl_plugins.commands.cli import app
from rl_plugins.commands.suggest import advice, search, shown
from rl_plugins.commands.suggest.symptoms import Sign
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.pages.methods import slug
from rl_plugins.runtime.stack import build_stack

FIRST, NEAREST = 0.74, 0.9  # of the exam: 62 and 76 of 83
SAID = Path(problems.__file__).with_name("said.toml")
CARDS = {card.name: card for card in cards()}


def answer(*arguments: str, status: int = 0, given: str | None = None) -> str:
    result = CliRunner().invoke(app, ["suggest", *arguments], input=given)
    assert result.exit_code == status, (result.output, result.exception)
    return result.stderr if status == 2 else result.stdout


def trl_log(folder, **series):
    """A trainer_state.json of twenty steps; a pair is the value of the first and the last step."""
    usual = {
        "frac_reward_zero_std": 0.1,
        "completions/mean_length": 200,
        "completions/max_length": 500,
        "completions/clipped_ratio": 0.01,
        "rewards/correct/std": 0.5,
        "entropy": (0.6, 0.5),
        "clip_ratio/region_mean": 0.0,
        "epoch": (0.1, 1),
        **series,
    }
    rows = []
    for step in range(20):
        row = {"step": step}
        for name, value in usual.items():
            first, last = value if isinstance(value, tuple) else (value, value)
            row[name] = first + (last - first) * step / 19
        rows.append(row)
    (folder / "checkpoint-20").mkdir(parents=True)
    (folder / "checkpoint-20" / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


def verl_log(folder, **series):
    usual = {"actor/entropy": 0.5, "response_length/mean": 300, "response_length/max": 700, "critic/score/mean": 0.4}
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(json.dumps({"step": i, "data": {**usual, **series}}) for i in range(12)))
    return file


RUNS = [
    # six sentences
    ("half of my groups have equal rewards, all right or all wrong", None, "no_signal", {"vade", "dots"}),
    ("GPUs wait for stragglers, a few very long completions", None, "long_tail", {"april", "arrol"}),
    ("an agent with tool calls over many turns and one reward at the end", None, "agents", {"gigpo", "hgpo"}),
    ("I have no verifier, only a judge that compares two answers", None, "no_verifier", {"brpo"}),
    ("right answers with flawed reasoning and lucky guesses", None, "weak_reward", {"fapo"}),
    ("asynchronous training, rollouts are stale by several updates", None, "stale", {"decoupled_ppo", "vcpo"}),
    # five logs
    (trl_log, {"frac_reward_zero_std": 0.7}, "no_signal", {"vade", "dots"}),
    (trl_log, {"rewards/points/std": 40, "rewards/format/std": 0.4}, "several_rewards", {"gdpo"}),
    (trl_log, {"entropy": (0.9, 0.05)}, "exploration", {"mssr_shaping", "xrpo_novelty"}),
    (verl_log, {"response_length/max": 4000}, "long_tail", {"april"}),
    (verl_log, {"training/off_policy/trajectory_staleness/mean": 4}, "stale", {"decoupled_ppo", "minpro"}),
]


@pytest.mark.parametrize(("run", "values", "problem", "methods"), RUNS, ids=[f"{i}-{r[2]}" for i, r in enumerate(RUNS)])
def test_a_described_run(run, values, problem, methods, tmp_path):
    asked = (
        ["--for", run]
        if values is None
        else ["--logs", str(run(tmp_path / "run" if run is trl_log else tmp_path, **values))]
    )
    found = json.loads(answer(*asked, "--json"))
    assert found["problems"][0]["problem"] == problem
    answers = found["problems"][0]["answers"]
    assert methods <= set(answers)
    if values is not None:
        assert [p["problem"] for p in found["problems"]] == [problem]  # and nothing else
        assert found["host"] == ("verl" if run is verl_log else "trl")
    promise = [CARDS[name].promise for name in answers if name in CARDS]
    assert promise == sorted(promise)
    others = sorted(answers.index(a.name) for a in ANSWERS if a.name in answers)
    assert others in ([], [*range(promise.count(0), promise.count(0) + len(others))])  # after what helped


def test_logs_are_shown_with_numbers_thresholds_and_what_they_do_not_tell(tmp_path):
    text = answer("--logs", str(trl_log(tmp_path / "run", frac_reward_zero_std=0.7)))
    assert "share of groups of equal rewards (`frac_reward_zero_std`): 0.7 (a problem from 0.3)" in text
    assert "longest over mean completion (`completions/max_length`): 2.5 (a problem from 4)" in text
    assert Sign("exploration", "entropy", 0.6, 0.5, below=True).text == "entropy: 0.6 (a problem up to 0.5)"
    file = tmp_path / "run" / "checkpoint-20" / "trainer_state.json"
    assert text.startswith(f"Read {file}: 20 logged steps of trl. The thresholds below are rules of thumb.")
    told = text[text.index("Could not be told") :]
    assert re.search("^  - .*No verifiable reward.*: no log shows it", told, re.M)
    assert "Forgetting: the logs lack `kl`" in told
    assert "Groups without signal" not in told


def test_a_run_of_one_turn_gets_no_method_for_agents_and_is_told_the_option_of_the_host(tmp_path):
    logs = trl_log(tmp_path / "run", **{"completions/clipped_ratio": 0.75, "num_turns/mean": 2.0})
    found = json.loads(answer("--logs", str(logs), "--json"))["problems"]
    assert [p["problem"] for p in found] == ["length"] and "max_completion_length" in found[0]["evidence"][0]
    names = set(found[0]["answers"]) & set(CARDS)
    assert names and not any("agents" in CARDS[name].problems for name in names)
    everybody = json.loads(answer("--for", "the length of completions", "--json"))["problems"][0]["answers"]
    assert any("agents" in CARDS[name].problems for name in everybody if name in CARDS)


def test_a_reward_that_never_varied_is_named(tmp_path):
    logs = trl_log(tmp_path / "run", **{"rewards/format/std": 0.0})
    told = json.loads(answer("--logs", str(logs), "--json"))["not_told"]["several_rewards"]
    assert "`rewards/format/std` is 0" in told and "correct" not in told


def test_a_problem_that_is_said_and_seen_is_listed_once(tmp_path):
    logs = str(trl_log(tmp_path / "run", frac_reward_zero_std=0.7, entropy=(0.9, 0.05)))
    found = json.loads(answer("--logs", logs, "--for", "half of my groups have equal rewards", "--json"))
    assert [p["problem"] for p in found["problems"]] == ["no_signal", "exploration"]
    said, seen = found["problems"][0]["evidence"]
    assert said.startswith("you say: ") and "0.7 (a problem from 0.3)" in seen
    assert found["logs"]["steps"] == 20


@pytest.mark.parametrize(
    ("weights", "ratio", "how"),
    [
        ({"points": 1, "format": 1, "watched": 0}, 100, "with their weights"),
        ({"points": 0.01, "format": 1, "watched": 0}, 1, "with their weights"),
        ({"points": 0, "format": 1, "watched": 0}, None, None),  # one that is trained
        ({"points": 1, "format": 1, "watched": None}, 1000, "before weights"),  # the sum is of something else, too
    ],
)
def test_rewards_are_compared_as_they_are_trained(tmp_path, weights, ratio, how):
    """TRL logs the weighted sum, so its logs tell the weights; a function of weight 0 is watched, not trained."""
    means = {name: (0.1 * k, 0.5 + k * k) for k, name in enumerate(weights)}
    stds = {f"rewards/{name}/std": s for name, s in zip(weights, (40, 0.4, 0.04), strict=True)}
    rows, folder = 20, trl_log(tmp_path / "run", **stds, **{"rewards/correct/std": 0.0})
    file = folder / "checkpoint-20" / "trainer_state.json"
    state = json.loads(file.read_text())
    for step, row in enumerate(state["log_history"]):
        row |= {
            f"rewards/{n}/mean": a + (b - a) * (step / rows) ** (k + 1) for k, (n, (a, b)) in enumerate(means.items())
        }
        row["reward"] = sum(row[f"rewards/{n}/mean"] * (step if w is None else w) for n, w in weights.items())
    file.write_text(json.dumps(state))
    text = answer("--logs", str(file))
    assert (f"`, {how}: {ratio:.3g} (a problem from 3)" in text) if ratio else ("over that of" not in text)


def test_every_line_to_copy_builds(tmp_path):
    for host in ("trl", "verl"):
        for key in PROBLEMS:
            for one in advice.suggestion(key, (), advice.Asked(host)).found:
                if not isinstance(one, Card):
                    assert one.use[host]
                    continue
                assert host in one.hosts
                usage = usage_of(one.found, paper=False)
                assert build_stack(list(usage.methods), usage.params).names
    found = json.loads(answer("--for", "credit assignment", "--host", "verl", "--json"))
    assert all("rl_plugins.methods=[" in a["use"]["verl"] for a in found["answers"] if a["kind"] == "method")


def test_questions_in_a_terminal(monkeypatch):
    monkeypatch.setattr(suggest, "in_terminal", lambda: True)
    text = answer(given="99\n5\nverl\n")
    assert "Numbers go from 1 to" in text and "gdpo, method" in text and '"+rl_plugins.methods=[gdpo]"' in text


def test_what_cannot_be_answered(tmp_path):
    assert "Say what you see" in answer(status=2)
    assert "names no problem that is known" in answer("--for", "my cat is on the keyboard", status=2)
    assert "does not exist" in answer("--logs", str(tmp_path / "none"), status=2)
    assert "has no logs of a run" in answer("--logs", str(tmp_path), status=2)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert "holds no list of logged steps" in answer("--logs", str(tmp_path), status=2)
    (tmp_path / "trainer_state.json").write_text("no json")
    assert "cannot be read as JSON" in answer("--logs", str(tmp_path), status=2)


@pytest.mark.parametrize(
    ("sentence", "problem"),
    [
        ("one long completion holds up the whole batch", "long_tail"),
        ("I have only 60 prompts", "few_prompts"),
        ("the length penalty dwarfs accuracy", "several_rewards"),
        ("the gradient is zero in most groups", "no_signal"),
    ],
)
def test_everyday_words(sentence, problem):
    found = json.loads(answer("--for", sentence, "--json"))
    assert problem in [p["problem"] for p in found["problems"]][:2]


def test_what_did_harm_is_told_apart_and_nothing_is_told_twice():
    text = answer(
        "--for", "half of my groups are all wrong, none of their rollouts is ever right, groups without signal"
    )
    assert text.count("\n  vade, method") == 1
    skip = {name for line in text.splitlines() if line.startswith("  Skip:") for name in re.findall(r"\w+", line)}
    shown = {line.split(",")[0].strip() for line in text.splitlines() if ", method (" in line}
    assert text.count("\n  dynamic_sampling, method") <= 1
    assert {"arrol", "brorl"} <= skip and not shown & {c.name for c in cards() if c.standing.word == "skip"}


@pytest.mark.parametrize(
    ("sentence", "first"), [("groups of equal rewards", "vade"), ("KL explodes", "beta"), ("gpdo", "gdpo")]
)
def test_a_sentence_is_answered_in_few_words_and_each_answer_once(sentence, first):
    text = answer("--for", sentence)
    named = re.findall(r"^  (\w+), (?:method|option|tool)", text, re.M)
    assert named[0] == first and len(named) == len(set(named))
    assert len(text.split()) <= 250
    for anchor in re.findall(r"docs/choose\.md#(\S+)", text):
        assert anchor in {slug(problem.title) for problem in PROBLEMS.values()}


def test_groups_that_dynamic_sampling_left_out_count(tmp_path):
    """What it trains has signal in every group, so the host's share is 0 whatever was generated."""
    logs = trl_log(tmp_path / "run", **{"frac_reward_zero_std": 0.0, "dynamic_sampling/signal": 0.4})
    assert json.loads(answer("--logs", str(logs), "--json"))["problems"][0]["problem"] == "no_signal"


def test_a_short_log_is_not_called_healthy(tmp_path):
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.1, "epoch": 0.1}]}))
    assert "too short" in answer("--logs", str(file)) and "none of the known" not in answer("--logs", str(file))


def test_what_needs_nothing_comes_first():
    """Of methods made for a problem and measured alike, those without parameters that must be given."""
    names = json.loads(answer("--for", "zero variance", "--json"))["problems"][0]["answers"]
    assert names.index("vade") < names.index("dots")


def test_a_sentence_that_says_nothing_is_asked_again(monkeypatch):
    monkeypatch.setattr(suggest, "in_terminal", lambda: True)
    text = answer("--host", "trl", given="qwerty zxcvb\nhalf of my groups have equal rewards\n")
    assert "Groups without signal" in text and "vade" in text


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    file = verl_log(tmp_path, **{"response_length/max": 4000})
    with file.open("a") as f:
        f.write('\n{"step": 12, "data": {"actor/ent')
    assert json.loads(answer("--logs", str(file), "--json"))["problems"][0]["problem"] == "long_tail"


# ---- sentences


def test_words_of_other_kinds():
    """Names of logs, of the field and of options; the answer may be a method, an option, a command, a page, or none."""
    asked = {
        "frac_reward_zero_std is 0.9": "vade",
        "KL explodes": "beta",
        "Dr. GRPO": "loss_type_dr_grpo",
        "GSPO": "importance_sampling_level",
        "reward hacking": "audit",
        "gpdo": "gdpo",
        "write an environment": "environment_guide",
        "CUDA out of memory": "memory",
    }
    for sentence, name in asked.items():
        found = json.loads(answer("--for", sentence, "--json"))
        assert found["answers"][0]["name"] == name, sentence
        assert 1 <= len(found["nearest"]) <= advice.NEAREST and found["nearest"][0]["score"] > 0


def names_of(one: dict) -> set[str]:
    """What an answer is, as the keys of the phrases write it."""
    if one["kind"] in ("tool", "page"):
        return {f"tool:{one['name']}", f"page:{one['use']['trl']}"}
    if one["kind"] in ("method", "elsewhere"):
        return {one["name"] if one["kind"] == "method" else "none"}
    named = set()
    for host, line in one["use"].items():
        named |= {f"{host}:{name}" for name in re.findall(r"\w+Trainer|\w+_punishment", line)}  # of a line of Python
        option, value = re.match(r"\+?([\w.]+)(?:(?:=|: )([\w.-]*))?", line).groups()
        parts = option.split(".")
        ends = {".".join(parts[i:]) for i in range(len(parts))}
        named |= {f"{host}:{end}" for end in ends | set(parts)} | {f"{host}:{end}={value}" for end in ends}
    return named


def nearest_names(says: str) -> list[set[str]]:
    """Names of the first answer, then of the others that are shown as nearest."""
    try:
        found = advice.from_text(says, advice.Asked(None))
    except ConfigError:
        return [{"none"}]
    of_problems = [{f"problem:{hit.name}"} for hit in found.nearest if hit.kind == "problem"]
    answers = [replace(found, suggestions=(), nearest=(hit,)) for hit in found.nearest if hit.kind != "problem"]
    named = [one for of in (found, *answers) for one in shown.plain(of)["answers"][:1]]
    return [*map(names_of, named), *of_problems]


def test_phrases_that_the_search_has_not_seen():
    """An exam: phrases with all answers that are right, committed before the search was tuned. Those of threads that
    the search has phrases of, too, do not count."""
    known = {s["thread"] for s in tomllib.loads(SAID.read_text())["said"]}
    exam = tomllib.loads((Path(__file__).parent / "phrases_exam.toml").read_text())["phrase"]
    phrases = [p for p in exam if p["thread"] not in known]
    assert len(phrases) > 80
    right = [[bool(names & set(p["key"])) for names in nearest_names(p["says"])] for p in phrases]
    first = sum(r[0] for r in right) / len(phrases)
    nearest = sum(any(r) for r in right) / len(phrases)
    assert (first, nearest) >= (FIRST, NEAREST), (first, nearest)


@pytest.mark.parametrize("hosts", [(), ("--host", "verl")])
def test_all_answers_in_a_line_each(hosts):
    lines = answer("--answers", *hosts).splitlines()
    begins = [line.partition(":")[0].split() for line in lines]
    assert len(lines) == len({tuple(b) for b in begins})
    assert {b[1] for b in begins if b[0] == "method"} == {c.name for c in cards() if set(c.hosts) & set(hosts or HOSTS)}
    assert {b[1] for b in begins if b[0] == "problem"} == set(PROBLEMS)
    config = next(line for line in lines if line.startswith("option loss_type_dr_grpo:"))
    assert ("seq-mean-token-sum-norm" in config, "loss_type: dr_grpo" in config) == (True, not hosts)


def test_what_users_said_is_found():
    known = {f"{kind}:{name}".removeprefix("method:") for kind, name, *_ in search._things(set(HOSTS))}
    found = 0
    for text, names in said():
        assert set(names) <= known, text
        hit = search.search(text, None)[0]
        found += f"{hit.kind}:{hit.name}".removeprefix("method:") in names
    assert found / len(said()) > 0.9


def shown_of(*arguments: str) -> list[str]:
    return re.findall(r"^  (\w+), (?:method|option|tool|page)", answer(*arguments), re.M)


def test_what_is_cut_off_may_be_left_out_of_the_loss():
    for sentence in ("cut off", "the length of completions", "answers get too long"):
        assert "mask_truncated_completions" in shown_of("--for", sentence), sentence


def test_old_rollouts_are_bounded_then_clipped_then_weighted():
    """The order of docs/staleness.md."""
    page = (Path(__file__).parents[1] / "docs" / "staleness.md").read_text().partition("in this order:")[2]
    keys = ["max_off_policy_threshold", "bypass_mode", "rollout_is"]
    assert sorted(keys, key=page.index) == keys
    named = shown_of("--for", "stale rollouts", "--host", "verl")
    assert named[:3] == ["max_staleness", "bypass_mode", "vllm_importance_sampling_correction"]
    lines = [one.use["verl"] for name in named[:3] for one in ANSWERS if one.name == name]
    assert all(key in line for key, line in zip(keys, lines, strict=True))


def test_who_did_not_name_a_host_is_told_how():
    ends = {arguments: answer("--for", *arguments).splitlines()[-1] for arguments in (("length",), ("length in verl",))}
    assert ["--host verl" in end for end in ends.values()] == [True, False]
    assert "--host verl" not in answer("--for", "length", "--host", "trl")


# ---- with the config of the run


def test_what_a_run_lacks_is_named_and_comes_later(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("num_iterations: 2\nmethod_params: {dots: {embeddings: e.safetensors}}\n")
    found = {a["name"]: a for a in json.loads(answer(str(config), "--for", "zero variance", "--json"))["answers"]}
    assert found["dots"]["lacks"] == {} and found["mssr_baseline"]["lacks"] == {"beta": 0.04}
    names = list(found)
    assert names.index("v0_5") < names.index("mssr_baseline")  # which came first without a config
    assert "lacks:" in answer(str(config), "--for", "zero variance")
    old = json.loads(answer(str(config), "--for", "stale rollouts", "--json"))["answers"]
    assert not next(a for a in old if a["name"] == "vcpo")["lacks"]
    config.write_text("num_iterations: 1\n")
    old = json.loads(answer(str(config), "--for", "stale rollouts", "--json"))["answers"]
    assert next(a for a in old if a["name"] == "vcpo")["lacks"] == {"num_iterations": 2}
    config.write_text("max_staleness: 4\n")  # of TRL's asynchronous trainer, whose rollouts are old anyway
    old = json.loads(answer(str(config), "--for", "stale rollouts", "--json"))["answers"]
    assert next(a for a in old if a["name"] == "vcpo")["lacks"] == {}
    equal = json.loads(answer(str(config), "--for", "equal rewards", "--json"))["answers"]
    assert next(a for a in equal if a["name"] == "vade")["lacks"] == {"trainer": "GRPOTrainer"}


# ---- whether to use a method


def test_only_runs_and_worlds_of_a_method_alone_count_for_it():
    """All three parts of ADHint act in the variant that makes more progress; no variant has one of them alone."""
    assert CARDS["adhint"].standing.word == "use if"
    assert {CARDS[part].standing.word for part in CARDS["adhint"].parts} == {"unknown"}
    assert [c.name for c in cards() if c.promise == 0] == ["linear_ts", "vade"]
