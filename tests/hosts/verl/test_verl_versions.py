"""Which published weights made which token in verl: the resuming client, agent loops, and what hooks see. No Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import pickle
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
from test_batch import row, run
from transfer_queue import KVBatchMeta
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.requests import Generate, Generated
from rl_plugins.core.rollouts import Completion, PlanRow
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.verl import batch as module
from rl_plugins.verl.batch import Decisions
from rl_plugins.verl.client import with_versions
from rl_plugins.verl.prompts import COLUMN, FORCED, UNKNOWN, VERSIONS, note_of, runs
from rl_plugins.verl.rows import TOKEN_VERSION
from rl_plugins.verl.trainer import MethodsSync
from rl_plugins.verl.versions import Snapshots

pytestmark = pytest.mark.host


# ---- verl's client


def client(monkeypatch: pytest.MonkeyPatch, attempts: dict[str, list[tuple[int, int, str]]]) -> Any:
    """verl's resuming client, whose servers answer a request with (version, tokens, reason) one after the other."""

    async def one(self: Any, request_id: str, **kwargs: Any) -> TokenOutput:
        version, tokens, reason = attempts[request_id].pop(0)
        await asyncio.sleep(0)
        fields = {"global_steps": version}
        return TokenOutput(token_ids=[7] * tokens, log_probs=[-1.0] * tokens, stop_reason=reason, extra_fields=fields)

    wait = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: wait(0))
    monkeypatch.setattr(LLMServerClient, "generate", one)
    return with_versions(FullyAsyncLLMServerClient(SimpleNamespace()))


def asked(made: Any, request_id: str) -> Any:
    return made.generate(request_id=request_id, prompt_ids=[5, 6], sampling_params={"max_tokens": 9})


def test_every_attempt_of_a_request_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = {"a": [(2, 2, "aborted"), (3, 0, "aborted"), (5, 4, "completed")], "b": [(1, 3, "completed")]}
    made = client(monkeypatch, attempts)

    async def both() -> Any:
        return await asyncio.gather(asked(made, "a"), asked(made, "b"))

    a, b = asyncio.run(both())
    assert a.extra_fields[VERSIONS] == [[[2, 2], [5, 4]]] and b.extra_fields[VERSIONS] == [[[1, 3]]]
    assert (a.extra_fields["min_global_steps"], a.extra_fields["max_global_steps"]) == (2, 5), "verl's own"
    assert a.token_ids == [7] * 6


def test_the_turns_of_one_agent_loop_share_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's loop with several turns keeps the fields of its first answer; another loop has a list of its own."""
    first = [(2, 2, "aborted"), (3, 1, "completed"), (4, 2, "completed")]
    made = client(monkeypatch, {"a": first, "b": [(9, 1, "completed"), (9, 1, "completed")]})

    async def turns(request_id: str) -> Any:
        kept = (await asked(made, request_id)).extra_fields
        await asked(made, request_id)
        return kept[VERSIONS]

    async def both() -> Any:
        return await asyncio.gather(turns("a"), turns("b"))

    assert asyncio.run(both()) == [[[[2, 2], [3, 1]], [[4, 2]]], [[[9, 1]], [[9, 1]]]]


def test_verls_own_client_only() -> None:
    with raises(ConfigError, match="Strange"):
        with_versions(type("Strange", (FullyAsyncLLMServerClient,), {})(SimpleNamespace()))


def test_the_trainer_hands_out_the_client_where_versions_are_asked_for() -> None:
    theirs = FullyAsyncLLMServerClient(SimpleNamespace())
    trainer = object.__new__(MethodsSync)
    trainer.llm_server_manager = SimpleNamespace(get_client=lambda: theirs)
    for mode, needs, told in (("sync", True, False), ("colocate_async", False, False), ("colocate_async", True, True)):
        trainer.methods_mode = mode
        trainer.methods = MethodStack([Sees()] if needs else [])
        assert (type(trainer.get_llm_client()) is not FullyAsyncLLMServerClient) is told
    import pickle

    assert type(pickle.loads(pickle.dumps(theirs))) is type(theirs), "it travels to the agent loops"


