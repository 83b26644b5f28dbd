"""BranchGRPO (arXiv 2509.06040): advantages of nodes and pruning against plain loops, and what the paper implies."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.branch_loops import advantages_by_loops, batch, first_copies, node_of, nodes_of, worse_tails

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.losses import aggregate, ppo_clip
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Rollouts, Tokens
from rl_plugins.methods.branch_advantages import BranchAdvantages
from rl_plugins.methods.branch_grpo.trees import Trees
from rl_plugins.methods.branch_pruning import BranchPruning, Tails
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, make_run, make_tokens, one_step, start_stack
from rl_plugins.testing.data import take_rows

NAN = math.nan
FUSIONS = ("uniform", "paths", "levels")
WIDTHS = ("parent_top1", "extreme", "none")


def built(cls: Any, **params: Any) -> Any:
    return cls(build_params(cls.Params, params, cls.name))


def shaped(rollouts: Rollouts, tokens: Tokens, *methods: Any, **facts: Any) -> Any:
    """The decision of these methods, and what they logged."""
    stack = start_stack(*methods, run=make_run(**facts))
    decision = one_step(stack, rollouts, tokens)
    return decision, combine([stack.metrics.take()])


def paper_tree(splits: Sequence[int] = (0, 3, 6, 9), steps: int = 20, children: int = 2) -> list[dict[str, Any]]:
    """The ways of the leaves of a tree of denoising steps: a node per step."""
    number = itertools.count(1)
    ways = [([0], [0])]
    for step in range(steps):
        k = children if step in splits else 1
        ways = [([*nodes, next(number)], [*stops, step + 1]) for nodes, stops in ways for _ in range(k)]
    return [{"nodes": nodes, "stops": stops} for nodes, stops in ways]


def grow(random: Random, rewards: Sequence[float]) -> tuple[Rollouts, Tokens]:
    """Ragged trees in several groups, rows in any order, with copies, rows without a tree, and empty segments."""
    rows: list[tuple[int, Any]] = []
    number = itertools.count(1)
    for group in range(random.randint(1, 4)):
        open_ = [([0], [random.randint(0, 2)])]
        for _ in range(random.randint(1, 3)):
            grown = []
            for nodes, stops in open_:
                if random.random() < 0.2:  # it ends early
                    rows += [(group, {"nodes": nodes, "stops": stops})] * random.randint(1, 2)
                    continue
                for _ in range(random.randint(1, 3)):
                    grown.append(([*nodes, next(number)], [*stops, stops[-1] + random.randint(0, 2)]))
            open_ = grown
        rows += [(group, {"nodes": nodes, "stops": stops}) for nodes, stops in open_]
    rows += [(0, None)] * random.randint(0, 1)
    rows = random.sample(rows, min(len(rows), 14))
    given_ = random.choices(rewards, k=len(rows))
    if all(math.isnan(r) for r in given_):
        given_[0] = 1.0
    return batch([way for _, way in rows], given_, [group for group, _ in rows])


RANDOM = st.randoms(use_true_random=True)
SOME_NAN, WITH_REWARDS = (0.0, 0.5, 1.0, NAN), (0.0, 0.3, 1.0)


# ---- advantages


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("fusion", FUSIONS)
@settings(max_examples=25, deadline=None)
@given(random=RANDOM, beta=st.sampled_from([0.5, 1.0, 3.0]))
def test_advantages_are_those_of_a_loop(fusion: str, how: str, random: Random, beta: float) -> None:
    rollouts, tokens = grow(random, SOME_NAN)
    own = {} if fusion == "uniform" else {"beta": beta, "edge_logprob": how}
    decision, _ = shaped(rollouts, tokens, built(BranchAdvantages, fusion=fusion, clip=1.0, **own))
    wanted = advantages_by_loops(rollouts, tokens, fusion, beta, how, clip=1.0)
    first = first_copies(rollouts, tokens)
    assert decision.keep_tokens.tolist() == first
    flat = grpo_advantages(rollouts)
    for i, (row, position) in enumerate(zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)):
        node = node_of(rollouts, row, position)
        a = wanted[node] if node is not None else 0.0 if math.isnan(rollouts.reward[row]) else float(flat[row])
        assert float(decision.advantages[i]) == pytest.approx(a if first[i] else 0.0, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(random=RANDOM, fusion=st.sampled_from(FUSIONS), width=st.sampled_from(WIDTHS))
def test_the_order_of_rows_does_not_matter(random: Random, fusion: str, width: str) -> None:
    rollouts, tokens = grow(random, WITH_REWARDS)
    order = torch.tensor(random.sample(range(len(rollouts)), len(rollouts)))
    place = torch.argsort(order)
    token_order = torch.sort(place[tokens.row], stable=True).indices
    methods = built(BranchAdvantages, fusion=fusion), built(BranchPruning, width=width, depths=(1,))
    one, _ = shaped(rollouts, tokens, *methods)
    two, _ = shaped(take_rows(rollouts, order), tokens.subset(token_order, place), *methods)
    assert two.keep_tokens.tolist() == one.keep_tokens[token_order].tolist()
    torch.testing.assert_close(two.advantages, one.advantages[token_order], atol=1e-9, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(random=RANDOM, fusion=st.sampled_from(FUSIONS))
def test_a_token_is_trained_once(random: Random, fusion: str) -> None:
    """Every live token of a tree in exactly one row, and never in one without a reward if another has it."""
    rollouts, tokens = grow(random, SOME_NAN)
    hole = torch.arange(len(tokens)) % 5 != 0  # tokens that left before
    tokens = tokens.replace(keep=hole)
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages, fusion=fusion))
    rows, places = tokens.row.tolist(), tokens.position.tolist()
    copies, kept = Counter[Any](), Counter[Any]()
    for i, (row, position) in enumerate(zip(rows, places, strict=True)):
        node = node_of(rollouts, row, position)
        key = (node, position) if node is not None else (row, position)
        copies[key] += bool(hole[i])
        kept[key] += bool(decision.keep_tokens[i])
        others = [
            j
            for j, (r, p) in enumerate(zip(rows, places, strict=True))
            if node is not None and hole[j] and p == position and node_of(rollouts, r, p) == node
        ]
        if decision.keep_tokens[i] and math.isnan(rollouts.reward[row]) and node is not None:
            assert all(math.isnan(rollouts.reward[rows[j]]) for j in others)
    assert all(kept[key] == (1 if n else 0) for key, n in copies.items())
    if int(hole.sum()):
        assert logged["branch_advantages/shared"] == pytest.approx(1 - sum(kept.values()) / int(hole.sum()))


@settings(max_examples=25, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.3, 1.0, NAN]), min_size=12, max_size=12),
    how=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
def test_one_split_at_the_root_is_grpo(rewards: list[float], how: Any) -> None:
    """With the host's eps, and whatever the average over tokens and rows."""
    rewards[0] = 0.5
    rows = range(12)
    ways = [{"nodes": [0, 1 + i % 4], "stops": [0, 1 + i % 3]} for i in rows]
    rollouts, tokens = batch(ways, rewards, [i // 4 for i in rows])
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages, eps=1e-4, clip=math.inf))
    flat = grpo_advantages(rollouts)
    torch.testing.assert_close(decision.advantages, flat[tokens.row], atol=1e-9, rtol=1e-9)
    assert decision.keep_tokens.all() and logged["branch_advantages/shared"] == 0
    both = [gradient(tokens, a, decision.keep_tokens, how) for a in (decision.advantages, flat[tokens.row])]
    torch.testing.assert_close(*both)


