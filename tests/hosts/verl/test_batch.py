"""One batch of the verl adapter without Ray: a queue in memory, rows that agent loops made in every odd way."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import raises

os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "trl"))

import probes
from memory_queue import MemoryQueue
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.rollouts import Completion, Plan, PlanRow, Shape
from rl_plugins.methods.process_supervision import ProcessSupervision
from rl_plugins.runtime import registry
from rl_plugins.runtime.costs import Costs
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state
from rl_plugins.testing import make_run, start_stack
from rl_plugins.testing.engine import CharChat
from rl_plugins.verl import batch as module
from rl_plugins.verl.batch import Decided, Decisions, Selected, clean_padding, logprob_multiple, whole_group_order
from rl_plugins.verl.capabilities import Known, Reader
from rl_plugins.verl.config import Settings, compose
from rl_plugins.verl.prompts import COLUMN, MADE, PLANNED_AGENT, PROMPT_INDEX, STEPS, PromptBatches, number_rows
from rl_plugins.verl.rows import REAL, column_of, flat
from rl_plugins.verl.saved import saved_costs
from rl_plugins.verl.trainer import MethodsSync

pytestmark = pytest.mark.host


@pytest.fixture(autouse=True, scope="module")
def _probes():
    known = registry._entry_points
    probes.register()
    yield
    registry._entry_points = known


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> MemoryQueue:
    made = MemoryQueue()
    monkeypatch.setattr(module, "tq", made)
    return made


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def batch_decode(self, ids: Any, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(map(str, row)) for row in ids]


def config(*overrides: str) -> Any:
    return compose(
        [
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "data.max_response_length=6",
            "data.train_batch_size=2",
            *overrides,
        ]
    )


def row(group: int, reward: float, length: int = 3, wave: str = "w", **changes: Any) -> dict[str, Any]:
    scores = torch.zeros(length)
    scores[-1] = reward
    note = {
        "prompt_index": 10 + group,
        "wave": wave,
        "group": group,
        "place": group,
        "round": 0,
        "prefix": [],
        "max_tokens": None,
        "given": [],
        "payload": None,
    }
    return {
        "responses": torch.arange(2, 2 + length),
        "response_mask": torch.ones(length, dtype=torch.int64),
        "loss_mask": torch.ones(length, dtype=torch.int64),
        "rm_scores": scores,
        "advantages": torch.full((length,), float("nan")),
        "extra_fields": {},
        COLUMN: {**note, **changes},
    }


def run(
    queue: MemoryQueue,
    rows: dict[str, dict[str, Any]],
    *methods: str,
    rows_of_batch: int = 4,
    config: Any = None,
    stack: MethodStack | None = None,
) -> tuple[Selected, KVBatchMeta, Decided]:
    """Selection and settlement of these rows; returns the batch between them, too."""
    queue.put_rows(rows)
    tags = [{"global_steps": 1, "min_global_steps": 0} for _ in rows]
    batch = KVBatchMeta(partition_id="train", keys=list(rows), tags=tags)
    stack = stack or Settings(methods or ("noop",)).stack()
    mine = Decisions(stack, config or globals()["config"](), {}, Tokenizer(), rows_of_batch)
    selected = mine.select(batch)
    before = KVBatchMeta(partition_id="train", keys=list(selected.batch.keys), tags=selected.batch.tags)
    return selected, before, mine.decide_advantages(selected.batch, selected)


def test_a_program_that_makes_no_row_at_all_is_named(queue: MemoryQueue) -> None:
    class Nothing(probes.Probe):
        name = "nothing"

        def rollout(self, prompt):
            yield []
            return []

    with pytest.raises(MethodError, match="`nothing` returned something illegal from `rollout`: no rollout"):
        run(queue, {}, stack=MethodStack([Nothing()]))


def test_decisions_by_rows_fetch_notes_once_and_no_tokens(queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes hold all completions a plan gives; what else is asked of a row its worker has noted. Where a tool wrote
    tokens, the mask says which they are."""
    asked: list[str] = []
    get = queue.kv_batch_get

    def counted(keys: Any, partition_id: Any = None, select_fields: Any = None) -> Any:
        asked.extend(select_fields)
        return get(keys, partition_id, select_fields)

    monkeypatch.setattr(queue, "kv_batch_get", counted)
    rows = {f"{uid}_{k}_0": row(g, float(k), payload=(uid, k)) for uid, g in (("b", 1), ("a", 0)) for k in (1, 0)}
    selected, _, _ = run(queue, rows)
    assert asked == [COLUMN, "extra_fields"] and selected.generated.payload == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert selected.generated.reward.tolist() == [0.0, 1.0, 0.0, 1.0]
    asked.clear()
    made = {"c_0_0": row(0, 1.0, length=5), "c_1_0": row(0, 0.0)}
    made["c_0_0"]["response_mask"] = torch.tensor([1, 1, 0, 0, 1])
    run(queue, made, "gdpo", rows_of_batch=2)
    assert asked == [COLUMN, "extra_fields", "response_mask"]
    written = [queue.rows[key]["advantages"] for key in made]
    assert (written[0] != 0).tolist() == [True, True, False, False, True] and bool((written[1] < 0).all())