def test_a_program_on_that_client_knows_the_version_of_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_verl_programs import made_by

    made = client(monkeypatch, {"u_0": [(2, 2, "aborted"), (3, 1, "completed"), (4, 2, "completed")]})

    def program(prompt: Any) -> Any:
        (first,) = yield Generate(prompt.start(), max_tokens=5)
        begun = prompt.start().add(first).observe((6,)).force((9,))
        (second,) = yield Generate(begun, max_tokens=5)
        return [begun.add(second)]

    ((row,),) = made_by(program, made, n=1)
    assert row.response_ids == [7, 7, 7, 6, 9, 7, 7] and row.response_mask == [1, 1, 1, 0, 1, 1, 1]
    assert row.extra_fields[VERSIONS] == [[[2, 2], [3, 1], [-1, 1], [4, 2]]]
    assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (2, 4)


# ---- completions that are given


def planned(given: Completion, n: int = 1, **changes: Any) -> Any:
    """The row of a completion a plan gives, in global step 4."""
    from test_verl_programs import COLUMNS, SAMPLING, loop

    note = note_of(PlanRow(3, 5, n, given=(given,)), "w", 0, 0, {"a": 1.0, "b": 0.5})

    async def go() -> Any:
        return await loop(None).run(SAMPLING, **{**COLUMNS, COLUMN: note, **changes})

    return asyncio.run(go())


def test_a_completion_with_log_probs_is_a_sample() -> None:
    read = (False, True, False, False)
    made = planned(Completion((7, 8, 9, 6), (-1.0, -2.0, -3.0, -4.0), (1, 0, 2, 2), {"a": 1.0, "b": 3.0}, read))
    assert made.response_mask == [1, 0, 1, 1] and made.response_logprobs == [-1.0, -2.0, -3.0, -4.0]
    fields = made.extra_fields
    assert fields[FORCED] == fields[UNKNOWN] == [] and fields[VERSIONS] == [[[1, 1], [2, 2]]]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (1, 2), "what was only read has no version"
    assert made.reward_score == 2.5 and fields["reward_extra_info"] == {"a": 1.0, "b": 3.0}


def test_a_completion_without_log_probs_is_forced_and_made_now() -> None:
    made = planned(Completion((7, 8, 9), observed=(False, True, False)))
    assert made.extra_fields[FORCED] == made.extra_fields[UNKNOWN] == [[0, 1], [2, 3]]
    assert made.response_logprobs == [0.0] * 3 and made.reward_score is None, "it is scored"
    assert made.extra_fields["max_global_steps"] == 3, "the newest published weights in global step 4"
    assert planned(Completion((7,), rewards={"b": math.nan})).reward_score != 0, "no reward is given"