def gradient(tokens: Tokens, advantages: torch.Tensor, keep: torch.Tensor, how: Any) -> torch.Tensor:
    """Of the loss of one step with these advantages, at every token's log-prob."""
    rows, time = int(tokens.row.max()) + 1, int(tokens.position.max()) + 1
    mask, old, a = (torch.zeros(rows, time, dtype=torch.float64) for _ in range(3))
    where = tokens.row, tokens.position
    mask[where], old[where], a[where] = keep.double(), tokens.old_logprobs.double(), advantages
    new = old.clone().requires_grad_()
    loss = ppo_clip(new, old, a, 0.2, 0.2)
    trained = mask.sum(1) > 0
    aggregate(loss, mask, how, num_tokens=mask.sum(), num_rows=trained.sum(), max_length=time).backward()
    assert new.grad is not None
    return new.grad[where]


def test_every_token_weighs_the_same_in_both_averages() -> None:
    """Shared tokens once under a mean over tokens; all copies with their share under a mean over rows of one length."""
    ways = [{"nodes": [0, 1 + i // 2, 10 + i], "stops": [0, 4, 6]} for i in range(4)]
    rollouts, tokens = batch(ways, [1.0, 0.0, 0.25, 0.0])
    wanted = advantages_by_loops(rollouts, tokens)
    for shared, how, weight in (("first", "token-mean", 1 / 16), ("every", "seq-mean-token-mean", 1 / 24)):
        decision, _ = shaped(rollouts, tokens, built(BranchAdvantages, shared=shared))
        found = gradient(tokens, decision.advantages, decision.keep_tokens, how)
        per_token: dict[Any, float] = {}
        for i, (row, position) in enumerate(zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)):
            node = node_of(rollouts, row, position)
            per_token[node, position] = per_token.get((node, position), 0.0) + float(found[i])
        assert len(per_token) == 16
        for (node, _), value in per_token.items():
            assert value == pytest.approx(-weight * wanted[node])


@pytest.mark.parametrize("fusion", FUSIONS)
@settings(max_examples=15, deadline=None)
@given(rewards=st.lists(st.floats(-2, 2), min_size=8, max_size=8))
def test_properties_of_a_balanced_tree(fusion: str, rewards: list[float]) -> None:
    rollouts, tokens = batch(paper_tree((1, 2, 4), 7), rewards)
    decision, _ = shaped(rollouts, tokens, built(BranchAdvantages, fusion=fusion, clip=math.inf))
    by_depth = {d: decision.advantages[decision.keep_tokens & (tokens.position == d - 1)] for d in range(1, 8)}
    assert [len(a) for a in by_depth.values()] == [1, 2, 4, 4, 8, 8, 8]
    assert float(by_depth[1]) == 0  # before the first split there is nothing to compare
    for a in by_depth.values():
        assert float(a.sum()) == pytest.approx(0, abs=1e-6)  # A sums to 0 at every depth
    if fusion == "uniform":
        torch.testing.assert_close(by_depth[5], by_depth[7], atol=1e-9, rtol=1e-9)  # constant along the tail
        if torch.tensor(rewards).std() > 1e-3:
            torch.testing.assert_close(by_depth[7].std(), torch.tensor(1.0).double(), atol=1e-4, rtol=0)  # unbiased


@pytest.mark.parametrize("fusion", FUSIONS)
def test_equal_rewards_have_no_advantage(fusion: str) -> None:
    rollouts, tokens = batch(paper_tree((0, 1), 4), [0.1] * 4)
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages, fusion=fusion))
    assert not decision.advantages.any() and logged["branch_advantages/compared"] == 0


