"""What a run cannot give its methods is an error before it starts: every problem, in one message, with the way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from messages import raises

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import HOOKS, SIGNALS, Method, SameAs
from rl_plugins.runtime.preflight import (
    HostCapabilities,
    moved,
    no_redundancy,
    no_row_has,
    preflight,
    render_table,
    table,
)
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_run, start_stack


def method(name: str, *hooks: str, **members: Any) -> Method:
    functions = {h: lambda self, *args: None for h in hooks}
    return type(name.title(), (Method,), {"name": name, "fidelity": "paper", **functions, **members})()


def capabilities(**changes: Any) -> HostCapabilities:
    values: dict[str, Any] = dict(
        name="trl",
        version="1.16.0",
        hooks=tuple(HOOKS),
        missing_hooks={},
        eval_hooks=(),
        missing_signals={},
        columns=("prompt", "answer"),
        options={"beta": 0.0, "top_p": 1.0, "correct": True, "loss_type": "dapo"},
        defaults={"beta": 0.0, "top_p": 1.0, "correct": True, "loss_type": "dapo"},
    )
    return HostCapabilities(**{**values, **changes})


def check(*methods: Method, **changes: Any) -> dict[str, Any]:
    return preflight(MethodStack(list(methods)), capabilities(**changes))


def problems(*methods: Method, **changes: Any) -> list[str]:
    with raises(ConfigError) as e:
        check(*methods, **changes)
    return str(e.value).split("\n")


def named(*methods: Method, **changes: Any) -> list[str]:
    """Of every problem the methods, options and columns it names, and values of options; texts are in messages.txt."""
    return [" ".join(re.findall(r"`[^`]+`|\w[\w.]*=[\w.']*\w", text)) for text in problems(*methods, **changes)]


def test_a_stack_the_host_can_serve_passes_and_sets_nothing():
    needs = {"text", "old_logprobs", "column:answer", "engine:logprobs=10", "prompt_index"}
    assert check(method("a", "plan", "shape", needs=needs), method("b", "policy_loss")) == {}
    assert check() == {}


def test_a_hook_the_host_does_not_serve_in_this_run():
    m = method("prune", "rollout", "shape")
    hooks = [h for h in HOOKS if h != "rollout"]
    assert named(m, hooks=hooks, missing_hooks={"rollout": "vLLM is off. Set use_vllm=True."}) == [
        "`prune` `rollout` use_vllm=True"
    ]
    assert named(m, hooks=hooks) == ["`prune` `rollout`"]
    assert check(method("other", "shape"), hooks=hooks) == {}


def run_with(**changes: Any) -> dict[str, Any]:
    return {"run": make_run(host="trl", **changes), "group_option": "num_generations", "batch_rows": 8}


def test_groups_that_are_too_small():
    m = method("pairs", "shape", needs={"several_rollouts"})
    assert named(m, **run_with(group_size=1)) == ["`pairs` num_generations=1"]
    assert check(m, **run_with(group_size=2)) == {} == check(m)


def test_rows_of_rollouts_that_do_not_fit_into_the_batch():
    m = method("agents", "shape", rows_per_rollout=3)
    (text,) = problems(m, **run_with(group_size=4))
    assert text.startswith("`agents` makes up to 3 rows of a rollout, so a group of 4 rollouts needs 12 rows, and the")
    assert check(m, **run_with(group_size=2)) == {}
    assert check(method("one", "shape"), **run_with(group_size=16)) == {}, "the host's own check, not ours"


def test_what_methods_find_wrong_with_a_run_beside_all_else():
    class Wants(Method):
        name, fidelity = "wants", "paper"

        def check(self, run):
            if "other" not in run.reward_names:
                raise ConfigError("there is no reward function `other`. Give one.")

        def shape(self, rollouts, tokens):
            return None

    class Broken(Wants):
        name = "broken"

        def check(self, run):
            raise KeyError("x" * 1000)

    found = problems(Wants(), Broken(), method("pairs", "shape", needs={"several_rollouts"}), **run_with(group_size=1))
    assert found[0].startswith("`pairs` needs two or more") and len(found) == 3
    assert found[1] == "`wants`: there is no reward function `other`. Give one."
    assert found[2].startswith("`broken` failed in `check`: KeyError: 'xxx") and len(found[2]) < 300
    stack = MethodStack([Wants()])
    with raises(ConfigError, match="`wants`"):
        start_stack(Wants())
    stack.check(make_run(reward_names=("other",)))


def test_a_hook_in_evaluation():
    m = method("m", "rewards", in_eval=("rewards",))
    assert named(m) == ["`m` `rewards`"]
    assert check(m, eval_hooks=("rewards",)) == {}


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal_the_run_lacks_is_explained(signal):
    m = method("m", needs={signal})
    assert problems(m, missing_signals={signal: "there is none. Set x=1."}) == [
        f"`m` needs {SIGNALS[signal]}: there is none. Set x=1."
    ]
    assert check(m, missing_signals={s: "no" for s in SIGNALS if s != signal}) == {}


def test_engine_signals_are_missing_by_kind_or_one_by_one():
    m = method("m", needs={"engine:logprobs=10"})
    for missing in ({"engine": "no engine."}, {"engine:logprobs=10": "no engine."}):
        assert named(m, missing_signals=missing) == ["`m` `engine:logprobs=10`"]
    assert check(m, missing_signals={"engine:logprobs=20": "no engine."}) == {}


OF_ROWS = {  # what they keep or read belongs to dataset rows -> parameters without which there is no instance
    "best_perm": {"templates": ["{prompt}"]},
    "difficulty_slices": {},
    "dots": {"embeddings": "no such file"},
    "drive": {},
    "gdro_prompt": {},
    "gdro_rollout": {},
    "linear_ts": {"column": "answer"},
    "mssr_baseline": {},
    "mssr_prompts": {},
    "ps_grpo": {},
    "v0": {"prior": "beta"},
    "v0_5": {},
    "vade": {},
    "xrpo_seeds": {},
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_stream_is_refused_before_any_method_starts(name, monkeypatch):
    """So no method asks again in `start` whether the dataset is a stream."""
    stack = build_stack([name], {name: OF_ROWS[name]})
    (m,) = stack.methods
    monkeypatch.setattr(m, "start", lambda run: pytest.fail("it was started"))
    stream = run_with(group_size=8, dataset=None, dataset_size=None)
    missing = {"prompt_index": "the dataset is a stream."}
    columns = ("prompt", "answer", "paraphrase_set_id")
    assert problems(m, columns=columns, missing_signals=missing, **stream) == [
        f"`{name}` needs {SIGNALS['prompt_index']}: the dataset is a stream."
    ]


def test_a_column_the_dataset_lacks_and_columns_that_are_not_known():
    m = method("m", needs={"column:solution"})
    assert named(m) == ["`m` `column:solution` `solution`"]
    assert check(m, columns=None) == {} and check(m, columns=["solution"]) == {}


@pytest.mark.parametrize(
    ("name", "makers"),
    [
        ("adhint_advantages", ["adhint_rollouts"]),
        ("branch_advantages", ["branch_rollout", "branch_text_rollout"]),
        ("m_grpo", ["m_grpo_rollout"]),
        ("ps_grpo", []),
    ],
)
def test_a_column_that_rollouts_of_another_method_have_is_asked_of_that_method(name, makers):
    stack = build_stack([name], {})
    with raises(ConfigError) as e:
        preflight(stack, capabilities())
    text = next(line for line in str(e.value).split("\n") if "has no column" in line)
    assert [m for m in makers if f"`{m}`" in text] == makers and ("Add it" in text) == (not makers)


def test_a_column_that_a_method_brings_is_no_need_of_the_dataset():
    reads = method("reads", needs={"column:note", "column:other"})
    brings = method("brings", brings={"column:note"})
    (problem,) = problems(reads, brings)
    assert problem.startswith("`reads` needs `column:other`: the dataset has no column `other`")


def test_what_closes_redundant_rollouts():
    alone, asks = method("alone", "rollout", brings={"redundancy"}), method("asks", "plan", needs={"redundancy"})
    assert check(alone, asks, missing_signals={"redundancy": "nothing closes them."}) == {}
    assert no_redundancy(MethodStack([]), "all wait.") == "without a rollout program all wait."
    assert no_redundancy(MethodStack([method("tree", "rollout")]), "all wait.") == (
        "`tree` makes the rollouts and does not say that each is alone, so none of them can be closed. Remove one of "
        "the two. If `tree` is yours, make its rollouts with rl_plugins.core.redundancy.independent and set "
        '`brings = {"redundancy"}`.'
    )


@pytest.mark.parametrize("signal", ["entropy", "text:raw", "columns:answer", ""])
def test_a_signal_that_does_not_exist(signal):
    (problem,) = problems(method("m", needs={signal}))
    assert problem.startswith(f"`m` needs `{signal}`: there is no such signal; known: tokens, ")
    assert problem.endswith("column:NAME, engine:logprobs=N.")


def wants(name: str, **options: Any) -> Method:
    return method(name, "shape", host_options={"trl": options, "verl": {"never": 1}})


def test_an_option_left_at_the_default_is_set():
    assert check(wants("m", correct=False, beta=0.1)) == {"correct": False, "beta": 0.1}
    assert check(wants("m", correct=True)) == {}  # it is already
    assert check(wants("m", correct=False), name="verl", options={"never": 0}, defaults={"never": 0}) == {"never": 1}


def test_an_option_the_user_set_is_never_overridden():
    options = {"correct": True, "beta": 0.2}
    defaults = {"correct": True, "beta": 0.0}
    assert named(wants("m", beta=0.1), options=options, defaults=defaults) == ["`m` beta=0.1 beta=0.2"]
    assert check(wants("m", beta=0.2), options=options, defaults=defaults) == {}


def test_two_methods_that_want_different_values_are_refused_in_every_order():
    for first, second in ((0.1, 0.2), (0.2, 0.1), (0.0, 0.1), (0.1, 0.0)):  # 0.0 is the default
        assert named(wants("a", beta=first), wants("b", beta=second)) == [f"`b` beta={second} `a` beta={first}"]
    assert check(wants("a", beta=0.1), wants("b", beta=0.1)) == {"beta": 0.1}
    assert check(wants("a", beta=0.1), wants("b", top_p=0.9)) == {"beta": 0.1, "top_p": 0.9}


def test_an_option_that_is_the_same_as_another():
    capabilities = dict(
        options={"mini": 256, "batch": 24, "beta": 0.5}, defaults={"mini": 256, "batch": 1024, "beta": 0.5}
    )
    assert check(wants("m", mini=SameAs("batch")), **capabilities) == {"mini": 24}
    assert (
        check(wants("m", mini=SameAs("batch")), **{**capabilities, "options": {**capabilities["options"], "mini": 24}})
        == {}
    )
    assert named(
        wants("m", mini=SameAs("batch")), **{**capabilities, "options": {**capabilities["options"], "mini": 7}}
    ) == ["`m` mini=24 mini=7"]
    assert check(wants("a", mini=SameAs("batch")), wants("b", mini=24), **capabilities) == {"mini": 24}
    two = wants("a", mini=SameAs("batch")), wants("b", mini=SameAs("beta"))
    assert named(*two, **capabilities) == ["`b` mini=0.5 `a` mini=24"]
    assert named(wants("m", mini=SameAs("size")), **capabilities) == ["`m` mini=the"]


def test_an_option_the_host_does_not_have():
    assert named(wants("m", betta=0.1)) == ["`m` betta=0.1"]


def test_all_problems_of_all_methods_come_at_once():
    one = method("one", "rollout", "shape", needs={"text", "column:x", "nonsense"}, in_eval=("shape",))
    two = method("two", "admit", host_options={"trl": {"beta": 1.0}})
    found = problems(
        one,
        two,
        hooks=("shape",),
        missing_signals={"text": "no tokenizer."},
        options={"beta": 0.5},
        defaults={"beta": 0.0},
    )
    starts = [
        "`one` changes `rollout`",
        "`one` acts with `shape` in evaluation",
        "`one` needs `column:x`",
        "`one` needs `nonsense`",
        "`one` needs completions as text, special tokens removed: no tokenizer.",
        "`two` changes `admit`",
        "`two` sets beta=1.0",
    ]
    assert len(found) == len(starts)
    assert all(f.startswith(s) for f, s in zip(found, starts, strict=True))


def test_the_printed_table_shows_what_is_in_effect():
    stack = build_stack(["vade", "mc_grpo"], {"mc_grpo": {"mad_eps": 0.01}})
    rows = table(stack)
    assert [(r[0], r[1]) for r in rows] == [("vade", "select_prompts, observe"), ("mc_grpo", "plan, advantages, shape")]
    assert "mad_eps=0.01" in rows[1][2] and "scale=mad" in rows[1][2] and rows[1][3] == "code"
    text = render_table(stack, {"beta": 0.1, "correct": False})
    lines = text.split("\n")
    assert lines[0] == "rl-plugins: methods in effect, in this order"
    assert lines[1].split() == ["method", "hooks", "parameters", "fidelity"]
    assert lines[2].strip().startswith("vade ") and lines[3].strip().startswith("mc_grpo ")
    assert lines[1].index("hooks") == lines[2].index("select_prompts") == lines[3].index("plan")
    assert lines[4] == "  host options set: beta=0.1, correct=False"
    assert len(render_table(stack, {}).split("\n")) == 4
    assert table(MethodStack([method("m", "shape")])) == [("m", "shape", "-", "paper")]


# ---- what mutants showed was not asked

WHY = (
    "`forces` puts tokens into rollouts that were not sampled in their place, so no sampling probability of them "
    "exists, and a weight made of one would be wrong"
)


def test_tokens_that_nobody_sampled_are_not_weighted_by_a_probability():
    forces = method("forces", "rollout", brings={"forced_tokens"})
    weighs = [method(name, "shape", needs={"rollout_logprobs", "text"}) for name in ("weighs", "too")]
    assert named(weighs[0], forces, weighs[1]) == ["`forces` `weighs`", "`forces` `too`"]
    assert named(forces, importance_weights={"correct": True}) == ["`forces` correct=True `forces`"]
    assert check(forces, method("other", "shape", needs={"text"})) == {}
    assert check(*weighs, importance_weights={"correct": True}) == {}


def test_rows_may_bring_a_column_the_dataset_lacks():
    assert check(method("m", needs={"column:solution"}), row_columns=True) == {}
    error = no_row_has("solution", ["a", "b"])
    assert isinstance(error, MethodError) and str(error) == (
        "`a`, `b` needs the column `solution`, and neither the dataset nor a row of this batch has it. Let the "
        "dataset, the rollout program (`trajectory.noted(solution=..)`) or the agent loop give it."
    )


def test_a_signal_is_missing_by_its_own_name_before_its_kind():
    m = method("m", needs={"engine:logprobs=10"})
    assert named(m, missing_signals={"engine": "no engine.", "engine:logprobs=10": "only 5."}) == [
        "`m` `engine:logprobs=10`"
    ]


def test_the_table_shows_bundles_and_all_parameters_in_columns():
    stack = MethodStack([method("first", "shape", "plan"), build_stack(["vade"]).methods[0]], bundle_of={"first": "b"})
    (name, hooks, params, fidelity), (other, _, more, _) = table(stack)
    assert (name, hooks, params, fidelity) == ("first (b)", "plan, shape", "-", "paper") and other == "vade"
    assert more.count("=") == more.count(", ") + 1 > 1
    lines = render_table(stack, {}).split("\n")
    assert lines[2].startswith("  first (b)  plan, shape              -  ") and lines[2].endswith("  paper")
    assert all(line == line.rstrip() for line in lines)


def test_what_moved_in_a_host_is_named():
    class Trainer:
        def step(self, batch, rank): ...

        def log(self, logs, start_time=None): ...

    assert moved(Trainer, {"step": ("batch", "rank"), "log": ("logs",)}) == []
    assert moved(Trainer, {"gone": ("x",), "step": ("batch", "model"), "log": ("logs", "start_time", "more")}) == [
        "Trainer.gone is gone",
        "Trainer.step(batch, rank) used to be (batch, model)",
        "Trainer.log(logs, start_time) used to be (logs, start_time, more)",
    ]


def test_a_column_may_have_a_colon_in_its_name():
    m = method("m", needs={"column:a:b"})
    assert check(m, columns=("a:b",)) == {}
    (problem,) = problems(m, columns=("b",))
    assert problem.startswith("`m` needs `column:a:b`: the dataset has no column `a:b` ")


def test_the_weight_of_the_sampling_policy_counts_once():
    holds = [method(name, "policy_loss" if name == "a" else "shape", corrects_sampling=True) for name in "ab"]
    assert named(*holds) == ["`a` `b`"]
    assert named(holds[0], importance_weights={"is": "token"}) == ["`a` is=token"]
    assert check(holds[0], sampling_probabilities={"rs": "token"}, rollout_as_old="bypass=True") == {}
    sets = method("sets", "shape", corrects_sampling=True)
    sets.host_options = {"trl": {"is": False}}
    on = dict(importance_weights={"is": True}, options={"is": True}, defaults={"is": True})
    assert check(sets, **on) == {"is": False}  # it is off when the run starts


def test_old_log_probs_of_a_policy_of_their_own():
    proximal = method("p", "policy_loss", old_policy="proximal")
    assert named(proximal, rollout_as_old="bypass=True") == ["`p` bypass=True `p`"]
    assert check(proximal) == {}


def test_groups_begun_before_make_updates_off_policy():
    needs = method("needs", "policy_loss", needs={"off_policy"})
    missing = {"off_policy": "nothing to correct."}
    assert "nothing to correct" in problems(needs, missing_signals=missing)[0]
    assert check(needs, method("replay", "plan", brings={"off_policy"}), missing_signals=missing) == {}
    assert check(needs, method("carry", "admit"), missing_signals=missing) == {}