def test_scores_that_came_after_generation_are_read(queue: MemoryQueue) -> None:
    """Of a reward model on the trainer's devices."""
    rows = {"a_1_0": row(0, 1.0), "a_0_0": row(0, 0.5)}
    for key, made in rows.items():
        queue.rows[key] = {"rm_scores": made.pop("rm_scores")}
    assert run(queue, rows)[0].generated.reward.tolist() == [0.5, 1.0]


def test_rows_come_in_the_order_of_the_plan(queue: MemoryQueue) -> None:
    rows = {
        "b_1_0": row(1, 0.0),
        "a_1_0": row(0, 1.0),
        "b_0_0": row(1, 1.0),
        "a_0_0": row(0, 0.0),
    }
    selected, before, _ = run(queue, rows)
    assert before.keys == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    rollouts = selected.generated
    assert rollouts.group.tolist() == [0, 0, 1, 1] and rollouts.rollout.tolist() == [0, 1, 0, 1]
    assert rollouts.prompt_index.tolist() == [10, 10, 11, 11] and rollouts.reward.tolist() == [0, 1, 1, 0]
    assert rollouts.truncated.tolist() == [True] * 4


def test_a_reward_that_is_nan_never_reaches_verl(queue: MemoryQueue) -> None:
    rows = {"a_0_0": row(0, float("nan")), "a_1_0": row(0, 1.0), "b_0_0": row(1, 0.0), "b_1_0": row(1, 1.0)}
    _, _, done = run(queue, rows)
    assert [float(queue.rows[k]["rm_scores"].sum()) for k in done.batch.keys] == [0.0, 1.0, 0.0, 1.0]
    assert queue.rows["b_1_0"]["rm_scores"].tolist() == [0.0, 0.0, 1.0], "on the last token, as verl puts it"
    d = done.decision
    assert d.estimator == "rl_plugins", "verl's own groups would hold the 0"
    assert d.row_advantages[:2].tolist() == [0.0, 0.0] and d.row_advantages[3] > 0.7
    assert flat(torch.nested.as_nested_tensor([queue.rows["a_0_0"]["advantages"]], layout=torch.jagged)).sum() == 0


def test_groups_of_one_get_no_raw_reward(queue: MemoryQueue) -> None:
    """verl takes the raw reward in a group of one."""
    _, _, done = run(queue, {"a_0_0": row(0, 1.0), "b_0_0": row(1, 0.0), "b_1_0": row(1, 1.0)})
    assert done.decision.estimator == "rl_plugins" and done.decision.row_advantages[0] == 0


def test_verls_own_advantages_stay_on_its_own_batch(queue: MemoryQueue) -> None:
    rows = {f"{u}_{s}_0": row(g, float(s)) for g, u in enumerate("ab") for s in (0, 1)}
    for value, r in zip((3.0, -3.0, 2.0, -2.0), rows.values(), strict=True):
        r["advantages"] = torch.full((3,), value)
    _, _, done = run(queue, rows)
    assert done.decision.estimator == "host"
    assert [float(queue.rows[k]["advantages"][0]) for k in done.batch.keys] == [3.0, -3.0, 2.0, -2.0]
    assert [float(queue.rows[k][REAL]) for k in done.batch.keys] == [1.0] * 4