@settings(max_examples=15, deadline=None)
@given(random=RANDOM)
def test_path_weights_with_beta_0_are_uniform(random: Random) -> None:
    rollouts, tokens = grow(random, WITH_REWARDS)
    one, _ = shaped(rollouts, tokens, built(BranchAdvantages))
    two, _ = shaped(rollouts, tokens, built(BranchAdvantages, fusion="paths", beta=0.0))
    torch.testing.assert_close(one.advantages, two.advantages, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_a_leaf_without_a_reward_is_as_if_it_were_not_there(fusion: str) -> None:
    ways = paper_tree((0, 2), 4)
    rollouts, tokens = batch(ways, [1.0, NAN, 0.25, 0.5])
    less, few = batch([ways[i] for i in (0, 2, 3)], [1.0, 0.25, 0.5])
    one, _ = shaped(rollouts, tokens, built(BranchAdvantages, fusion=fusion))
    two, _ = shaped(less, few, built(BranchAdvantages, fusion=fusion))
    there = (tokens.row != 1) & (tokens.position > 1)  # the prefix of rows 0 and 1 is trained in row 0 in both
    torch.testing.assert_close(one.advantages[tokens.row != 1], two.advantages, atol=1e-9, rtol=1e-9)
    assert one.advantages[there].any() and not one.advantages[(tokens.row == 1) & (tokens.position > 1)].any()


def test_advantages_are_clipped() -> None:
    """One of 40 leaves has the reward: its advantage is 39/40 over the deviation, sqrt(1/40)."""
    ways = [{"nodes": [0, 1 + i], "stops": [0, 1]} for i in range(40)]
    rollouts, tokens = batch(ways, [1.0] + [0.0] * 39)
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages))
    assert float(decision.advantages[0]) == 5.0 and logged["branch_advantages/clipped"] == pytest.approx(1 / 41)
    free, _ = shaped(rollouts, tokens, built(BranchAdvantages, clip=math.inf))
    assert float(free.advantages[0]) == pytest.approx(39 / 40 / math.sqrt(1 / 40))


