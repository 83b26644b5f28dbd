"""The loss and the optimizer step in verl's training worker on one rank, against verl's own and against plain torch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from messages import raises

pytest.importorskip("verl", reason="verl is not installed")

from engine import MAX_LENGTH, Case, padding
from reference import (
    EXACT,
    EXTRAS,
    MODES,
    at,
    filled,
    gradient,
    live,
    load,
    make_rows,
    mode,
    objective,
    relative,
    same_gradients,
    vanilla,
    with_gaps,
)

from rl_plugins.core.errors import MethodError

pytestmark = pytest.mark.host

FLOAT32 = 3e-6  # relative distance of a float32 gradient from the float64 reference


@pytest.fixture(scope="module")
def policy(policy_folder):
    return load(policy_folder)


@pytest.fixture(scope="module")
def rows(policy):
    return make_rows(policy, 16)


# ---- verl's own loss


@pytest.mark.parametrize(
    ("methods", "how"), [((), "token-mean"), *[(("noop",), how) for how in MODES], (("ppo_million",), "token-mean")]
)
def test_without_hooks_in_the_update_it_is_verls_loss(engine, rows, methods, how):
    case = Case(rows, actor=mode(how, **EXTRAS), entropy=True, weighted=True, steps=2, optimizer="AdamW")
    stock = engine.train(case.but(marked=False))
    ours = engine.train(case.but(methods=methods))
    assert all(torch.equal(a, b) for a, b in zip(ours.gradients, stock.gradients, strict=True))
    assert len(ours.gradients) == 2 and stock.gradients[0].norm() > 1e-3
    assert torch.equal(ours.weights, stock.weights)
    assert ours.losses == stock.losses
    measured = ("actor/mfu", "actor/perf")
    assert {k: v for k, v in ours.metrics.items() if not k.startswith(measured)} == {
        k: v for k, v in stock.metrics.items() if not k.startswith(measured)
    }


@pytest.mark.parametrize(("how", "extras"), [("token-mean", {}), *[(how, EXTRAS) for how in MODES]])
def test_own_surrogate_equals_verls(engine, rows, how, extras):
    """KL, entropy bonus and the weights of rollout correction included, over several steps off the policy."""
    case = Case(rows, actor=mode(how, **extras), entropy=bool(extras), weighted=bool(extras), steps=2, lr=0.01)
    stock = engine.train(case)
    ours = engine.train(case.but(methods=("vanilla",)))
    same_gradients(ours, stock)
    assert [sum(x) for x in ours.losses] == pytest.approx([sum(x) for x in stock.losses], rel=1e-5)
    for name in ("actor/pg_loss", "actor/ppo_kl", "actor/loss", "actor/grad_norm"):
        assert ours.metrics[name] == pytest.approx(stock.metrics[name], rel=1e-5)
    assert stock.metrics["actor/pg_clipfrac"] > 0.1 and stock.metrics["actor/pg_clipfrac_lower"] > 0.01
    assert not any("clipfrac" in name for name in ours.metrics)
    if not extras:
        plain = engine.train(case.but(methods=("vanilla",), params={"vanilla": {"dual": 1e6}}))
        assert relative(plain.gradients[0], stock.gradients[0]) > 1e-2, "the dual clip must have changed something"


def test_dora_loss_equals_verls_loss_with_options(engine, rows):
    """The three bounds are options of verl's PPO, the weight of the engine is its rollout correction, truncated."""
    cap, bounds = 1.2, {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    weighted = [r.but(weight=(r.old - r.rollout).exp().clamp(max=cap), row_columns={"dora_share": 1.0}) for r in rows]
    case = Case(weighted, actor=mode("seq-mean-token-sum-norm", **bounds), weighted=True, steps=2, lr=0.01)
    stock = engine.train(case)
    params = {"dora_loss": {"neg_low": 0.1, "pos_high": 0.28, "neg_high": 1.5, "weight_cap": cap}}
    ours = engine.train(case.but(methods=("dora_loss",), params=params, weighted=False))
    same_gradients(ours, stock)
    assert sum(ours.losses[0]) == pytest.approx(sum(stock.losses[0]), rel=1e-5)
    assert stock.metrics["actor/pg_clipfrac"] > 0.1 and stock.metrics["actor/pg_clipfrac_lower"] > 0.01
    other = engine.train(case.but(methods=("dora_loss",), params=params | {}, weighted=True))
    assert relative(other.gradients[0], stock.gradients[0]) > 1e-2, "the weight counts once"


@pytest.mark.parametrize(("kind", "bound"), [("tv", 1e-3), ("kl", 1e-5)])
def test_dppo_equals_verls_loss(engine, rows, kind, bound):
    bounds = {"clip_ratio_low": bound, "clip_ratio_high": bound, "clip_ratio_c": 1.5}
    own = mode("token-mean", policy_loss={"loss_mode": f"dppo_{kind}"}, **bounds)
    stock = engine.train(Case(rows, actor=own, steps=2, lr=0.01))
    params = {"divergence": kind, "bound_low": bound, "bound_high": bound, "cap": 1.5, "anchor": "old"}
    case = Case(rows, ("dppo",), params={"dppo": params}, actor=mode("token-mean"), steps=2, lr=0.01)
    ours = engine.train(case)
    same_gradients(ours, stock)
    assert sum(ours.losses[0]) == pytest.approx(sum(stock.losses[0]), rel=1e-5)
    assert stock.metrics["actor/pg_clipfrac"] > 0.1
    wide = engine.train(case.but(params={"dppo": {**params, "bound_low": 1.0, "bound_high": 1.0}}))
    assert relative(wide.gradients[0], stock.gradients[0]) > 1e-2


# ---- what left


@pytest.mark.parametrize("methods", [("noop",), ("vanilla", "leash", "corridor")])
@pytest.mark.parametrize("how", MODES)
def test_rows_that_left_count_nowhere(engine, rows, how, methods):
    """11 rows between 5 that verl added: the gradient of a batch of those 11 rows."""
    case = Case(rows[:11], methods, actor=mode(how, **EXTRAS), entropy=True, weighted=True, micro=11)
    alone = engine.train(case)
    among = engine.train(case.but(rows=filled(rows[:11], 16), micro=4))
    same_gradients(among, alone)
    assert sum(among.losses[0]) == pytest.approx(sum(alone.losses[0]), rel=1e-5)
    assert among.metrics["actor/pg_loss"] == pytest.approx(alone.metrics["actor/pg_loss"], rel=1e-5)
    if methods == ("noop",):
        same_gradients(among, engine.train(case.but(methods=None, marked=False)))


def test_verl_alone_counts_the_rows_it_adds(engine, rows):
    """So the number of rows has to be ours."""
    case = Case(filled(rows[:11], 16), actor=mode("seq-mean-token-mean"))
    ours, stock = engine.train(case.but(methods=("noop",))), engine.train(case)
    assert relative(stock.gradients[0] * 16 / 11, ours.gradients[0]) < EXACT


@pytest.mark.parametrize("how", MODES)
def test_what_left_in_plain_torch(engine, rows, policy, how):
    """Tokens and rows that left, KL and entropy bonus, against the float64 loop."""
    case = Case(filled(with_gaps(rows[:14]), 16), actor=mode(how, **EXTRAS), entropy=True, weighted=True)
    loss = objective(policy, case)
    expected = gradient(policy, loss)
    for methods in (("noop",), ("vanilla",)):
        result = engine.train(case.but(methods=methods))
        assert relative(result.gradients[0], expected) < FLOAT32
        assert sum(result.losses[0]) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    "methods", [("noop",), ("vanilla", "leash"), ("softmax",), ("minpro",), ("decoupled_ppo",), ("vcpo",)]
)
def test_micro_batches_change_nothing(engine, rows, how, methods):
    """1, 2 and 4 rows, and a dynamic size; two steps in each of two epochs."""
    rows = rewarded(rows) if methods == ("vcpo",) else rows
    batch = [*filled(with_gaps(rows[:3]), 4), *with_gaps(rows[8:12])]
    case = Case(batch, methods, actor=mode(how), steps=2, epochs=2, lr=0.01)
    one = engine.train(case.but(micro=1))
    assert len(one.gradients) == 4 and len(one.losses[0]) == 4
    for other, sizes in ((case.but(micro=2), [2] * 4), (case.but(micro=4), [1] * 4), (case.but(tokens=40), [1, 2] * 2)):
        result = engine.train(other)
        # the weight of a row is the exp of a sum of log-probs, so their rounding counts once per token
        same_gradients(result, one, 1e-5 if methods == ("vcpo",) else EXACT)
        assert [len(x) for x in result.losses] == sizes
        assert result.methods == pytest.approx(one.methods, rel=1e-5)