def test_batches_that_change_nothing_are_told_once(queue: MemoryQueue, caplog: pytest.LogCaptureFixture) -> None:
    """Equal rewards, and a tree that did not branch, as its program logged it in an agent loop."""
    caplog.set_level("WARNING", "rl_plugins")
    stack = Settings(("latr",)).stack()
    for number in range(6):
        rows = {f"{u}{number}_{s}_0": row(g, float(g)) for g, u in enumerate("ab") for s in (0, 1)}
        for r in rows.values():
            made = {"rollout": 0, "index": 0, "group": None, "finish": "eos", "meta": {}}
            made["metrics"] = {"latr/branches": ("mean", 1.0, 1.0)}
            r["extra_fields"] = {MADE: made}
        run(queue, rows, stack=stack)
        warned = [r.getMessage() for r in caplog.records]
        assert len(warned) == (0 if number < 4 else 2)
    assert "no token had an advantage other than 0" in warned[0] and warned[1].startswith("latr: it did nothing")


def test_other_estimators_see_waves_as_groups_and_are_refused(queue: MemoryQueue) -> None:
    rows = {"a_0_0": row(0, 1.0), "a_1_0": row(0, 0.0), "c_0_0": row(0, 0.0, round=1), "c_1_0": row(0, 1.0, round=1)}
    with raises(ConfigError, match="adv_estimator=rloo"):
        run(queue, rows, config=config("algorithm.adv_estimator=rloo"))
    selected, _, done = run(queue, rows)
    assert done.decision.estimator == "rl_plugins" and len(selected.generated.groups.size) == 1


def test_two_waves_of_one_are_no_group_of_verls(queue: MemoryQueue) -> None:
    """As many rows as verl's own groups have, but under two uids: verl would see two groups of one."""
    rows = {"a_0_0": row(0, 1.0), "c_0_0": row(0, 0.0, round=1), "b_0_0": row(1, 0.0), "d_0_0": row(1, 1.0, round=1)}
    _, before, done = run(queue, rows)
    assert before.keys == ["a_0_0", "c_0_0", "b_0_0", "d_0_0"]
    assert done.decision.estimator == "rl_plugins" and done.decision.row_advantages[0] > 0.7


def test_agent_loops_with_several_rows_per_rollout(queue: MemoryQueue) -> None:
    """As in verl, the last row of a rollout counts in the group, and its advantage is that of all its rows."""
    rows = {
        "a_0_0": row(0, -9.0),
        "a_0_1": row(0, 1.0),
        "a_1_0": row(0, 0.0),
        "b_0_0": row(1, -5.0),
        "b_0_1": row(1, 5.0),
        "b_0_2": row(1, 3.0),
        "b_1_0": row(1, 1.0),
    }
    selected, _, done = run(queue, rows, rows_of_batch=4)
    assert selected.generated.rollout.tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert selected.generated.index.tolist() == [0, 1, 0, 0, 1, 2, 0]
    a = 0.5**0.5 / (1 + 1e-6 / 0.5**0.5)
    assert done.decision.row_advantages.tolist() == pytest.approx(
        [a, a, -a, 1 / (2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6), 1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)], rel=1e-4
    )
    assert len(done.batch) == 7


def test_more_rows_than_the_batch_is_an_error(queue: MemoryQueue) -> None:
    rows = {f"a_{i}_0": row(0, float(i)) for i in range(5)}
    with raises(MethodError, match="5.*4"):
        run(queue, rows)


