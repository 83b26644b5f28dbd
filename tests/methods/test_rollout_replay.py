"""Rollout replay (arXiv 2506.05316): the buffer equals a plain list, and a stored group returns as it was."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow, Rollouts, TokenIds, Tokens
from rl_plugins.methods.rollout_replay import Buffer, RolloutReplay
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, one_step, start_stack

SIZE, PROMPTS = 3, 12
NAMES = ("reward_0", "reward_1")


def replay(**params: Any) -> RolloutReplay:
    return RolloutReplay(build_params(RolloutReplay.Params, params, "rollout_replay"))


class Host:
    """Generates what a plan says: tokens, log-probs, versions and rewards from a generator; given completions as they
    are. Its batch number is the published weights."""

    def __init__(self, method: Method, seed: int = 0, groups: int = 4, levels: int = 2, sizes: bool = False) -> None:
        self.stack = start_stack(method, seed=seed, run=make_run(group_size=SIZE))
        self.groups, self.levels, self.sizes = groups, levels, sizes
        self.made: list[dict[str, Any]] = []  # every fresh group ever made, by prompt and batch

    def batch(self) -> tuple[list[PlanRow], Rollouts, dict[str, float]]:
        stack, groups = self.stack, self.groups
        rng = np.random.default_rng([7, stack.batch])
        proposal = rng.permutation(PROMPTS)[:groups].tolist()
        plan = list(first_plan(stack, proposal, SIZE, SIZE * groups, PROMPTS).rows)
        rows, now = self.rows_of(plan, rng), stack.batch
        account = Rounds(stack, plan, SIZE, SIZE * groups, PROMPTS)
        while more := account.more(
            torch.tensor([p.group for p, _ in rows]), torch.tensor([sum(r["rewards"]) for _, r in rows]).double()
        ):
            rows += self.rows_of(list(more), rng)
        plan = account.rows
        rollouts, tokens = self.as_rollouts(rows, now)
        one_step(stack, rollouts, tokens, budget=max(len(rollouts), SIZE * groups))
        assert stack.batch == now + 1
        return plan, rollouts, combine([stack.metrics.take()])

    def rows_of(self, plan: list[PlanRow], rng: np.random.Generator) -> list[Any]:
        now, rows = self.stack.batch, []
        for p in plan:
            n = p.n + p.spare if p.given or not self.sizes else int(rng.integers(1, p.n + 1))
            if not p.given:
                self.made.append({"prompt": p.prompt_index, "batch": now, "rows": []})
            for i in range(n):
                if i < len(p.given):
                    c = p.given[i]
                    row = {
                        "tokens": c.tokens,
                        "logprobs": c.logprobs,
                        "versions": c.versions,
                        "observed": c.observed or (False,) * len(c.tokens),
                        "rewards": [(c.rewards or {})[name] for name in NAMES],
                    }
                else:
                    length = int(rng.integers(1, 6))
                    observed = [bool(j % 3 == 1) for j in range(length)]
                    row = {
                        "tokens": tuple(rng.integers(5, 50, length).tolist()),
                        "logprobs": tuple(0.0 if o else float(np.float32(-rng.random())) for o in observed),
                        "versions": tuple([max(0, now - int(rng.integers(0, 2)))] * length),
                        "observed": tuple(observed),
                        "rewards": rng.integers(0, self.levels, 2).tolist(),
                    }
                    self.made[-1]["rows"].append(row)
                rows.append((p, row))
        return rows

    def as_rollouts(self, rows: list[Any], now: int) -> tuple[Rollouts, Tokens]:
        rollouts = make_rollouts(
            [row["rewards"] for _, row in rows],
            [p.group for p, _ in rows],
            lengths=[row["observed"].count(False) for _, row in rows],
            prompt_index=[p.prompt_index for p, _ in rows],
            payload=[p.payload for p, _ in rows],
            version=torch.tensor([min(row["versions"]) for _, row in rows]),
            current_version=now,
            batch=now,
            token_ids=TokenIds.cat(
                [torch.tensor([3, p.prompt_index]) for p, _ in rows],
                [torch.tensor(row["tokens"]) for _, row in rows],
                [torch.tensor(row["observed"]) for _, row in rows],
            ),
        )
        places = [(j, row) for _, row in rows for j, o in enumerate(row["observed"]) if not o]
        tokens = make_tokens(
            rollouts,
            position=torch.tensor([j for j, _ in places]),
            rollout_logprobs=torch.tensor([row["logprobs"][j] for j, row in places]),
            version=torch.tensor([row["versions"][j] for j, row in places]),
        )
        return rollouts, tokens


def stored(stack: MethodStack) -> list[dict[str, Any]]:
    """What the buffer holds, as plain lists."""
    if "groups" not in stack.methods[0].state:
        return []
    buffer = Buffer.of_state(stack.methods[0].state["groups"])
    return [
        {
            "prompt": int(buffer.prompt[g]),
            "rows": [
                {
                    "tokens": tuple(c["tokens"].tolist()),
                    "logprobs": tuple(c["logprobs"].tolist()),
                    "versions": tuple(c["versions"].tolist()),
                    "observed": tuple(c["observed"].tolist()),
                    "rewards": c["rewards"].tolist(),
                }
                for c in buffer.completions(g)
            ],
        }
        for g in range(len(buffer))
    ]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.25, 0.5, 0.75]),
    limit=st.integers(1, 9),
    levels=st.sampled_from([1, 2, 3]),
    staleness=st.none() | st.integers(1, 4),
    sizes=st.booleans(),
)
def test_the_buffer_equals_a_plain_list(
    seed: int, share: float, limit: int, levels: int, staleness: int | None, sizes: bool
) -> None:
    method = replay(fresh_share=share, buffer_groups=limit, max_staleness=staleness)
    host = Host(method, seed, levels=levels, sizes=sizes)
    expected: list[dict[str, Any]] = []
    for batch in range(7):
        begun = len(host.made)
        before = list(expected)
        plan, _, logged = host.batch()
        given = [p for p in plan if p.given]
        assert [p.given for p in plan] == sorted((p.given for p in plan), key=bool)  # fresh ones come first
        for p in given:
            (was,) = [g for g in before if g["prompt"] == p.prompt_index]  # each prompt once in the buffer
            for c, row in zip(p.given, was["rows"], strict=True):
                assert (c.tokens, c.versions, list((c.rewards or {}).values())) == (
                    row["tokens"],
                    row["versions"],
                    row["rewards"],
                )
                assert c.logprobs == row["logprobs"]
                assert (c.observed or (False,) * len(c.tokens)) == row["observed"]
                if staleness is not None:
                    assert batch - min(row["versions"]) <= staleness
        rows = sum(p.n for p in plan)
        assert sum(p.n for p in given) <= (1 - share) * SIZE * 4 + 1e-9
        assert len({p.group for p in plan}) == len(plan) and len({p.prompt_index for p in given}) == len(given)
        if batch < 2:
            assert not given
        elif staleness is None:
            assert len(given) == min(len(before), int((1 - share) * 4 + 1e-9))
        assert rows == SIZE * 4  # fresh prompts fill what is missing
        assert all(len(p.given) in (0, SIZE) for p in plan)
        # the loop: newest per prompt, no equal rewards, the oldest leave
        for made in host.made[begun:]:
            expected = [g for g in expected if g["prompt"] != made["prompt"]]
        for made in sorted(
            host.made[begun:], key=lambda g: [p.group for p in plan if not p.given and p.prompt_index == g["prompt"]][0]
        ):
            total = [sum(row["rewards"]) for row in made["rows"]]
            readable = all(row["observed"].count(False) for row in made["rows"])
            if max(total) > min(total) and readable and len(total) == SIZE:
                expected.append({"prompt": made["prompt"], "rows": made["rows"]})
        expected = expected[-limit:]
        if staleness is not None:
            expected = [g for g in expected if batch - min(min(r["versions"]) for r in g["rows"]) <= staleness]
        assert stored(host.stack) == expected
        assert logged["rollout_replay/stored"] == len(expected)
        trained = sum(len(p.given) for p in given)
        made_rows = sum(len(g["rows"]) for g in host.made[begun:])
        assert logged["rollout_replay/replayed"] == pytest.approx(trained / (trained + made_rows))


def test_half_of_the_batch_is_replayed_and_its_age_is_told() -> None:
    host = Host(replay(), levels=9, groups=4)
    seen = [host.batch() for _ in range(5)]
    assert [round(logged["rollout_replay/replayed"], 3) for _, _, logged in seen] == [0, 0, 0.5, 0.5, 0.5]
    for plan, rollouts, logged in seen[2:]:
        age = rollouts.staleness[torch.tensor([bool(p.given) for p in plan]).repeat_interleave(SIZE)].double()
        assert logged["rollout_replay/staleness"] == pytest.approx(float(age.mean())) and float(age.mean()) >= 1
        assert logged["rollout_replay/oldest"] == float(age.max())
        assert [len(p.given) for p in plan] == [0, 0, SIZE, SIZE]


def test_stored_groups_take_the_places_of_groups_without_signal() -> None:
    """As many as there are; then groups of equal rewards stay, the last ones, and the batch is full."""
    host, taken, stayed = Host(replay(replaces="no_signal", buffer_groups=1), groups=6), 0, 0
    kept: list[Any] = []
    method = host.stack.methods[0]
    method.observe, observe = lambda r, *more: (kept.append(r.kept), observe(r, *more)), method.observe
    for number in range(20):
        waiting = stored(host.stack)
        plan, rollouts, logged = host.batch()
        fresh = [p for p in plan if not p.given]
        assert len(fresh) == host.groups and all(p.n == (0 if number >= 2 and waiting else SIZE) for p in fresh)
        reward = {g: rollouts.reward[rollouts.group == g].tolist() for g in rollouts.groups.ids.tolist()}
        equal = [p.group for p in fresh if len(set(reward[p.group])) == 1]
        replayed = [p for p in plan if p.given]
        assert len(replayed) == (min(len(equal), len(waiting)) if number >= 2 else 0)
        assert all({c.tokens for c in p.given} in [{r["tokens"] for r in g["rows"]} for g in waiting] for p in replayed)
        gone = set(equal[: len(replayed)])
        assert kept[-1].tolist() == [g not in gone for g in rollouts.group.tolist()]
        assert int(kept[-1].sum()) == SIZE * host.groups
        assert logged["rollout_replay/replayed"] == pytest.approx(len(replayed) / host.groups)
        taken, stayed = taken + len(replayed), stayed + (number >= 2 and len(equal) > len(replayed))
    assert taken > 3 and stayed, "both happened"


def test_a_fresh_share_of_one_is_the_hosts_own_batch() -> None:
    method = replay(fresh_share=1)
    assert not method.brings and method.needs == frozenset()
    host = Host(method)
    for _ in range(4):
        plan, _, logged = host.batch()
        assert not any(p.given for p in plan) and not logged
    assert host.stack.methods[0].state == {}


def test_a_resumed_run_replays_the_same_groups(tmp_path: Any) -> None:
    whole = Host(replay(), levels=5)
    plans = [whole.batch()[0] for _ in range(6)]
    first, second = Host(replay(), levels=5), Host(replay(), levels=5)
    for _ in range(3):
        first.batch()
    save_state(tmp_path, first.stack.state_dict("data"))
    second.stack.load_state_dict(load_state(tmp_path) or {}, "data")
    again = [second.batch()[0] for _ in range(3)]
    assert again == plans[3:] and all(any(p.given for p in plan) for plan in again)


def test_what_is_saved_stays_as_it_was_when_the_buffer_goes_on() -> None:
    host = Host(replay(), levels=5)
    for _ in range(2):
        host.batch()
    saved, content = host.stack.state_dict("data"), stored(host.stack)
    for _ in range(4):
        host.batch()
    other = Host(replay(), levels=5)
    other.stack.load_state_dict(saved, "data")
    assert stored(other.stack) == content


def start_pairs(*others: Method, **params: Any) -> MethodStack:
    """A run with groups of 2."""
    return start_stack(replay(**params), *others, run=make_run(group_size=2))


def given_rows(rewards: list[float], **changes: Any) -> tuple[Rollouts, Tokens]:
    host = Host(replay())
    rows = [
        (
            PlanRow(i // 2, i // 2, 2),
            {"tokens": (7, 8), "logprobs": (-1.0, -2.0), "versions": (0, 0), "observed": (False, False)}
            | {"rewards": [r, 0 * r]},
        )
        for i, r in enumerate(rewards)
    ]
    rollouts, tokens = host.as_rollouts(rows, 0)
    return rollouts.replace(**changes), tokens


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([1, 1, 0, 0], []),
        ([0.5, 0.5, 0, 1], [1]),  # a mean of a half without variance is of no use, and one with is
        ([1, 0, 0.5, 0.25], [0, 1]),
        ([math.nan, 1, math.nan, math.nan], []),
    ],
)
def test_groups_of_equal_rewards_are_not_stored(rewards: list[float], kept: list[int]) -> None:
    stack = start_pairs()
    one_step(stack, *given_rows(rewards))
    assert [g["prompt"] for g in stored(stack)] == kept
    assert combine([stack.metrics.take()])["rollout_replay/constant"] == 1 - len(kept) / 2


def test_a_group_of_equal_rewards_hides_the_older_one_of_its_prompt() -> None:
    stack = start_pairs()
    one_step(stack, *given_rows([1, 0, 1, 0]))
    one_step(stack, *given_rows([1, 1, 1, 0]))
    assert [g["prompt"] for g in stored(stack)] == [1]


def test_what_cannot_be_replayed_is_not_stored() -> None:
    rollouts, tokens = given_rows([1, 0, 1, 0])
    unknown = tokens.rollout_logprobs.clone()  # type: ignore[union-attr]
    unknown[0] = math.nan
    forced = tokens.forced.clone()
    forced[0] = True
    foreign = rollouts.prompt_index.clone()
    foreign[:2] = -1
    cases = [
        (rollouts, tokens.replace(rollout_logprobs=unknown)),
        (rollouts, tokens.replace(forced=forced)),
        (rollouts.replace(prompt_index=foreign), tokens),
        (rollouts.replace(index=torch.tensor([0, 1, 0, 0])), tokens),
    ]
    for r, t in cases:
        stack = start_pairs()
        one_step(stack, r, t)
        assert [g["prompt"] for g in stored(stack)] == [1]
        assert combine([stack.metrics.take()])["rollout_replay/unstorable"] == 0.5


def test_a_group_of_which_rollouts_left_is_not_stored() -> None:
    class Leaves(Method):
        name = "leaves"

        def select(self, rollouts: Rollouts) -> Any:
            return torch.tensor([True, True, False, False, True, True, False, True, False])

    stack = start_pairs(Leaves())
    rollouts, tokens = given_rows([1, 0, 1, 0, 1, 0, 1, 1, 0])
    rollouts = rollouts.replace(group=torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 3]))
    one_step(stack, rollouts.replace(prompt_index=rollouts.group), tokens)
    assert [(g["prompt"], len(g["rows"])) for g in stored(stack)] == [(0, 2), (2, 2)]
    assert combine([stack.metrics.take()])["rollout_replay/unstorable"] == pytest.approx(1 / 3)


def test_of_several_groups_of_one_prompt_the_last_is_stored() -> None:
    stack = start_pairs()
    rollouts, tokens = given_rows([1, 0, 0.25, 0.5, 0, 0.75])
    one_step(stack, rollouts.replace(prompt_index=torch.tensor([5, 5, 6, 6, 5, 5])), tokens)
    found = [(g["prompt"], [row["rewards"][0] for row in g["rows"]]) for g in stored(stack)]
    assert found == [(6, [0.25, 0.5]), (5, [0, 0.75])]


def test_after_a_resume_with_another_group_size_older_groups_are_not_drawn() -> None:
    host = Host(replay(), levels=9)
    for _ in range(3):
        host.batch()
    plan = host.stack.call("plan", host.stack.methods[0], make_plan(4, SIZE + 1).replace(batch=3))
    assert len(stored(host.stack)) > 2 and not any(row.given for row in plan.rows)


def publications(method: RolloutReplay, ahead: int, per: int, batches: int) -> list[int]:
    """Largest age of the replayed rows of each batch, 0 without one, of a host that publishes every `per` batches.
    It plans those batches together, `ahead` publications before it trains them."""
    host, waiting, ages = Host(method, levels=9, groups=8), list[list[PlanRow]](), list[int]()
    for batch in range(batches):
        now = batch // per
        for step in range(ahead + 1) if batch == 0 else [0] * (batch % per == 0):
            for part in range(per):
                proposal = np.random.default_rng([batch, step, part]).permutation(PROMPTS)[:8].tolist()
                waiting.append(list(first_plan(host.stack, proposal, SIZE, 8 * SIZE, PROMPTS).rows))
        plan = waiting.pop(0)
        rollouts, tokens = host.as_rollouts(host.rows_of(plan, np.random.default_rng(batch)), host.stack.batch)
        fresh = torch.tensor([not p.given for p in plan]).repeat_interleave(SIZE)
        version = torch.where(fresh, torch.tensor(max(0, now - ahead)), rollouts.version)
        versions = torch.where(fresh[tokens.row], version[tokens.row], tokens.version)
        rollouts = rollouts.replace(version=version, newest_version=version, current_version=now)
        one_step(host.stack, rollouts, tokens.replace(version=versions), budget=len(rollouts))
        ages.append(int(rollouts.staleness[~fresh].max()) if bool((~fresh).any()) else 0)
    return ages


@pytest.mark.parametrize(("ahead", "per"), [(0, 1), (0, 2), (0, 3)])
def test_no_row_is_older_than_the_bound(ahead: int, per: int) -> None:
    ages = publications(replay(max_staleness=2), ahead, per, 24)
    assert max(ages) == 2 and max(publications(replay(), ahead, per, 24)) > 2


@pytest.mark.parametrize("per", [1, 2])
def test_where_batches_wait_the_bound_holds_once_the_delay_was_seen(per: int) -> None:
    ahead, method = 2, replay(max_staleness=5)
    ages = publications(method, ahead, per, 40)
    first = next(i for i, age in enumerate(ages) if age)
    assert method.state["delay"] == ahead
    assert max(ages[: first + (ahead + 1) * per]) <= 5 + ahead
    assert max(ages[first + (ahead + 1) * per :]) == 5


def test_another_prompt_under_the_same_number_is_an_error() -> None:
    rollouts, tokens = given_rows([1, 0])
    same = zlib.crc32(torch.tensor([3, 0]).numpy().tobytes())
    one_step(start_stack(replay()), rollouts.replace(payload=[{"rollout_replay": (same, 0)}] * 2), tokens)
    with pytest.raises(MethodError, match="prompt 0 is not the one that the stored rollouts answered"):
        one_step(start_stack(replay()), rollouts.replace(payload=[{"rollout_replay": (same + 1, 0)}] * 2), tokens)


def test_an_asynchronous_host_gets_as_many_prompts_of_the_same_size() -> None:
    host = Host(replay(), levels=9)
    for _ in range(3):
        host.batch()
    plans = [first_plan(host.stack, list(range(4)), SIZE, 4 * SIZE, PROMPTS).rows for _ in range(3)]
    drawn = [[p.prompt_index for p in plan if p.given] for plan in plans]
    assert all(len(plan) == 4 and all(p.n == SIZE for p in plan) for plan in plans)
    assert all(len(d) == 2 for d in drawn) and len({tuple(d) for d in drawn}) > 1  # each plan draws anew


def test_beside_prompts_that_are_not_trained_yet_the_whole_batch_is_shared() -> None:
    """A method with rounds plans rows of no trained rollout first: the share is of what may be trained."""
    host = Host(replay(), levels=9)
    for _ in range(3):
        host.batch()
    plan = make_plan(4, SIZE)
    plan = plan.replace(rows=tuple(r.replace(n=0, spare=SIZE) for r in plan.rows), batch=3)
    new = host.stack.call("plan", host.stack.methods[0], plan)
    assert [(r.n, r.spare, len(r.given)) for r in new.rows] == [(0, SIZE, 0)] * 4 + [(SIZE, 0, SIZE)] * 2
    assert len({r.group for r in new.rows}) == 6


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_compaction_changes_nothing_that_is_read(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    buffer, plain, number = Buffer.empty(1), list[Any](), 0
    for _ in range(data.draw(st.integers(1, 6))):
        sizes = rng.integers(1, 4, int(rng.integers(0, 4)))
        lengths = rng.integers(1, 6, sizes.sum())
        values = torch.arange(number, number + int(lengths.sum()))
        number += len(values)
        of = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        per = torch.zeros(len(sizes), dtype=torch.int64).index_add_(0, of, torch.from_numpy(lengths))
        prompts = torch.arange(len(sizes))
        buffer = buffer.add(
            Buffer(
                prompts,
                prompts,
                prompts,
                torch.from_numpy(sizes).long(),
                torch.zeros_like(prompts),
                torch.cumsum(per, 0) - per,
                torch.from_numpy(lengths),
                torch.from_numpy(lengths).double()[:, None],
                ({"numbers": torch.stack([values, values, values % 2]).int(), "logprobs": -values.float()},),
            )
        )
        plain += [p.tolist() for p in torch.split(values, per.tolist())]
        mask = torch.from_numpy(rng.random(len(plain)) < 0.6)
        plain = [p for p, m in zip(plain, mask.tolist(), strict=True) if m]
        buffer = buffer.keep(mask).compact()
        got = [[t for c in buffer.completions(g) for t in c["tokens"].tolist()] for g in range(len(buffer))]
        assert got == plain
        live = sum(map(len, plain))
        assert sum(s["logprobs"].numel() for s in buffer.stores) <= 2 * live


# ---- what the stack says


def capabilities(**changes: Any) -> HostCapabilities:
    values: dict[str, Any] = dict(
        name="trl",
        version="0",
        hooks=["plan", "select", "observe", "shape"],
        missing_hooks={},
        eval_hooks=(),
        missing_signals={},
        columns=None,
        options={},
    )
    return HostCapabilities(**(values | changes))


class Corrects(Method):
    name = "corrects"
    corrects_sampling = True

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> None:
        return None


def test_replay_without_a_correction_is_warned_of(caplog: Any) -> None:
    preflight(MethodStack([replay()]), capabilities())
    assert "`rollout_replay` trains on rollouts of older policies, and nothing in this run weighs them" in caplog.text
    caplog.clear()
    preflight(MethodStack([replay(), Corrects()]), capabilities())
    preflight(MethodStack([replay()]), capabilities(importance_weights={"rollout_is": "token"}))
    preflight(MethodStack([replay(fresh_share=1)]), capabilities())
    assert not caplog.text