def test_groups_are_trees_of_their_own() -> None:
    ways = [{"nodes": [0, 1 + i], "stops": [0, 2]} for _ in range(2) for i in range(2)]
    rollouts, tokens = batch(ways, [1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1])
    decision, _ = shaped(rollouts, tokens, built(BranchAdvantages))
    assert decision.advantages[tokens.position == 0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5), 0, 0])
    assert decision.keep_tokens.all()


def test_rows_without_a_tree() -> None:
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0], meta={"branches": [None] * 4})
    tokens = make_tokens(rollouts)
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages), built(BranchPruning))
    assert logged == {"branch_advantages/in_trees": 0}
    torch.testing.assert_close(decision.advantages, grpo_advantages(rollouts)[tokens.row])


def test_tokens_after_the_last_node_are_no_part_of_the_tree() -> None:
    rollouts = make_rollouts([1.0, 0.0], [0, 0], lengths=[3, 3], meta={"branches": [{"nodes": [0], "stops": [2]}] * 2})
    tokens = make_tokens(rollouts)
    decision, _ = shaped(rollouts, tokens, built(BranchAdvantages))
    assert decision.keep_tokens.tolist() == [True, True, True, False, False, True]
    flat = grpo_advantages(rollouts)
    assert decision.advantages.tolist() == pytest.approx([0, 0, float(flat[0]), 0, 0, float(flat[1])])


@pytest.mark.parametrize("fusion", ["paths", "levels"])
def test_weights_of_very_unlikely_ways(fusion: str) -> None:
    """Log-probs beyond the range of exp: the likelier child has e / (1 + e) of the weight."""
    ways = [{"nodes": [0, 1, 2 + i], "stops": [0, 1, 2]} for i in range(2)] + [
        {"nodes": [0, 9, 10], "stops": [0, 1, 2]}
    ]
    rollouts, tokens = batch(ways, [1.0, 0.0, 0.5])
    old = torch.tensor([-2000.0, -2000.0, -2000.0, -2001.0, -3000.0, -3000.0])
    method = built(BranchAdvantages, fusion=fusion)
    trees = Trees.of(rollouts, tokens)
    assert trees is not None
    value = method._values(trees, rollouts.reward, tokens.replace(old_logprobs=old))
    assert value[1:].tolist() == pytest.approx([math.e / (1 + math.e), 0.5, 1, 0, 0.5])


def test_copies_leave_and_so_do_their_rows() -> None:
    """Two rows that ended before the last split are the same: one of them is trained."""
    ways = [{"nodes": [0, 1 + i // 2], "stops": [0, 3]} for i in range(4)]
    rollouts, tokens = batch(ways, [1.0, 1.0, 0.0, 0.0])
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages))
    assert decision.trained.tolist() == [True, False, True, False] == decision.stays.tolist()
    assert logged["branch_advantages/shared"] == 0.5


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ([{"nodes": [0]}], r"has \{'nodes': \[0\]\} in the column `branches`"),
        ([{"nodes": [0, 1], "stops": [1]}], "a node and a stop of each depth"),
        ([{"nodes": [], "stops": []}], "must have a node and a stop of each depth"),
        (["0"], "Let `branch_text_rollout` or `branch_rollout` make the rollouts"),
        ([{"nodes": [0, 1], "stops": [3, 2]}], r"the stops \[3, 2\] .* must not fall"),
        (
            [{"nodes": [0, 1], "stops": [0, 2]}, {"nodes": [1, 2], "stops": [0, 2]}],
            "The rows of a tree do not fit together.*a number of its own",
        ),
        (
            [{"nodes": [0, 1], "stops": [0, 2]}, {"nodes": [0, 1], "stops": [1, 2]}],
            "or with other tokens",
        ),
    ],
)
def test_notes_that_make_no_tree_are_refused(ways: list[Any], said: str) -> None:
    rollouts = make_rollouts([1.0] * len(ways), meta={"branches": ways}, lengths=[2] * len(ways))
    with pytest.raises(MethodError, match=said):
        shaped(rollouts, make_tokens(rollouts), built(BranchAdvantages))