@pytest.mark.parametrize("hook", ["select", "shape"])
def test_one_row_is_kept_where_every_row_leaves(queue: MemoryQueue, hook: str) -> None:
    """verl's passes and metrics need one; the trainer makes no optimizer step of it."""

    class Leave(probes.Probe):
        name = "leave"
        needs = frozenset({"turns"})

        def select(self, rollouts):
            return torch.full((len(rollouts),), hook != "select")

        def shape(self, rollouts, tokens):
            return Shape(keep_rows=torch.zeros(len(rollouts), dtype=torch.bool))

    rows = {f"{u}_{s}_0": row(g, float(s)) for g, u in enumerate("ab") for s in (0, 1)}
    for r in rows.values():
        r["prompts"] = torch.tensor([2])
    mine = Decisions(MethodStack([Leave()]), config(), {}, Tokenizer(), 4)
    queue.put_rows(rows)
    selected = mine.select(KVBatchMeta(partition_id="train", keys=list(rows), tags=[{"global_steps": 1}] * 4))
    done = mine.decide_advantages(selected.batch, selected)
    assert done.batch.keys == ["a_0_0"] == list(queue.rows) and done.nothing
    assert selected.nothing == (hook == "select")
    assert not bool(done.decision.stays.any()) and done.metrics["rl_plugins/rows_trained"] == 0


def test_tokens_a_tool_wrote_are_no_tokens(queue: MemoryQueue) -> None:
    rows = {"a_0_0": row(0, 1.0, length=5), "a_1_0": row(0, 0.0)}
    rows["a_0_0"]["response_mask"] = torch.tensor([1, 1, 0, 0, 1])
    selected, _, done = run(queue, rows, "per_token")
    assert selected.generated.length.tolist() == [3, 3]
    kept = queue.rows["a_0_0"]
    assert kept["response_mask"].tolist() == [1, 1, 0, 0, 1], "position 2 was no token; 0, 1, 4 stay"
    assert queue.rows["a_1_0"]["response_mask"].tolist() == [1, 1, 0]
    assert len(done.batch) == 2


