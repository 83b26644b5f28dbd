"""SAPO in TRL's trainer: groups of another node are trained as they were sent, own ones are published, a resumed run
goes on with its inbox; and without external groups nothing changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import make, weights
from messages import raises
from swarm_packages import SIZE, fill

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.rewards import digits
from rl_plugins.methods.swarm_sapo import Files, Package
from rl_plugins.methods.swarm_sapo.packages import sender_of
from rl_plugins.trl.generation import batches as module

pytestmark = pytest.mark.host

STEPS, SAVED = 3, 1


def run(folder: Path, resume: bool = False, **params: Any) -> tuple[list[Any], Any]:
    """What was decided on in each batch, and the trainer."""
    seen, decide = [], module.decide

    def watched(stack: Any, rollouts: Any, tokens: Any, *args: Any) -> Any:
        decision = decide(stack, rollouts, tokens, *args)
        seen.append((decision, tokens))
        return decision

    module.decide = watched
    try:
        trainer = make(
            folder,
            ["swarm_sapo"],
            reward=digits,
            max_steps=STEPS,
            learning_rate=0.05,
            save_strategy="steps",
            save_steps=SAVED,
            method_params={"swarm_sapo": {"exchange": str(folder / "swarm"), "node": "me", **params}},
        )
        trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{SAVED}") if resume else None)
    finally:
        module.decide = decide
    return seen, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Any, Path, dict[tuple[str, ...], Package]]:
    folder = tmp_path_factory.mktemp("swarm")
    sent = fill(folder)
    return *run(folder, external_weight=0.5), folder, sent


def test_groups_of_another_node_are_trained_as_they_were_sent(whole: Any) -> None:
    batches, _, _, sent = whole
    trained = 0
    for number, (d, tokens) in enumerate(batches):
        rollouts, foreign = d.rollouts, d.rollouts.prompt_index < 0
        candidates = [8, 8, 4][number]  # 20 in all, each once
        assert int(foreign.sum()) == candidates * SIZE and int((~foreign).sum()) == 4 * SIZE
        assert tokens is None, "a decision by rows"
        for group in rollouts.group[foreign].unique().tolist():
            rows = (rollouts.group == group).nonzero()[:, 0].tolist()
            asked = rollouts.meta["prompt"][rows[0]][0]["content"]
            package = sent.pop((asked, *(rollouts.text[i] for i in rows)))  # each is drawn once
            assert rollouts.reward[rows].tolist() == pytest.approx(
                digits(None, [[{"content": t}] for t in package.completions], answer=[package.columns["answer"]] * SIZE)
            ), "scored here, with the columns that were sent"
            assert (~rollouts.truncated[rows]).tolist() == list(package.finished)
            r = rollouts.reward[rows]
            if bool(d.trained[rows].any()):
                assert len(set(r.tolist())) > 1
                expected = 0.5 * (r - r.mean()) / (r.std() + 1e-4)
                torch.testing.assert_close(d.row_advantages[rows], expected, rtol=1e-4, atol=1e-5)
                trained += 1
        assert int(d.trained[~foreign].sum()) == 4 * SIZE
    assert not sent and trained >= 8


def test_own_groups_are_published(whole: Any) -> None:
    batches, trainer, folder, _ = whole
    exchange = Files(folder / "swarm")
    names = sorted(n for n in exchange.names() if sender_of(n) == "me")
    assert len(names) == STEPS and names == trainer.methods.methods[0].state["own"]
    for name, (d, _) in zip(names, batches, strict=True):
        lines = [json.loads(line) for line in exchange.get(name, 10**6).splitlines()]
        own = d.rollouts.subset(d.rollouts.prompt_index >= 0)
        assert [c for line in lines for c in line["completions"]] == own.text
        assert [f for line in lines for f in line["finished"]] == (~own.truncated).tolist()
        assert [line["prompt"] for line in lines] == own.meta["prompt"][::SIZE]
        assert [line["columns"]["answer"] for line in lines] == [
            trainer.train_dataset[i]["answer"] for i in own.prompt_index.tolist()[::SIZE]
        ]


def test_a_resumed_run_goes_on_with_its_inbox(whole: Any) -> None:
    batches, trainer, folder, _ = whole
    before = set(Files(folder / "swarm").names())
    again, resumed = run(folder, resume=True, external_weight=0.5)
    assert len(again) == STEPS - SAVED
    for (one, _), (two, _) in zip(batches[SAVED:], again, strict=True):
        assert one.rollouts.text == two.rollouts.text and torch.equal(one.trained, two.trained)
        assert bool((two.rollouts.prompt_index < 0).any())
    assert torch.equal(weights(trainer), weights(resumed))
    assert set(Files(folder / "swarm").names()) == before, "the same groups are published under the same names"


def test_without_external_groups_it_is_plain_grpo_bit_for_bit(tmp_path: Path) -> None:
    fill(tmp_path)
    with_method, plain = (
        make(tmp_path, methods, reward=digits, output_dir=tmp_path / name, method_params=params, learning_rate=0.05)
        for name, methods, params in (
            (
                "one",
                ["swarm_sapo"],
                {"swarm_sapo": {"exchange": f"{tmp_path}/swarm", "node": "me", "external_groups": 0}},
            ),
            ("two", [], None),
        )
    )
    for trainer in (with_method, plain):
        torch.manual_seed(0)
        trainer.train()
    assert torch.equal(weights(with_method), weights(plain))
    assert len(Files(tmp_path / "swarm").names()) == 1 + 2, "and still publishes"


def test_a_dead_endpoint_leaves_the_own_data(tmp_path: Path) -> None:
    params = {"exchange": "http://127.0.0.1:9/swarm", "node": "me", "timeout": 0.5}
    trainer = make(tmp_path, ["swarm_sapo"], reward=digits, method_params={"swarm_sapo": params})
    trainer.train()
    logged = [h for h in trainer.state.log_history if "swarm_sapo/external" in h]
    assert [h["swarm_sapo/external"] for h in logged] == [0, 0] and logged[0]["swarm_sapo/failed"] == 1
    assert "swarm_sapo/failed" not in logged[1], "the second batch makes no try"


def test_corrections_by_sampling_probabilities_are_refused(tmp_path: Path) -> None:
    params = {"swarm_sapo": {"exchange": str(tmp_path), "node": "me"}}
    with raises(ConfigError, match="`swarm_sapo`"):
        make(tmp_path, ["swarm_sapo", "decoupled_ppo"], method_params=params, num_iterations=2)