def test_given_completions_travel_as_bytes() -> None:
    """Every row of a group has all of them: they cost their bytes, and come out of the queue as they were."""
    from tensordict import NonTensorStack
    from transfer_queue.utils.serial_utils import MsgpackDecoder, MsgpackEncoder

    n = 512
    one = Completion(tuple(range(70_000, 70_000 + n)), (-0.3,) * n, (3,) * n, {"score": 1.0}, (False, True) * (n // 2))
    note = note_of(PlanRow(3, 5, 8, given=tuple(dataclasses.replace(one) for _ in range(8))), "w", 0, 0)
    assert len(pickle.dumps(note)) < 8 * (13 * n + 400)
    assert len(pickle.dumps(NonTensorStack(note, note))) < 2 * 8 * (13 * n + 400)
    encoded = MsgpackEncoder().encode(note)
    for again in (pickle.loads(pickle.dumps(note)), MsgpackDecoder().decode(encoded)):
        assert again == note
        made = planned(one, **{COLUMN: again})
        assert made.response_ids == list(one.tokens) and made.response_mask == [1, 0] * (n // 2)
        assert made.response_logprobs == pytest.approx(list(one.logprobs or ()), rel=1e-7)
        assert made.extra_fields[VERSIONS] == [[[3, n // 2]]]


def test_a_note_of_an_earlier_version_is_served() -> None:
    """Prompts in flight lie in checkpoints."""
    note = note_of(PlanRow(3, 5, 1, given=(Completion((7, 8), (-1.0, -2.0)),)), "w", 0, 0)
    note["given"] = [{"tokens": [7, 8], "logprobs": [-1.0, -2.0]}]
    made = planned(Completion((1,)), **{COLUMN: note})
    assert made.response_ids == [7, 8] and made.response_mask == [1, 1] and made.reward_score is None


def test_a_program_gives_stored_rollouts_as_samples() -> None:
    from test_verl_programs import made_by

    def program(prompt: Any) -> Any:
        yield []
        stored = Generated((7, 8), (-1.0, -2.0), "eos", 2, versions=(1, 2))
        one = prompt.start().add(stored).observe((6,)).force((9,))
        return [dataclasses.replace(one, rewards={"a": 2.0})]

    ((row,),) = made_by(program, None, n=1, rewards={"a": 1.0})
    assert row.response_mask == [1, 1, 0, 1] and row.reward_score == 2.0
    fields = row.extra_fields
    assert fields[FORCED] == [[3, 4]] and fields[VERSIONS] == [[[1, 1], [2, 1], [-1, 1]]]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (1, 2)


# ---- what hooks see


class Sees(probes.Probe):
    """Keeps what it sees, and has a term in the loss."""

    name = "sees"
    needs = frozenset({"tokens", "token_versions"})

    def observe(self, rollouts: Any, tokens: Any, stats: Any) -> None:
        self.seen = rollouts, tokens

    def regularize(self, terms: Any) -> Any:
        return 0 * terms.logprobs


class Blind(Sees):
    needs = frozenset({"tokens"})


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> MemoryQueue:
    made = MemoryQueue()
    monkeypatch.setattr(module, "tq", made)
    return made


def decided(queue: MemoryQueue, rows: list[tuple[dict[str, Any], int, int]], published: int = 9) -> Any:
    """What hooks see of rows with their oldest and newest versions, and the column for the loss."""
    keys = [f"u{i}_0_0" for i in range(len(rows))]
    queue.put_rows({key: r for key, (r, _, _) in zip(keys, rows, strict=True)})
    tags = [{"global_steps": 1, "min_global_steps": a, "max_global_steps": b} for _, a, b in rows]
    sees = Sees()
    from test_batch import Tokenizer, config

    mine = Decisions(MethodStack([sees]), config(), {}, Tokenizer(), len(rows), published)
    selected = mine.select(KVBatchMeta(partition_id="train", keys=keys, tags=tags))
    mine.decide_advantages(selected.batch, selected)
    return *sees.seen, [queue.rows[key][TOKEN_VERSION].tolist() for key in keys]


def told(group: int, length: int, mask: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    made = row(group, 1.0, length)
    if mask is not None:
        made["response_mask"] = made["loss_mask"] = torch.tensor(mask)
    return {**made, "extra_fields": fields}


def test_versions_of_tokens(queue: MemoryQueue) -> None:
    rows = [
        (told(0, 3), 4, 4),  # made in one go: the loop says nothing more
        (told(0, 4, **{VERSIONS: [[[3, 1], [5, 9]]]}), 3, 5),  # resumed, and its end cut off
        (told(1, 5, [1, 1, 0, 1, 1], **{VERSIONS: [[[3, 2]], [[3, 1], [6, 1]]]}), 3, 6),  # two turns
        (told(1, 5, [1, 0, 0, 1, 1], **{VERSIONS: [[[3, 2]], [[6, 2]]]}), 3, 6),  # the loop cut a turn
        (told(2, 4, **{VERSIONS: [[[-1, 2], [7, 2]]]}), 7, 7),  # a prefix
        (told(2, 4, [1, 0, 0, 1], **{VERSIONS: [[[2, 1], [8, 1]]]}), 2, 8),  # of a program: one list
    ]
    rollouts, tokens, columns = decided(queue, rows)
    assert rollouts.version.tolist() == [4, 3, 3, 3, 7, 2] and rollouts.newest_version.tolist() == [4, 5, 6, 6, 7, 8]
    assert rollouts.current_version == 9 and rollouts.staleness.tolist() == [5, 6, 6, 6, 2, 7]
    expected = [[4, 4, 4], [3, 5, 5, 5], [3, 3, 3, 6], [3, 6, 6], [9, 9, 7, 7], [2, 8]]
    assert [tokens.version[tokens.row == i].tolist() for i in range(6)] == expected
    assert tokens.version.dtype == torch.int64
    assert columns[2] == [3, 3, 9, 3, 6] and columns[5] == [2, 9, 9, 8], "what was only read counts as made now"


def test_a_loop_that_does_not_say_it_is_refused(queue: MemoryQueue) -> None:
    assert decided(queue, [(told(0, 3), 4, 4), (told(0, 2), 4, 4)])[2] == [[4, 4, 4], [4, 4]]
    few = r"by the versions 3 to 4 has 3 trained tokens in 1 turns, .* tells 1 tokens in 1 requests, of the versions 3,"
    with raises(MethodError, match=few):
        decided(queue, [(told(0, 3, **{VERSIONS: [[[3, 1]]]}), 3, 4)])
    with raises(MethodError, match=r"0.*0.*extra_fie"):
        decided(queue, [(told(0, 3), 3, 4)])


def test_a_row_of_one_version_is_of_that_version_whatever_its_loop_asked(queue: MemoryQueue) -> None:
    """Every row of a loop has the requests of all of them; a loop may ask beside its turns, too."""
    requests = [[[1, 5]], [[2, 5]]]
    rows = [
        (told(0, 5, **{VERSIONS: requests}), 1, 1),  # a row of each request
        (told(0, 5, **{VERSIONS: requests}), 2, 2),
        (told(1, 3, **{VERSIONS: [[[4, 9]], [[4, 3]]]}), 4, 4),  # a summary before the turn
        (told(1, 5, [1, 1, 0, 1, 1], **{VERSIONS: [[[-1, 2], [7, 1]], [[7, 5]]]}), 7, 7),  # a prefix, and a cut turn
        (told(2, 5, [1, 1, 0, 1, 1], **{VERSIONS: [[[-1, 2], [7, 2]]]}), 7, 7),  # of a program: one list
        (told(2, 3, **{VERSIONS: [[[6, 3]]]}), 7, 7),
    ]
    _, tokens, columns = decided(queue, rows)
    expected = [[1] * 5, [2] * 5, [4] * 3, [9, 9, 7, 7], [9, 9, 7, 7], [7] * 3]
    assert [tokens.version[tokens.row == i].tolist() for i in range(6)] == expected
    assert columns[1] == [2] * 5 and columns[3] == [9, 9, 9, 7, 7]


def test_adjoining_requests_are_one_turn_if_nothing_was_cut(queue: MemoryQueue) -> None:
    assert decided(queue, [(told(0, 5, **{VERSIONS: [[[1, 3]], [[2, 2]]]}), 1, 2)])[2] == [[1, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    ("mask", "requests", "oldest", "newest", "message"),
    [
        ([1, 1, 0, 1, 1], [[[1, 3]], [[2, 2]], [[3, 5]]], 1, 3, "4.*2.*10.*3"),
        ([1, 1, 1, 1], [[[1, 3]], [[2, 2]]], 1, 2, "4.*1.*5.*2"),
        ([1, 1, 0, 1, 1], [[[1, 2]], [[3, 2]]], 2, 3, "4.*2.*1.*3"),
        ([1, 1, 1, 1], [[[2, 2]], [[4, 2]]], 2, 3, "4.*2.*2.*4"),
    ],
)
def test_requests_that_cannot_be_matched_are_refused(
    queue: MemoryQueue, mask: list[int], requests: Any, oldest: int, newest: int, message: str
) -> None:
    """Rather than versions of other tokens: the loop cut or asked what is no turn of the row."""
    with raises(MethodError, match=message):
        decided(queue, [(told(0, len(mask), mask, **{VERSIONS: requests}), oldest, newest)])


def test_without_the_signal_nothing_is_read(queue: MemoryQueue) -> None:
    rows = {"a_0_0": told(0, 3, **{VERSIONS: [[[3, 1]]]}), "b_0_0": told(0, 2)}
    selected, _, _ = run(queue, rows, stack=MethodStack([Blind()]))
    assert selected.versions is None and TOKEN_VERSION not in queue.rows["a_0_0"]


def test_runs() -> None:
    assert runs([3, 3, -1, 5]) == [[3, 2], [-1, 1], [5, 1]] and runs([]) == [] and runs([-1, -1]) == [[-1, 2]]


class Workers:
    """The weights are a number; the log-prob of a token is its id plus 100 times that number."""

    def __init__(self, queue: MemoryQueue) -> None:
        self.queue, self.weights, self.saved, self.most = queue, 0.0, {}, 0
        self.passes: list[tuple[float, list[str]]] = []

    def save_model_to_cpu(self, name: str) -> None:
        self.saved[name] = self.weights
        self.most = max(self.most, len(self.saved))

    def restore_model_from_cpu(self, name: str) -> None:
        self.weights = self.saved[name]

    def clear_cpu_model(self, name: str) -> None:
        del self.saved[name]

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        assert batch.extra_info["calculate_entropy"] is False and batch.extra_info["temperature"] == 0.5
        self.passes.append((self.weights, list(batch.keys)))
        for key in batch.keys:
            row = self.queue.rows[key]
            values = torch.cat([row["prompts"], row["responses"]]).float() + 100 * self.weights
            row["log_probs"] = values.roll(-1)  # of a token at the place before it, as verl's engine gives them


def test_old_log_probs_by_the_weights_that_generated_each_token(queue: MemoryQueue) -> None:
    """Rows of one version, of several, of a lost one, and rows that fill the batch; passes of a multiple of 2 rows."""
    workers = Workers(queue)
    snapshots = Snapshots(workers, 3, 0.5)
    for version in range(4):
        workers.weights = float(version)
        snapshots.keep(version)
        snapshots.keep(version)  # the second batch of a step
    assert len(workers.saved) == 3 and workers.most == 4
    workers.weights = 3.5  # an optimizer step after the publication
    versions = {"a": [3, 3], "b": [1, 1, 2], "c": [0, 3], "d": [2, 2, 2]}
    masks = {"a": [1, 1], "b": [1, 0, 1], "c": [1, 1], "d": [1, 1, 0]}
    for n, (key, mask) in enumerate({**masks, "padding": [1]}.items()):
        response = 10 * n + torch.arange(len(mask))
        row = {"prompts": torch.tensor([7, 8]), "responses": response, "response_mask": torch.tensor(mask)}
        queue.put_rows({key: {**row, "old_log_probs": response + 300.0}})
    batch = KVBatchMeta(
        partition_id="train",
        keys=[*masks, "padding"],
        tags=[{}, {}, {}, {}, {"is_padding": True}],
        extra_info={},
    )
    logged = snapshots.recompute(batch, {k: torch.tensor(v) for k, v in versions.items()}, 3, 2)
    # what was only read keeps what it had; so does a token of version 0, which is no longer kept
    expected = {"a": [300, 301], "b": [110, 311, 212], "c": [320, 321], "d": [230, 231, 332], "padding": [340]}
    assert {k: queue.rows[k]["old_log_probs"].tolist() for k in expected} == expected
    assert workers.passes == [(1.0, ["a", "b"]), (2.0, ["b", "d"])]
    assert workers.weights == 3.5 and len(workers.saved) == 3 and workers.most == 4
    assert logged.pop("rl_plugins/version_seconds") > 0
    assert logged == {"rl_plugins/version_passes": 2.0, "rl_plugins/version_lost": pytest.approx(1 / 9)}


def test_fresh_rows_need_no_pass(queue: MemoryQueue) -> None:
    workers = Workers(queue)
    snapshots = Snapshots(workers, 2, 0.5)
    snapshots.keep(5)
    queue.put_rows({"a": {"response_mask": torch.ones(2), "old_log_probs": torch.tensor([1.0, 2.0])}})
    batch = KVBatchMeta(partition_id="train", keys=["a"], tags=[{}], extra_info={})
    logged = snapshots.recompute(batch, {"a": torch.tensor([5, 5])}, 5, 1)
    assert not workers.passes and workers.most == 1 and logged["rl_plugins/version_passes"] == 0


def test_the_trainer_gets_its_weights_back_when_a_pass_fails(queue: MemoryQueue) -> None:
    workers = Workers(queue)
    snapshots = Snapshots(workers, 2, 0.5)
    snapshots.keep(0)
    workers.weights = 1.0
    queue.put_rows({"a": {"response_mask": torch.ones(2), "old_log_probs": torch.zeros(2)}})
    batch = KVBatchMeta(partition_id="train", keys=["a"], tags=[{}], extra_info={})
    with pytest.raises(KeyError, match="prompts"):
        snapshots.recompute(batch, {"a": torch.tensor([0, 0])}, 1, 1)
    assert workers.weights == 1.0 and list(workers.saved) == ["rl_plugins_version_0"]