def test_rewards_per_step_become_advantages_of_tokens(queue: MemoryQueue) -> None:
    """Token 3 ends a step. R = {1, 0, 0, 1}, z = +-sqrt(3)/2; a row without a list has one step."""
    rows = {f"a_{i}_0": row(i // 2, 1.0) for i in range(4)}
    for key, steps in zip(rows, [[1.0, 0.0], [0.0, 1.0], None, [1.0]], strict=True):
        rows[key] |= {"extra_fields": {STEPS: [steps]}, "prompts": torch.tensor([9])}
    method = ProcessSupervision(ProcessSupervision.Params(separator=chr(3), eps=0.0))
    selected, _, _ = run(queue, rows, stack=start_stack(method, run=make_run(chat=CharChat())))
    z = 3**0.5 / 2
    assert [x.tolist() for x in selected.generated.step_rewards] == [[1.0, 0.0], [0.0, 1.0], [1.0], [1.0]]
    found = [queue.rows[key]["advantages"].tolist() for key in rows]
    assert (
        found[:2] == [pytest.approx([0.0, 0.0, -z]), pytest.approx([0.0, 0.0, z])] and found[2] == found[3] == [0.0] * 3
    )


def test_padding_rows_are_cleaned(queue: MemoryQueue) -> None:
    rows = {"a_0_0": row(0, 1.0), "a_1_0": row(0, 0.0)}
    run(queue, rows, "filter")
    queue.rows["pad_0_0"] = {
        **queue.rows.get("a_0_0", rows["a_0_0"]),
        REAL: torch.ones(1),
        "old_log_probs": torch.ones(3),
    }
    padded = KVBatchMeta(partition_id="train", keys=["pad_0_0"], tags=[{"is_padding": True}])
    clean_padding(padded, [REAL])
    assert queue.rows["pad_0_0"][REAL].tolist() == queue.rows["pad_0_0"]["old_log_probs"].tolist() == [0.0]


# ---- small parts


def test_whole_groups_in_every_step() -> None:
    group = [0, 1, 0, 1, 2, 2, None, 0, None, 3, 3, None]
    order = whole_group_order(group, 6, 2)
    assert sorted(order) == list(range(12))
    halves = order[:6], order[6:]
    steps = [[half[i] for half in halves for i in range(s * 3, s * 3 + 3)] for s in (0, 1)]
    for g in (0, 1, 2, 3):
        holding = {s for s, rows in enumerate(steps) for i in rows if group[i] == g}
        assert len(holding) == 1, g
    with raises(ConfigError, match=r"4.*4.*4.*2.*6"):
        whole_group_order([0] * 4 + [1] * 4 + [2] * 4, 6, 1)


def test_logprob_passes_divide_the_first_balance() -> None:
    c = config(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=6",
    )
    assert logprob_multiple(c, 2, reference=False) == 8 and logprob_multiple(c, 2, reference=True) == 24
    c = config("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True")
    assert logprob_multiple(c, 2, reference=False) == 2


def test_columns_and_their_fields() -> None:
    rows = {"x": torch.tensor([1, 2]), "extra_info": [{"level": 3}, {"level": 4}], "reward_model": [{"a": 1}, {"a": 2}]}
    assert column_of(rows, "x") == [1, 2] and column_of(rows, "level") == [3, 4] and column_of(rows, "a") == [1, 2]
    assert column_of(rows, "b") is None


class Dataset(torch.utils.data.Dataset):
    """As verl's: rows with messages, nested columns and technical ones."""

    def __init__(self, n: int = 5) -> None:
        self.dataframe = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(n)]

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = dict(self.dataframe[i])
        return {
            **row,
            "raw_prompt": row["prompt"],
            "data_source": "x",
            "reward_model": {"ground_truth": str(i)},
            "extra_info": {"level": i},
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
            "index": 0,
            "tools_kwargs": {},
            "interaction_kwargs": {},
        }


def test_groups_keep_the_numbers_of_their_plan(queue: MemoryQueue) -> None:
    """A method tells its rows by them. Where two plans used one number the later group gets one behind all of them."""
    rows = {f"{uid}_{k}_0": row(g, float(k)) for uid, g in (("a", 9), ("b", 4)) for k in range(2)}
    selected, _, _ = run(queue, rows)
    assert selected.generated.group.tolist() == [4, 4, 9, 9]
    waves = {f"{uid}_{k}_0": row(g, float(k), wave=w) for uid, g, w in (("a", 9, "v"), ("b", 9, "w")) for k in range(2)}
    selected, _, _ = run(queue, waves)
    assert selected.generated.group.tolist() == [9, 9, 10, 10]


def test_token_ids_of_prompts_and_completions(queue: MemoryQueue) -> None:
    class WantsIds(probes.Probe):
        name = "wants_ids"
        needs = frozenset({"token_ids"})

        def select(self, rollouts: Any) -> Any:
            return rollouts.rollout == 0

    rows = {"a_0_0": row(0, 1.0, length=4), "a_1_0": row(0, 0.0)}
    rows["a_0_0"]["response_mask"] = torch.tensor([1, 0, 0, 1])
    for key, made in rows.items():
        made["prompts"] = torch.tensor([8, 9] if key == "a_0_0" else [8])
    selected, _, _ = run(queue, rows, stack=MethodStack([WantsIds()]))
    ids = selected.generated.token_ids
    assert [p.tolist() for p in ids.prompt] == [[8, 9], [8]]
    assert [c.tolist() for c in ids.completion] == [[2, 3, 4, 5], [2, 3, 4]]
    assert [o.tolist() for o in ids.observed] == [[False, True, True, False], [False] * 3]


def test_a_warm_up_is_planned_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than the dataset has: every batch chooses its own, and has a plan of its own."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class Last(probes.Probe):
        name = "last"
        seen: list[Any] = []

        def select_prompts(self, pool: Any, n: int) -> Any:
            self.seen.append((pool.proposal, n, self._context.draw))
            return range(pool.size - n, pool.size)

    dataset = Dataset(3)
    number_rows(dataset)
    trainer = object.__new__(MethodsSync)
    trainer.config, trainer.methods, trainer.settings = config(), MethodStack([Last()]), Settings(())
    trainer.global_steps, trainer.total_training_steps, trainer.methods_mode = 1, 5, "separate_async"
    trainer.train_dataset, trainer._prompts = dataset, PromptBatches(dataset, trainer.config)
    trainer._submitted = {}
    proposal = {PROMPT_INDEX: [0, 1, 2, 0, 1]}
    monkeypatch.setattr(PPOTrainer, "_next_train_batch", lambda self, n=None: proposal)
    batch = trainer._next_train_batch(5)
    assert Last.seen == [((0, 1), 2, 1), ((2, 0), 2, 2), ((1,), 1, 3)]
    notes = [getattr(x, "data", x) for x in batch[COLUMN]]
    assert [n["prompt_index"] for n in notes] == [1, 2, 1, 2, 2]
    assert [n["group"] for n in notes] == [n["place"] for n in notes] == [0, 1, 0, 1, 0]
    assert [n["draw"] for n in notes] == [1, 1, 2, 2, 3]
    assert len({n["wave"] for n in notes}) == 3 and len(set(map(str, batch["uid"]))) == 5


def test_datasets_are_numbered_and_told_apart() -> None:
    one, other = Dataset(), Dataset(4)
    number_rows(one)
    number_rows(one)  # a second time is nothing
    assert one[3][PROMPT_INDEX] == 3 and isinstance(one, Dataset) and type(one).__name__ == "Dataset"
    assert fingerprint(Dataset()) == fingerprint(Dataset()) != fingerprint(other)


def test_plans_become_prompt_batches() -> None:
    dataset = Dataset()
    number_rows(dataset)
    made = PromptBatches(dataset, config())
    given = (Completion((5, 6), (-1.0, -2.0)),)
    rows = [
        PlanRow(3, 0, 2),
        PlanRow(1, 1, 2, spare=1, given=given, payload={"k": 1}, edit={"level": 9, "prompt": "hint"}),
    ]
    batch = made.build(rows)
    assert batch["__rollout_n__"].tolist() == [2, 3]
    assert list(batch["agent_name"]) == ["single_turn_agent", PLANNED_AGENT]
    notes = [getattr(x, "data", x) for x in batch[COLUMN]]
    assert [n["prompt_index"] for n in notes] == [3, 1] and notes[1]["payload"] == {"k": 1}
    (note,) = notes[1]["given"]
    assert (note["tokens"], note["logprobs"], note["rewards"], note["reward"]) == ((5, 6), (-1.0, -2.0), None, None)
    prompts = [getattr(x, "data", x) for x in batch["raw_prompt"]]
    assert prompts[1] == [{"role": "user", "content": "hint"}] and prompts[0][0]["content"] == "3"
    assert getattr(batch["extra_info"][1], "data", batch["extra_info"][1])["level"] == 9
    assert len({str(u) for u in batch["uid"]}) == 2 and PROMPT_INDEX not in batch
    plain = made.build([PlanRow(0, 0, 2), PlanRow(2, 1, 2)])
    assert "__rollout_n__" not in plain and "agent_name" not in plain


@pytest.mark.parametrize(
    ("row", "overrides", "error", "message"),
    [
        (PlanRow(0, 0, 2, edit={"nothing": 1}), [], MethodError, "`nothing`"),
        (PlanRow(-1, 0, 2, edit={"prompt": "x"}), [], MethodError, "data_source.*reward_model"),
        (PlanRow(0, 0, 2, prefix=(1,) * 6), [], MethodError, "6.*6"),
        (PlanRow(0, 0, 2, given=(Completion((1,) * 7),)), [], MethodError, "7"),
        (
            PlanRow(0, 0, 2, given=(Completion((1,), rewards={"right": 1.0}),)),
            [],
            MethodError,
            "rewards of right; those of this run are score",
        ),
        (
            PlanRow(0, 0, 2, max_tokens=3),
            ["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"],
            ConfigError,
            "tool_agent",
        ),
        (
            PlanRow(0, 0, 2, prefix=(1,)),
            ["algorithm.rollout_correction.bypass_mode=True"],
            ConfigError,
            "bypass_mode=False",
        ),
    ],
)
def test_plans_that_cannot_be_served(row: PlanRow, overrides: list[str], error: type, message: str) -> None:
    dataset = Dataset()
    number_rows(dataset)
    with raises(error, match=message):
        PromptBatches(dataset, config(*overrides)).build([row])


def test_a_counted_run_without_methods_goes_on_from_its_checkpoint(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its totals are beside verl's files before verl's own save begins, and are no state of methods."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    costs, begun = Costs(tokens_decoded=7, engine_seconds=0.5, rows_made=2), []
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: begun.append(saved_costs(self._checkpoint)))
    monkeypatch.setattr(PPOTrainerSync, "on_init_end", lambda self: None)

    def trainer() -> Any:
        made = object.__new__(MethodsSync)
        made.config, made.methods = config(f"trainer.default_local_dir={tmp_path}"), MethodStack([])
        made.global_steps = 3
        made._counts_costs, made.costs, made.settings = True, Costs(), Settings(())
        made.actor_rollout_wg, made.use_critic = SimpleNamespace(workers=[]), False
        made._meters = SimpleNamespace(take=lambda: costs)
        return made

    trainer()._save_checkpoint()
    assert begun == [{"costs": costs.plain()}] and load_state(tmp_path / "global_step_3") is None
    resumed = trainer()
    resumed.on_init_end()
    assert resumed.costs == costs
    for changed, value in (("global_steps", 4), ("_counts_costs", False)):
        other = trainer()
        setattr(other, changed, value)
        other.on_init_end()
        assert other.costs == Costs()


def test_given_completions_are_of_published_weights() -> None:
    dataset = Dataset()
    number_rows(dataset)
    trainer = object.__new__(MethodsSync)
    trainer._prompts, trainer.methods, trainer.global_steps = PromptBatches(dataset, config()), MethodStack([]), 4
    newer, known = ((Completion((1, 2), versions=(0, v)),) for v in (4, 3))
    with raises(MethodError, match=r"3.*4.*3"):
        trainer._build([PlanRow(0, 0, 2), PlanRow(3, 1, 2, given=newer)])
    assert len(trainer._build([PlanRow(3, 0, 2, given=known), PlanRow(3, 1, 2, given=(Completion((1,)),))])[0]) == 2


def test_given_completions_must_not_be_lost() -> None:
    trainer = object.__new__(MethodsSync)
    trainer.config, trainer.methods = config(), Settings(("noop",)).stack()
    trainer._submitted = {"a": PlanRow(0, 0, 2), "b": PlanRow(1, 1, 2)}
    lost = KVBatchMeta(partition_id="train", keys=["a_0_0", "a_1_0", "b_1_0"], tags=[{}] * 3)
    trainer._count_missing(lost)  # verl goes on without a failed agent loop
    assert "1 rollouts of this batch are missing: their agent loops failed." in trainer.methods._warned
    trainer._submitted["b"] = PlanRow(1, 1, 2, given=(Completion((1,)),))
    with raises(MethodError, match=r"\[1\]"):
        trainer._count_missing(lost)


def test_without_methods_the_weighted_sum_is_trained(queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own trainer step sees the sum where runs with methods see it; without weights nothing is written."""
    parts = {"a_0_0": (1.0, 0.0), "a_1_0": (0.0, None), "b_0_0": (0.5, 1.0), "b_1_0": (0.5, 1.0), "c_0_0": (None, None)}
    rows = {
        key: {"rm_scores": torch.tensor([0.0, 9.0]), "extra_fields": {"reward_extra_info": {"x": x, "y": y}}}
        for key, (x, y) in parts.items()
    }
    seen: list[list[list[float]]] = []

    def balance(self: Any, batch: KVBatchMeta, metrics: Any) -> KVBatchMeta:
        seen.append([queue.rows[key]["rm_scores"].tolist() for key in batch.keys])
        return batch

    monkeypatch.setattr(PPOTrainer, "_balance_batch", balance)
    trainer = object.__new__(MethodsSync)
    trainer.methods, trainer._logged = MethodStack([]), []
    for rewards in ({}, {"x": 2.0, "y": 0.5}):
        queue.put_rows({key: dict(row) for key, row in rows.items()})
        trainer.settings = Settings((), rewards=rewards)
        trainer._balance_batch(KVBatchMeta(partition_id="train", keys=list(rows), tags=[{} for _ in rows]), {})
    assert seen == [[[0, 9]] * 5, [[0, 2], [0, 0], [0, 1.5], [0, 1.5], [0, 0]]]
    told = {"rl_plugins/reward_generated": 1.25, "rl_plugins/frac_reward_zero_std": 0.6}
    assert trainer._logged == [pytest.approx(told)]
    trainer.settings = Settings((), rewards={"z": 1.0})
    with raises(ConfigError, match="rl_plugins.rewards.*`z`.*x, y"):
        trainer._balance_batch(KVBatchMeta(partition_id="train", keys=list(rows), tags=[{} for _ in rows]), {})


def test_rounds_see_rewards_in_the_order_of_the_plan(queue: MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever finished first; rollouts of further rounds come after those of the first."""

    class Asks(probes.Probe):
        name = "asks"
        rounds = True
        seen: list[Any] = []

        def plan(self, plan):
            self.seen.append([(g.row.group, g.rewards.tolist()) for g in plan.so_far])
            return plan.replace(rows=(PlanRow(10, 0, 1),) if plan.round == 1 else ())

    first = {"b_1_0": row(1, 4.0), "a_1_0": row(0, 2.0), "b_0_0": row(1, 3.0), "a_0_0": row(0, 1.0)}
    further = {"c_0_0": row(0, 5.0, round=1)}
    queue.put_rows(first | further)
    trainer = object.__new__(MethodsSync)
    trainer.config, trainer.methods, trainer.tokenizer = config("data.train_batch_size=3"), MethodStack([Asks()]), None
    trainer.tokenizer, trainer.settings, trainer._selected = Tokenizer(), Settings(()), None
    trainer._prompts, trainer.train_dataset = PromptBatches(Dataset(), trainer.config), [None] * 20
    trainer._submitted = {"a": PlanRow(10, 0, 2), "b": PlanRow(11, 1, 2)}
    asked: list[Any] = []

    def build(rows: Any, wave: str | None = None, round_: int = 0) -> Any:
        asked.append((tuple(rows), wave, round_))
        return None, {"c": rows[0]}

    def batch(rows: Any) -> KVBatchMeta:
        return KVBatchMeta(partition_id="train", keys=list(rows), tags=[{"global_steps": 1}] * len(rows))

    monkeypatch.setattr(trainer, "_build", build, raising=False)
    monkeypatch.setattr(trainer, "_submit_batch_to_rollout", lambda prompts: 1, raising=False)
    monkeypatch.setattr(trainer, "_host_sample", lambda **kwargs: (batch(further), {}), raising=False)
    whole = trainer._rounds(batch(first), 1)
    assert Asks.seen == [[(0, [1.0, 2.0]), (1, [3.0, 4.0])], [(0, [1.0, 2.0, 5.0]), (1, [3.0, 4.0])]]
    assert asked == [((PlanRow(10, 0, 1),), "w", 1)] and set(whole.keys) == {*first, *further}
    assert set(trainer._submitted) == {"a", "b", "c"}


def test_asynchronous_modes_take_whole_groups() -> None:
    dataset, stack = Dataset(), Settings(("mc_grpo",)).stack()
    known = Known(Reader(config(), "colocate_async"), Settings(("mc_grpo",)), dataset, len(dataset), 3)
    regular = Plan((PlanRow(0, 0, 2, spare=1), PlanRow(1, 1, 2)), 2, 4)
    known.check_plan(stack, regular, 2)
    for rows in ((PlanRow(0, 0, 1),), (PlanRow(0, 0, 2),)):
        with raises(MethodError, match="buffer"):
            known.check_plan(stack, Plan(rows, 2, 4), 2 if rows[0].n == 2 else 1)
    Known(Reader(config(), "sync"), Settings(("mc_grpo",)), dataset, 5, 3).check_plan(stack, Plan((), 2, 4), 2)


def test_what_methods_are_told_of_a_run() -> None:
    """A step of separate_async has several batches; the trainer and the doctor say it alike."""
    c = config(
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=3",
        "trainer.v1.separate_async.parameter_sync_step=2",
    )
    settings = Settings(("noop",), rewards={"a": 1.0, "b": 0.5})
    told = Known(Reader(c, "separate_async"), settings, "rows", 40, 5).run()
    assert (told.host, told.dataset, told.dataset_size, told.group_size) == ("verl", "rows", 40, 2)
    assert (told.total_batches, told.total_steps) == (10, 60) and told.reward_names == ("a", "b")
    told = Known(Reader(c, "sync"), Settings(("noop",)), None, 40, 5).run()
    assert (told.total_batches, told.total_steps) == (5, 60) and told.reward_names == ("score",)
    assert told.max_completion_length == 6