# ---- pruning


def edges(decision: Any) -> int:
    return int(decision.keep_tokens.sum())


def test_counts_of_the_paper() -> None:
    """T = 20, B = {0, 3, 6, 9}, K = 2: 219 nodes, 218 edges, 16 leaves; 138 edges are left of it by five depths."""
    ways = paper_tree()
    rollouts, tokens = batch(ways, torch.linspace(0, 1, 16).tolist())
    assert len(ways) == 16 and len(nodes_of(rollouts, tokens)) == 219 == round(16 * 13.69)
    whole, logged = shaped(rollouts, tokens, built(BranchAdvantages))
    assert edges(whole) == 218 and logged["branch_advantages/shared"] == pytest.approx(1 - 218 / 320)
    for methods in (
        (built(BranchPruning, depths=tuple(range(15, 20)), width="none"),),
        (built(BranchPruning),),
        (built(BranchPruning, code_compat=True),),
        (built(BranchPruning, width="extreme"),),
    ):
        pruned, logged = shaped(rollouts, tokens, built(BranchAdvantages), *methods)
        assert edges(pruned) == 138 and 138 / 16 == 8.625
        assert logged["branch_pruning/nodes"] == 218 and logged["branch_pruning/pruned"] == pytest.approx(80 / 218)
        kept = pruned.keep_tokens
        assert (whole.keep_tokens | ~kept).all()
        torch.testing.assert_close(pruned.advantages[kept], whole.advantages[kept])  # the others are unchanged


@pytest.mark.parametrize(
    ("batch_number", "params", "wanted"),
    [
        (0, {}, range(15, 20)),
        (28, {}, range(15, 20)),
        (29, {}, range(14, 19)),  # step 30
        (89, {}, range(12, 17)),
        (299, {}, range(9, 14)),  # it stops at 9, the last split
        (299, {"stop_depth": 14}, range(14, 19)),
        (299, {"stop_depth": 16}, range(15, 20)),
        (299, {"interval": None}, range(15, 20)),
        (149, {"until": 0.5}, range(10, 15)),
        (150, {"until": 0.5}, ()),
        (0, {"until": 0.0}, ()),
    ],
)
def test_the_window_moves_with_the_batches(batch_number: int, params: dict[str, Any], wanted: Any) -> None:
    rollouts, tokens = batch(paper_tree(), torch.linspace(0, 1, 16).tolist(), batch=batch_number)
    own = {"depths": tuple(range(15, 20)), "interval": 30, "width": "none", **params}
    decision, logged = shaped(rollouts, tokens, built(BranchAdvantages), built(BranchPruning, **own), total_batches=300)
    depth = tokens.position + 1
    assert set(depth.tolist()) - set(depth[decision.keep_tokens].tolist()) == set(wanted)
    if wanted:
        assert logged["branch_pruning/shift"] == 15 - wanted[0]


def by_hand(params: dict[str, Any], rewards: list[float], ways: list[Any] | None = None) -> list[list[int]]:
    """Depths that each row trains."""
    rollouts, tokens = batch(paper_tree((0, 2), 6) if ways is None else ways, rewards)
    decision, _ = shaped(rollouts, tokens, built(BranchAdvantages), built(BranchPruning, **params))
    return [(tokens.position[(tokens.row == i) & decision.keep_tokens] + 1).tolist() for i in range(len(rollouts))]


