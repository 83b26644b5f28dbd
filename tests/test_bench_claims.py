"""The claims of papers that `rl-plugins bench` decides: every paper has one, and what they name exists."""

from __future__ import annotations

import random

import pytest

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench import chains, paraphrases
from rl_plugins.lab.bench.claims import claims
from rl_plugins.lab.bench.tasks import TASKS
from rl_plugins.lab.bench.variants import BenchVariant
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file


def papers() -> dict[str, str]:
    """Method or bundle -> arXiv id of its paper, for all that the package brings."""
    return {name: card_file(name).paper.arxiv for name in registry.all_names()}


def test_every_paper_has_a_claim_or_a_reason_why_none_is_tested():
    of = papers()
    claimed = {of[claim.method] for claim in claims()}
    missing = [name for name, paper in of.items() if paper not in claimed and not card_file(name).asked_for]
    assert missing == []


@pytest.mark.parametrize("claim", claims(), ids=lambda c: f"{c.label}-{c.task or 'untested'}-{c.metric}-{c.budget}")
def test_a_claim_names_what_exists(claim):
    assert claim.method in papers() and len(claim.says.split()) > 5
    if claim.task:
        task = TASKS[claim.task]
        variant, than = BenchVariant.of(claim.label), BenchVariant.of(claim.than)
        assert variant != than
        scores = {"score"} if task.environment else {"right", "clean", "tidy", "steps", "solved", "length"}
        watched = {"no_signal", "entropy", "tokens", "rows", "solved_8"} | (
            {"agree"} if "agree" in task.rewards else set()
        )
        assert claim.metric in scores | watched
        if claim.control:
            control, place = claim.control_place
            assert (BenchVariant.of(control), place) not in ((variant, claim.task), (than, claim.task))


def test_claims_differ():
    told = [(c.label, c.task, c.metric, c.budget, c.than) for c in claims() if c.task]
    assert len(set(told)) == len(told)


def test_parameters_belong_to_methods_that_exist():
    for name in registry.all_names():
        if given := card_file(name).bench.get("params"):
            registry.select([name], {name: given})


def test_parameters_of_one_variant():
    variant = BenchVariant.of("drpo@drpo.reward=right,beta=0.04")
    assert variant.params == {"drpo": {"reward": "right"}} and variant.options == {"beta": 0.04}
    assert BenchVariant.of("dars@dars.n_max=16").params == {"dars": {**card_file("dars").bench["params"], "n_max": 16}}
    with pytest.raises(ConfigError, match="'dars' has parameters"):
        BenchVariant.of("drpo@dars.n_max=16")


@pytest.mark.parametrize("mode", ["", "f", "l"])
def test_a_reference_is_right_and_clean(mode):
    rng = random.Random(0)
    for _ in range(50):
        prompt = chains.random_prompt(chains.Mix((1, 3, 9), unsolvable=0.3, mode=mode), rng)
        text = chains.reference(prompt)
        assert chains.clean(None, [text], chain=[prompt]) == [1]
        assert chains.first_flaw(prompt, chains.solve(prompt), text) == -1


def test_judges_of_chains():
    assert [chains.first_flaw("7+5*3", "6", t) for t in ("26=6", "2?6=6!", "=6", "2=6", "36=6", "25=6")] == [
        *(-1, -1),
        *(0, 1, 0, 1),
    ]
    assert chains.compare("7+5*3", "26=6", "21=1!") == (1.0, pytest.approx(0.55))
    assert chains.graded(None, ["26=6!", "x"], chain=["7+5*3"] * 2) == [pytest.approx(1.3), 0]
    assert [chains.answer_of(t) for t in ("26=6!", "26=", "=6?")] == ["6", None, None]
    assert chains.short(None, ["", "x" * 16, "x" * 40], chain=["1+1"] * 3) == [1, 0.5, 0]


def test_embeddings_tell_steps_and_task():
    rows = {"task": ["solvable", "unsolvable"], "level": [1, 9]}
    (a, b) = chains.embeddings(rows)
    assert (a[0], b[8], b[9], sum(a), sum(b)) == (6, 6, 6, 6, 12)


def test_the_penalty_counts_superfluous_marks():
    rollouts = type("Rollouts", (), {"text": ["26=6", "2?6=6!", "??"]})
    assert chains.superfluous(rollouts).tolist() == [0, 2, 2]


def test_wordings_have_the_same_steps_and_come_in_whole_sets():
    mix = chains.Mix(mode="w")
    train, held_out = (paraphrases.build_rows(mix, 40, 0, split) for split in ("train", "held_out"))
    for i in range(0, 40, 4):
        told = train[i : i + 4]
        assert {row["paraphrase_set_id"] for row in told} == {i // 4}
        assert len({row["chain"] for row in told}) == 4 and len({row["reference"] for row in told}) == 1
    assert len({row["paraphrase_set_id"] for row in train}) == 10
    assert not {row["chain"] for row in train} & {row["chain"] for row in held_out}
    assert paraphrases.wordings("7*7", random.Random(0), "train") == []  # it has no other wording


def test_a_mistake_is_told_by_the_number_of_its_step():
    prompt = [{"role": "user", "content": "7+5*3"}]
    said = [chains.mistake({"prompt": prompt, "answer": a}) for a in ("36=6", "25=6", "26=5")]
    assert said == ["wrong 1", "wrong 2", "wrong 3"]


def test_agents_keep_the_parameters_of_an_variant():
    variant = BenchVariant.of("turn_control")
    params = variant.config(TASKS["agents=tools"], {})["method_params"]["turn_control"]
    assert params["strategy"] == "fixed" and params["environment"].endswith(":Calculator")
    plain = BenchVariant.of("grpo").config(TASKS["agents=tools"], {})["method_params"]["turn_control"]
    assert plain["strategy"] == "unlimited"