# ---- terms and objectives


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
def test_terms_on_log_probs_and_entropies(engine, rows, policy, how):
    def leash(lp, entropy, row):
        return 0.3 * (lp - row.old.double()) ** 2

    def corridor(lp, entropy, row):
        return 0.1 * (torch.relu(2.0 - entropy) + torch.relu(entropy - 2.5))

    case = Case(filled(with_gaps(rows[:14]), 16), actor=mode(how), entropy=True)
    both = gradient(policy, objective(policy, case, vanilla, [leash, corridor]))
    for methods in (("leash", "corridor"), ("vanilla", "leash", "corridor")):
        assert relative(engine.train(case.but(methods=methods)).gradients[0], both) < FLOAT32
    without = gradient(policy, objective(policy, case))
    for name, term in (("leash", leash), ("corridor", corridor)):
        only = gradient(policy, objective(policy, case, None, [term]))
        result = engine.train(case.but(methods=(name,)))
        assert relative(result.gradients[0], without + only) < FLOAT32
        assert only.norm() > 0.01 * without.norm()


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
def test_summed_objective(engine, rows, policy, how):
    """`aggregation = "sum"`, with columns, whatever the user's aggregation is; every signal in its place."""
    kept = with_gaps(rows[:14])
    case = Case(filled(kept, 16), ("weighted",), actor=mode(how))
    result = engine.train(case)
    count = len(kept)
    loss = sum(
        -(r.row_columns["number"] * r.token_columns["scale"].double() * live(policy, r)[0])[r.mask > 0].sum() / count
        for r in kept
    )
    assert relative(result.gradients[0], gradient(policy, loss)) < FLOAT32
    assert sum(result.losses[0]) == pytest.approx(float(loss), rel=1e-5)
    tokens = sum(int(r.mask.sum()) for r in kept)
    seen = [row for terms in result.seen for row in terms["rows"]]
    assert {(t["num_tokens"], t["num_rows"], t["max_length"]) for t in result.seen} == {(tokens, count, MAX_LENGTH)}
    for terms in result.seen:
        shape = terms["shapes"]["scale"]
        assert shape[0] == 4 and terms["shapes"]["number"] == (4, 1)
    for row, r in zip(seen, case.rows, strict=True):
        for name, values in (
            ("advantages", r.advantages),
            ("old", r.old),
            ("rollout", r.rollout),
            ("ref", r.ref),
            ("scale", r.token_columns["scale"]),
        ):
            assert torch.equal(row[name], values[r.mask > 0]), name


