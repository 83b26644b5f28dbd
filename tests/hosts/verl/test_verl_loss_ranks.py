"""Two gloo ranks under FSDP2 make the optimizer steps of one rank, however rows and tokens lie on them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

from engine import Case, Engine, padding
from reference import EXTRAS, MODES, load, make_rows, mode, relative, same_gradients, with_gaps

pytestmark = [pytest.mark.host, pytest.mark.ranks]

EPO = {"entropy_coeff": 0.1, "average": "host", "rho": 2.0}


@pytest.fixture(scope="module")
def two(policy_folder):
    ranks = Engine(policy_folder, 2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def rows(two, engine, policy_folder):
    """Two steps of 8 rows. The first rank trains 1 row of the first step, the second rank none of the second."""
    rows = with_gaps(make_rows(load(policy_folder), 16))
    rows = [r.but(group=i // 8) for i, r in enumerate(rows)]
    nothing = [padding(rows[0], prompt=3 + 9 * i) for i in range(4)]
    return [*nothing[:2], rows[1], *nothing[2:3], *rows[4:12], *nothing]


def corridor(i, n):
    """Columns of `epo`: all entropies are outside of the bounds of the first turn, and inside those of the second."""
    turn = (torch.arange(n) >= n // 2).float()
    bounds = {"epo_low": 2.0 * (1 - turn), "epo_high": 2.5 + 6.5 * turn, "epo_turn": turn}
    return {"token_columns": bounds, "row_columns": {"epo_phase": 1.0 + i % 2}}


def same(two, one, ranks):
    same_gradients(two[0], one)
    assert all(torch.equal(a, b) for a, b in zip(two[0].gradients, two[1].gradients, strict=True))
    assert torch.equal(two[0].weights, two[1].weights)
    assert (two[0].weights - one.weights).abs().max() < 1e-6
    # the shift of vcpo's baseline is a difference of means of weights that are exps of sums over a row
    rounding = 1e-4 if "vcpo/baseline_shift" in one.methods else 1e-5
    assert two[0].methods == two[1].methods == pytest.approx(one.methods, rel=rounding)
    for name in ("actor/loss", "actor/pg_loss", "actor/grad_norm", "actor/lr"):
        assert two[0].metrics[name] == pytest.approx(one.metrics[name], rel=1e-5), name
    assert len(one.gradients) == ranks


@pytest.mark.parametrize(
    ("methods", "how", "more"),
    [
        *[(("vanilla", "leash", "corridor"), how, dict(entropy=True, weighted=True)) for how in MODES],
        (("noop",), "seq-mean-token-mean", dict(entropy=True)),
        (("noop",), "token-mean", dict(tokens=40)),
        (("minpro",), "seq-mean-token-sum", dict(epochs=2)),
        (("minpro", "minimax"), "token-mean", dict(tokens=40)),
        (("softmax",), "seq-mean-token-mean", dict(epochs=2)),
        (
            ("decoupled_ppo",),
            "seq-mean-token-mean",
            dict(params={"decoupled_ppo": {"level": "sequence", "upper": 1.1}}),
        ),
        (("vcpo",), "token-mean", dict(epochs=2)),
        (("dora_loss",), "seq-mean-token-sum-norm", dict(epochs=2)),
        (("epo",), "token-mean", dict(epochs=2, entropy=True, params={"epo": EPO})),
        (
            ("vanilla", "epo"),
            "seq-mean-token-mean",
            dict(tokens=40, entropy=True, params={"epo": {**EPO, "mode": "seq"}}),
        ),
        (("weighted",), "seq-mean-token-mean", {}),
        (("ledger", "vanilla"), "seq-mean-token-mean", dict(params={"ledger": {"lr_scale": 0.5}})),
    ],
)
def test_two_ranks_are_one(two, engine, rows, methods, how, more):
    assert two.call("kind") == ["FSDPQwen3ForCausalLM DTensor"] * 2
    actor = mode(how, **(EXTRAS if "entropy" in more else {}))
    if methods == ("vcpo",):
        rewards = {"vcpo_scored": 1.0, "vcpo_reward": 0.0}
        rows = [r.but(row_columns={**rewards, "vcpo_reward": i % 3 - 1.0}) for i, r in enumerate(rows)]
    if methods == ("dora_loss",):
        rows = [r.but(row_columns={"dora_share": 0.5 + i % 3}) for i, r in enumerate(rows)]
    if "epo" in methods:
        actor["entropy_coeff"] = 0.0
        rows = [r.but(**corridor(i, len(r.response))) for i, r in enumerate(rows)]
    case = Case(rows, methods, actor=actor, steps=2, lr=0.003, micro=2, **more)
    ranks, one = two.train_all(case), engine.train(case)
    same(ranks, one, 2 * case.epochs)
    if methods == ("vcpo",):  # one effective sample size of both ranks
        assert ranks[0].rates == ranks[1].rates == pytest.approx(one.rates, rel=1e-6) and max(one.rates) < 0.003
        assert ranks[0].rate == ranks[1].rate == 0.003
    if "epo" in methods:
        assert 0 < one.methods["epo/within"] < 1 and one.methods["epo/penalty"] > 0
    if "ledger" in methods:
        for a, b, c in zip(one.seen, ranks[0].seen, ranks[1].seen, strict=True):
            for name in ("length", "group", "logprobs", "old_logprobs", "rollout_logprobs"):
                assert torch.equal(getattr(b, name), getattr(c, name))
                torch.testing.assert_close(getattr(b, name), getattr(a, name), rtol=1e-5, atol=0)
            assert torch.equal(a.columns["number"], b.columns["number"])
        assert [len(r.length) for r in one.seen] == [4, 4]  # the sixth of the rows lost all its tokens
        assert ranks[0].rates == [0.0015] * 2 and ranks[0].rate == ranks[1].rate == 0.003


def test_without_hooks_in_the_update_two_ranks_are_verls(two, rows):
    case = Case(make_rows_of(rows), actor=mode("seq-mean-token-mean", **EXTRAS), entropy=True, optimizer="AdamW")
    stock, ours = two.train_all(case.but(marked=False)), two.train_all(case.but(methods=("noop",)))
    assert torch.equal(stock[0].weights, ours[0].weights)
    assert [r.losses for r in stock] == [r.losses for r in ours]


def make_rows_of(rows):
    real = [r for r in rows if r.real]
    return real[: len(real) // 8 * 8]


@pytest.mark.parametrize("methods", [("noop",), ("vanilla", "ledger")])
def test_step_without_a_token_on_any_rank(two, rows, methods):
    """It is left out on both; a step that is empty on one rank only is made on both (test_two_ranks_are_one)."""
    real = make_rows_of(rows)
    case = Case([*real[:4], *[padding(rows[0])] * 4, *real[4:8]], methods, steps=3, optimizer="AdamW", lr=0.01, micro=2)
    ranks = two.train_all(case)
    without = two.train_all(case.but(rows=real[:8], steps=2))
    assert [len(r.gradients) for r in ranks] == [2, 2]
    assert torch.equal(ranks[0].weights, without[0].weights) and torch.equal(ranks[1].weights, without[1].weights)
    assert ranks[0].methods == without[0].methods
    assert relative(ranks[0].gradients[0], without[0].gradients[0]) == 0.0