def test_width_pruning_by_hand() -> None:
    """Splits at steps 0 and 2: the children of the last split have depth 3, their tails the depths 4 to 6."""
    rewards = [0.1, 0.9, 0.8, 0.3]
    assert by_hand({}, rewards) == [[1, 2, 3], [3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [3]]
    assert by_hand({"code_compat": True, "ratio": 0.7}, rewards) == [
        [1, 2, 3, 4, 5],
        [3, 4, 5],
        [1, 2, 3, 4, 5],
        [3, 4, 5],
    ]
    # 12 tail nodes: 5 stay, the 2 best (of row 1) and the 3 worst (of row 0)
    assert by_hand({"width": "extreme", "ratio": 0.45}, rewards) == [[1, 2, 3, 4, 5, 6], [3, 4, 5], [1, 2, 3], [3]]
    # depth first: of 8 tail nodes 4 stay
    assert by_hand({"width": "extreme", "depths": (4,)}, rewards) == [[1, 2, 3, 5, 6], [3, 5, 6], [1, 2, 3], [3]]
    assert by_hand({"width": "extreme", "depths": (4,), "ratio": 0.25}, rewards) == [
        [1, 2, 3, 6],
        [3, 5],
        [1, 2, 3],
        [3],
    ]
    assert by_hand({"width": "extreme", "ratio": 0.01}, rewards) == [[1, 2, 3, 6], [3, 4], [1, 2, 3], [3]]
    # equal children: the first keeps its tail; one without a reward never does
    assert by_hand({}, [0.5, 0.5, NAN, 0.0]) == [[1, 2, 3, 4, 5, 6], [3], [3], [1, 2, 3, 4, 5, 6]]


def test_segments_behind_the_last_split_are_tails_themselves() -> None:
    ways = [{"nodes": [0, 1 + i // 2, 10 + i], "stops": [1, 2, 4]} for i in range(4)]
    assert by_hand({}, [0.1, 0.9, 0.8, 0.3], ways) == [[1, 2], [3, 4], [2, 3, 4], []]
    assert by_hand({"depths": (0,), "width": "none"}, [0.1, 0.9, 0.8, 0.3], ways) == [
        [2, 3, 4],
        [3, 4],
        [2, 3, 4],
        [3, 4],
    ]
    without_split = [{"nodes": [0, 1], "stops": [1, 4]}] * 2
    assert by_hand({}, [1.0, 0.0], without_split) == [[1, 2, 3, 4], []]  # no split, no tail


@settings(max_examples=25, deadline=None)
@given(random=RANDOM, width=st.sampled_from(WIDTHS), depths=st.sampled_from([(1,), (0, 2), (5,)]))
def test_pruning_never_changes_what_stays(random: Random, width: str, depths: tuple[int, ...]) -> None:
    """And Parent-Top1 takes out what a loop finds."""
    rollouts, tokens = grow(random, SOME_NAN)
    whole, _ = shaped(rollouts, tokens, built(BranchAdvantages))
    pruned, _ = shaped(rollouts, tokens, built(BranchAdvantages), built(BranchPruning, width=width, depths=depths))
    kept = pruned.keep_tokens
    assert (whole.keep_tokens | ~kept).all()
    torch.testing.assert_close(pruned.advantages[kept], whole.advantages[kept])
    nodes = nodes_of(rollouts, tokens)
    left = worse_tails(rollouts, tokens, advantages_by_loops(rollouts, tokens)) if width == "parent_top1" else set()
    for i in whole.keep_tokens.nonzero()[:, 0].tolist():
        node = node_of(rollouts, int(tokens.row[i]), int(tokens.position[i]))
        leaves = node is not None and (nodes[node].depth in depths or node in left)
        assert (width == "extreme" and not leaves) or bool(kept[i]) != leaves


def test_parameters_that_prune_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="`depths` is empty and `width` is 'none'"):
        built(BranchPruning, width="none")
    with pytest.raises(ConfigError, match="`interval` is 30, and there are no `depths` to move"):
        built(BranchPruning, interval=30)


def test_shares_of_nodes_are_those_of_the_authors_float64() -> None:
    """In float32, 0.58 of 50 would be 29."""
    rank = torch.arange(50, dtype=torch.float64)
    tails = Tails(None, rank, torch.ones(50, dtype=torch.bool), torch.zeros(50, dtype=torch.int64))
    assert int(tails.best_of_each(torch.ones(50, dtype=torch.bool), 0.58).sum()) == int(0.58 * 50) == 28