# ---- versions


def test_versions_and_how_far_the_weights_are_from_their_publication(engine, rows):
    """Steps and epochs of a batch count on; terms and rows say which step of the published weights it is."""
    aged = [r.but(versions=torch.arange(len(r.response)) // 3 + i) for i, r in enumerate(rows[:8])]
    case = Case(aged, ("aged",), steps=2, epochs=2, lr=0.0, published=20)
    result = engine.train(case)
    assert result.steps_since == 4 and not any("steps" in name for name in result.metrics)
    before = [s for s in result.seen if s[0] == "rows"]
    newest = [int(r.versions.max()) for r in aged]
    assert [b[1] for b in before[:2]] == [list(range(4)), list(range(4, 8))] and before[2][1] == list(range(4))
    assert [b[2] for b in before[:2]] == [newest[:4], newest[4:]]
    assert [b[3:] for b in before] == [(20, 0), (20, 1), (20, 2), (20, 3)]
    terms = [s for s in result.seen if s[0] == "terms"]
    assert [t[1] for t in terms[:2]] == [[r.versions.tolist() for r in part] for part in (aged[:4], aged[4:])]
    assert {t[2] for t in terms} == {"torch.int64"} and [t[3:] for t in terms] == [b[3:] for b in before]


# ---- before_update


@pytest.mark.parametrize("tokens", [None, 60])
def test_row_sums_and_columns(engine, rows, policy, policy_folder, tokens):
    """Sums of a Python loop at the weights of each step, of trained rows only; columns come back in the right rows."""
    policy, temperature = load(policy_folder), 0.7
    rows = make_rows(policy, 14, seed=3, temperature=temperature)
    batch = [*filled(with_gaps(rows[:7]), 8), *filled(rows[7:], 8)]
    case = Case(batch, ("ledger",), steps=2, lr=0.01, temperature=temperature, micro=2, tokens=tokens)
    result = engine.train(case)
    assert len(result.seen) == 2
    after_one = engine.train(case.but(rows=batch[:8], steps=1))
    models = [policy, at(policy_folder, after_one.weights)]
    assert (after_one.weights - at_start(policy)).abs().max() > 1e-3
    for seen, model, step in zip(result.seen, models, (batch[:8], batch[8:]), strict=True):
        trained = [r for r in step if int(r.mask.sum())]
        assert seen.length.tolist() == [int(r.mask.sum()) for r in trained]
        assert seen.group.tolist() == [r.group for r in trained]
        assert seen.columns["number"].tolist() == [r.row_columns["number"] for r in trained]
        for name, of in (
            ("old_logprobs", lambda r: r.old),
            ("rollout_logprobs", lambda r: r.rollout),
            ("logprobs", lambda r, model=model: live(model, r, temperature)[0].detach()),
        ):
            expected = [float(of(r)[r.mask > 0].double().sum()) for r in trained]
            assert getattr(seen, name).tolist() == pytest.approx(expected, rel=1e-5), name
    count = [sum(int(r.mask.sum()) > 0 for r in step) for step in (batch[:8], batch[8:])]
    assert result.methods == {"ledger/rows": sum(count) / 2, "ledger/echoes": sum(count) / 2}


def at_start(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_column_of_the_step_in_the_surrogate(engine, rows, policy):
    kept = rows[:14]
    case = Case(filled(kept, 16), ("shares",), actor=mode("seq-mean-token-mean"))
    result = engine.train(case)

    def surrogate(lp, entropy, row):
        return -(1 + row.row_columns["number"]) / len(kept) * lp

    assert result.seen == [(4, 1)] * 4
    assert relative(result.gradients[0], gradient(policy, objective(policy, case, surrogate))) < FLOAT32


def test_learning_rate_of_one_step(engine, rows):
    case = Case(rows, ("ledger",), steps=2, lr=0.5)
    full = engine.train(case)
    tenth = engine.train(case.but(params={"ledger": {"lr_scale": 0.1}}))
    still = engine.train(case.but(params={"ledger": {"lr_scale": 0.0}}))
    assert full.rates == [0.5, 0.5] and tenth.rates == pytest.approx([0.05, 0.05]) and still.rates == [0.0, 0.0]
    assert full.rate == tenth.rate == still.rate == 0.5
    assert full.metrics["actor/lr"] == tenth.metrics["actor/lr"] == 0.5
    start = engine.train(case.but(lr=0.0)).weights
    assert torch.equal(still.weights, start)
    one = case.but(rows=rows[:8], steps=1)
    moved, slowly = (engine.train(c).weights - start for c in (one, one.but(params={"ledger": {"lr_scale": 0.1}})))
    assert relative(slowly, 0.1 * moved) < 1e-4


def test_group_objective(engine, rows, policy, policy_folder):
    """Coefficients at the current weights give the gradient of the undivided objective, at each of two steps."""
    rows = [r.but(group=i // 3 * 7 % 16) for i, r in enumerate(rows)]  # ragged groups, whole in every step
    batch = [*filled(with_gaps(rows[:6]), 8), *filled(rows[6:13], 8)]
    case = Case(batch, ("softmax",), steps=2, lr=0.05)
    half = engine.train(case.but(rows=batch[:8], steps=1)).weights
    results = [engine.train(c) for c in (case, case.but(micro=1, actor=mode("seq-mean-token-mean")))]
    for i, model in enumerate((policy, at(policy_folder, half))):
        step = [r for r in batch[8 * i : 8 * i + 8] if int(r.mask.sum())]
        expected = gradient(model, group_objective(model, step))
        for result in results:
            assert relative(result.gradients[i], expected) < FLOAT32
    groups = [len({r.group for r in part if int(r.mask.sum())}) for part in (batch[:8], batch[8:])]
    assert results[0].methods["softmax/groups"] == sum(groups) / 2


def group_objective(model, rows):
    score = [live(model, r)[0][r.mask > 0].mean() for r in rows]
    total, groups = 0.0, sorted({r.group for r in rows})
    for g in groups:
        p = [s for s, r in zip(score, rows, strict=True) if r.group == g and r.row_columns["positive"]]
        n = [s for s, r in zip(score, rows, strict=True) if r.group == g and not r.row_columns["positive"]]
        if p and n:
            total = total - torch.stack(p).mean() + torch.logsumexp(torch.stack(n), 0)
    return total / len(groups)


@pytest.mark.parametrize(
    ("methods", "empty"),
    [(("noop",), "added"), (("vanilla", "minimax"), "added"), (("softmax",), "added"), (("softmax",), "masked")],
)
def test_step_without_a_token_moves_nothing(engine, rows, methods, empty):
    """AdamW would move the weights by its momentum and by weight decay; the step after it is as if it had not been."""
    nothing = [padding(rows[0])] * 4 if empty == "added" else [r.but(mask=torch.zeros_like(r.mask)) for r in rows[4:8]]
    case = Case([*rows[:4], *nothing, *rows[8:12]], methods, steps=3, optimizer="AdamW", lr=0.01)
    result = engine.train(case)
    without = engine.train(case.but(rows=[*rows[:4], *rows[8:12]], steps=2))
    assert len(result.gradients) == 2
    assert torch.equal(result.weights, without.weights)
    assert result.methods == without.methods
    only = engine.train(case.but(rows=nothing, steps=1))
    assert torch.equal(only.weights, engine.train(case.but(rows=rows[:4], steps=1, lr=0.0)).weights)
    assert only.metrics["actor/grad_norm"] == 0.0 and only.metrics["actor/loss"] == 0.0 and not only.methods


def test_a_step_whose_gradient_is_not_finite_moves_nothing_and_is_counted(engine, rows):
    """verl's engine leaves it out with a line in the log of the worker; the step before it counts as it is."""
    batches = [r.but(row_columns={"batch": float(i >= 8)}) for i, r in enumerate(rows)]
    case = Case(batches, ("steep",), steps=2, optimizer="AdamW", lr=0.01)
    result = engine.train(case)
    assert torch.equal(result.weights, engine.train(case.but(rows=batches[:8], steps=1)).weights)
    assert result.methods == {"rl_plugins/steps_skipped": 0.5}
    assert not math.isfinite(result.metrics["actor/grad_norm"]) and bool(result.weights.isfinite().all())
    assert engine.train(case.but(rows=batches[:8], steps=1)).methods == {}


# ---- metrics


def test_metrics_are_combined_as_asked(engine, rows):
    """verl would take the minimum of everything in "minimax" and reduce over micro-batches of any size alike."""
    kept = with_gaps(rows[:14])
    values = torch.cat([r.advantages[r.mask > 0] for r in kept]).double()
    for micro in (1, 2, 8):
        result = engine.train(Case(filled(kept, 16), ("minimax",), micro=micro))
        assert result.methods == pytest.approx(
            {
                "minimax/tokens_max": len(values),
                "minimax/mean_min": float(values.mean()),
                "minimax/low": float(values.min()),
                "minimax/high_min": float(values.max()),
            },
            rel=1e-5,
        )
        assert not any("rl_plugins" in name or "minimax" in name for name in result.metrics)


def test_metrics_of_several_steps_are_averaged(engine, rows):
    parts = [engine.train(Case(part, ("minimax",), lr=0.0)).methods for part in (rows[:8], rows[8:])]
    both = engine.train(Case(rows, ("minimax",), steps=2, lr=0.0)).methods
    assert both == pytest.approx({name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}, rel=1e-6)


# ---- errors


@pytest.mark.parametrize(
    ("methods", "params", "message"),
    [
        (("broken",), {"hook": "regularize"}, "`broken`.*`regularize`.*ValueError"),
        (("broken",), {"hook": "before_update"}, "`broken`.*`before_update`.*ValueError"),
        (("broken",), {"how": "shape"}, "`broken`.*`regularize`.*3.*99"),
        (("broken",), {"how": "none"}, "`broken`.*`regularize`.*NoneType"),
        (
            ("broken",),
            {"hook": "before_update", "how": "column"},
            "`broken`.*`before_update`.*`a`",
        ),
        (
            ("broken_surrogate",),
            None,
            "`broken_surrogate`.*`policy_loss`.*3",
        ),
    ],
)
def test_errors_name_method_and_hook(engine, rows, methods, params, message):
    case = Case(rows[:4], methods, params={"broken": params} if params else {})
    with raises(MethodError, match=message) as error:
        engine.train(case)
    assert f"Remove `{methods[0]}` from `methods` to go on without it" in str(error.value)
    assert engine.train(Case(rows[:4], ("vanilla",))).gradients[0].norm() > 0, "the worker goes on"


@pytest.mark.parametrize(("how", "outside"), [("token-mean", "inf"), *[(how, "nan") for how in MODES]])
def test_what_stands_outside_of_the_mask_does_not_count(engine, rows, how, outside):
    case = Case(filled(with_gaps(rows[:14]), 16), ("vanilla",), actor=mode(how), weighted=True)
    clean = engine.train(case)
    dirty = engine.train(case.but(params={"vanilla": {"outside": outside}}))
    assert torch.equal(dirty.gradients[0], clean.gradients[0])
    assert dirty.losses == clean.losses and math.isfinite(clean.losses[0][0])


# ---- the way into the workers


def test_the_loss_function_carries_no_state(engine, rows):
    case = Case(rows, ("vanilla", "ledger"), params={"vanilla": {"low": 0.1}})
    (found,) = engine.call("pickled", [case])
    assert found["keys"] == ["actor", "max_length", "settings"]
    assert not found["secret"] and found["state"] == [{}, {}] and found["step"] == 0 and not found["metrics"]
    assert found["names"] == ["vanilla", "ledger"] and found["max_length"] == MAX_LENGTH
    assert found["params"] == [dict(low=0.1, high=0.2, dual=3.0, outside=""), dict(lr_scale=1.0)]


def test_the_wrap_is_for_our_loss_only(engine, rows):
    (found,) = engine.call("wrap", [Case(filled(rows[:11], 16), optimizer="AdamW", steps=2)])
    assert found["replaced"] and found["once"]
    assert torch.equal(found["beside"].weights, found["without"].weights)
    assert found["beside"].losses == found["without"].losses


# ---- a method that ships


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("params", [{}, dict(clip_low=0.3, clip_high=0.5)])
def test_minpro(engine, rows, policy, how, params):
    """The paper's weight in a float64 loop: the token's ratio times the smallest one before it."""
    low, high = params.get("clip_low", 1.0), params.get("clip_high", 4.0)
    weights, prefixes, clipped = [], [], []

    def surrogate(lp, entropy, row):
        out, before = [], 1.0
        first = True
        for t in range(len(lp)):
            ratio = math.exp(float(lp[t]) - float(row.rollout[t]))
            weight = min(max(before * ratio, 1 - low), 1 + high)
            out.append(-weight * float(row.advantages[t]) * lp[t])
            if row.mask[t]:
                weights.append(weight)
                prefixes.append(before)
                clipped.append(float(weight != before * ratio))
                before, first = (ratio if first else min(before, ratio)), False
        return torch.stack(out)

    case = Case(filled(with_gaps(rows[:14]), 16), ("minpro",), params={"minpro": params}, actor=mode(how, **EXTRAS))
    result = engine.train(case.but(entropy=True))
    assert relative(result.gradients[0], gradient(policy, objective(policy, case, surrogate))) < FLOAT32
    assert result.methods == pytest.approx(
        {
            "minpro/weight_mean": sum(weights) / len(weights),
            "minpro/weight_min": min(weights),
            "minpro/prefix_min": sum(prefixes) / len(prefixes),
            "minpro/clipped": sum(clipped) / len(clipped),
        },
        rel=1e-4,
    )
    assert not params or result.methods["minpro/clipped"] > 0.1


PPO = [
    {},
    dict(level="sequence", action="clamp", upper=1.1, lower=0.9, dual_clip=1.5),
    dict(metric="k3", upper=0.05),
]


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("params", PPO, ids=str)
def test_decoupled_ppo(engine, rows, policy, how, params):
    """The weight of the proximal policy over the one that sampled, and PPO around the former, in a float64 loop."""
    upper, weights, outside = params.get("upper", 5.0), [], []

    def surrogate(lp, entropy, row):
        logs = [float(row.old[t]) - float(row.rollout[t]) for t in range(len(lp))]
        mine = [x for x, m in zip(logs, row.mask.tolist(), strict=True) if m] or [0.0]
        out = []
        for t, a in enumerate(row.advantages.tolist()):
            log = sum(mine) / len(mine) if "level" in params else logs[t]
            metric = math.exp(log) - log - 1 if "metric" in params else math.exp(log)
            far = metric > upper or metric < params.get("lower", 0.0)
            omega = math.exp(log)
            if far:
                omega = min(max(omega, params.get("lower", 0.0)), upper) if params.get("action") == "clamp" else 0.0
            u = torch.exp(lp[t] - row.old[t].double())
            value = torch.maximum(-a * u, -a * u.clamp(0.8, 1.2))
            if a < 0 and "dual_clip" in params:
                value = torch.minimum(value, torch.tensor(-1.5 * a).double())
            out.append(omega * value)
            if row.mask[t]:
                weights.append(omega)
                outside.append(float(far))
        return torch.stack(out)

    batch = filled(with_gaps(rows[:14]), 16)
    case = Case(batch, ("decoupled_ppo",), params={"decoupled_ppo": params}, actor=mode(how, **EXTRAS), entropy=True)
    result = engine.train(case)
    assert relative(result.gradients[0], gradient(policy, objective(policy, case, surrogate))) < FLOAT32
    assert result.methods["decoupled_ppo/weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
    assert result.methods["decoupled_ppo/weight_max"] == pytest.approx(max(weights), rel=1e-4)
    assert result.methods["decoupled_ppo/filtered"] == pytest.approx(sum(outside) / len(outside), abs=1e-6)
    assert not params or result.methods["decoupled_ppo/filtered"] > 0.1


@pytest.mark.parametrize("how", MODES)
def test_decoupled_ppo_equals_verls_own_mode(engine, rows, how):
    """verl's decoupled mode: its weights with IcePop's bounds, here up to 1.2, on its own loss, the dual clip far away.
    Loss and gradient, and the rejected tokens in its divisor."""
    from torch.nn.utils.rnn import pad_sequence
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    ratio = pad_sequence([r.old - r.rollout for r in rows], batch_first=True)
    mask = pad_sequence([r.mask for r in rows], batch_first=True)
    found, metrics = compute_rollout_correction_weights(ratio, mask, "token", "1e-9_1.2")
    assert 0.1 < metrics["rollout_is_oob_ratio"] < 0.9
    given = [r.but(weight=w[: len(r.mask)]) for r, w in zip(rows, found, strict=True)]
    own = Case(given, actor=mode(how, clip_ratio_c=1e9), weighted=True, steps=2, lr=0.01)
    theirs = engine.train(own)
    params = {"decoupled_ppo": {"upper": 1.2}}
    ours = engine.train(own.but(methods=("decoupled_ppo",), params=params, weighted=False))
    same_gradients(ours, theirs)
    assert [sum(x) for x in ours.losses] == pytest.approx([sum(x) for x in theirs.losses], rel=1e-5)
    unbounded = engine.train(own.but(methods=("decoupled_ppo",), weighted=False))
    assert relative(unbounded.gradients[0], theirs.gradients[0]) > 1e-2


def rewarded(rows):
    """Rows as `vcpo` sends them: their reward, centred and scaled."""
    reward = [(-1.2, 0.3, 1.5, -0.6)[i % 4] for i in range(len(rows))]
    return [
        r.but(row_columns={**r.row_columns, "vcpo_reward": x, "vcpo_scored": 1.0})
        for r, x in zip(rows, reward, strict=True)
    ]


@pytest.mark.parametrize("params", [{}, dict(baseline="group", lr_scale="linear", base_ess_ratio=0.9)], ids=str)
def test_vcpo(engine, rows, policy, params):
    """Weights of rows, baseline and learning rate in a float64 loop; the rate is its own again to the last bit."""
    batch = filled(with_gaps(rewarded(rows[:14])), 16)
    case = Case(batch, ("vcpo",), params={"vcpo": params}, lr=0.1)
    result = engine.train(case)
    mine = [r for r in batch if r.real and int(r.mask.sum())]
    assert len(mine) == 13, "a row without a token is not in B"
    lp = [live(policy, r)[0] for r in mine]
    length = [int(r.mask.sum()) for r in mine]
    w = [math.exp(float(((x.detach() - r.rollout.double()) * r.mask).sum())) for x, r in zip(lp, mine, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for i, r in enumerate(mine):
        peers = [j for j, other in enumerate(mine) if other.group == r.group]
        big = [w[j] ** 2 * length[j] for j in peers]
        b = sum(x * mine[j].row_columns["vcpo_reward"] for x, j in zip(big, peers, strict=True)) / sum(big)
        a = r.row_columns["vcpo_reward"] - (0.0 if "baseline" in params else b)
        total = total - a * min(w[i], 8.0) * (lp[i] * r.mask).sum() / (len(mine) * length[i])
    assert relative(result.gradients[0], gradient(policy, total)) < FLOAT32
    ratio = sum(w) ** 2 / sum(x * x for x in w) / len(mine)
    scale = min(1.0, ratio / params.get("base_ess_ratio", 1.0)) ** (1.0 if params else 0.5)
    assert result.methods["vcpo/ess_ratio"] == pytest.approx(ratio, rel=1e-4) and ratio < 0.8
    assert result.methods["vcpo/lr_scale"] == pytest.approx(scale, rel=1e-4)
    assert result.rates == [pytest.approx(0.1 * scale, rel=1e-4)] and result.rate == 0.1
    assert result.methods["vcpo/truncated"] == pytest.approx(sum(x > 8 for x in w) / len(w))


def test_ppo_million(engine, rows, policy):
    """k3 and the clip share in a float64 loop over the rows that are trained; two cuts by 3 in the rate of the step."""
    batch = filled([r.but(row_columns={"ppo_million_cuts": 2.0}) for r in with_gaps(rows[:14])], 16)
    params = {"ppo_million": {"action": "shrink", "factor": 3.0, "clip_high": 0.3}}
    result = engine.train(Case(batch, ("ppo_million",), params=params, lr=0.9))
    kl, outside = [], 0
    for r in (r for r in batch if r.real):
        for lp, old, adv, m in zip(live(policy, r)[0].tolist(), r.old.tolist(), r.advantages, r.mask, strict=True):
            if m:
                kl.append(math.exp(lp - old) - 1 - (lp - old))
                outside += math.exp(lp - old) > 1.3 if adv > 0 else math.exp(lp - old) < 0.8 if adv < 0 else 0
    assert result.methods["ppo_million/kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4) and sum(kl) > 1
    assert result.methods["ppo_million/clipped"] == pytest.approx(outside / len(kl), rel=1e-6) and outside
    assert result.rates == [pytest.approx(0.1)] and result.rate == 0.9
    plain = engine.train(Case(batch, ("noop",), lr=0.1))
    assert torch.equal(result.gradients[0], plain.gradients[0]), "the term of 0"


# ---- a teacher


@pytest.mark.parametrize("seed", [None, 7], ids=["the policy", "another model"])
def test_a_teacher_reads_with_verls_passes(engine, policy, tmp_path, seed):
    """Log-probs of the same responses behind other prompts, whatever the micro-batch and the order of the rows are."""
    from rl_plugins.lab.demo.policy import build_model

    teacher, model = "", copy.deepcopy(policy)
    if seed is not None:
        teacher, model = str(tmp_path / "teacher"), build_model(seed)
        model.save_pretrained(teacher)
    prompts = [[5, 6, 7], None, [9], [8] * 11, [4, 9]]
    responses = [torch.tensor(r) for r in ([5, 6, 1], [7, 1], [8, 8, 8, 8], [6], [9, 5])]
    wanted = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model.double()(torch.cat([torch.tensor(prompt or [1]), response])[None]).logits[0]
        logp = torch.log_softmax(logits[-len(response) - 1 : -1] / 0.7, -1).gather(1, response[:, None])[:, 0]
        wanted.append(logp if prompt else torch.full_like(logp, math.nan))
    for micro, order in ((1, range(5)), (4, range(5)), (2, [4, 2, 0, 1, 3])):
        rows = [responses[i] for i in order], [prompts[i] for i in order]
        (found,) = engine.call("read_by_teacher", [*rows, micro, 0.7, teacher])
        for i, values in zip(order, found, strict=True):
            torch.testing.assert_close(values.double(), wanted[i], rtol=0, atol=1e-5, equal_nan=True)
