"""Rollout programs in verl without Ray: the engine on a server in memory, rows, turns, groups, and what is refused."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import raises
from omegaconf import OmegaConf

os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "trl"))
sys.path.insert(0, str(Path(__file__).parent / "on_path"))

import probes
from memory_queue import MemoryQueue
from registering import registered
from test_batch import config, row, run
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.redundancy import independent
from rl_plugins.core.requests import Generate, Score, Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.verl import batch as batch_module
from rl_plugins.verl import workers
from rl_plugins.verl.capabilities import MANAGER, PROGRAM_MANAGER
from rl_plugins.verl.cpu.decoder import Decoder
from rl_plugins.verl.cpu.server import Limits, Server
from rl_plugins.verl.evaluation import PlannedBatches
from rl_plugins.verl.prompts import (
    COLUMN,
    FORCED,
    MADE,
    TURNS,
    UNKNOWN,
    VERSIONS,
    PromptBatches,
    note_of,
    number_rows,
    ranges,
)
from rl_plugins.verl.rows import Ragged, read_turns
from rl_plugins.verl.session import SESSION, ProgramAgentLoop, Session, VerlEngine, VerlRewards
from rl_plugins.verl.start import prepare
from rl_plugins.verl.workers import ProgramWorker, sessions

pytestmark = pytest.mark.host
TOKENIZER = build_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> MemoryQueue:
    made = MemoryQueue()
    monkeypatch.setattr(batch_module, "tq", made)
    return made


@pytest.fixture(autouse=True, scope="module")
def _probes():
    with registered(Wants, SeesTurns, Rolls, WantsLogprobs, Turning):
        yield


# ---- the engine


class Scripted(probes.Probe):
    """Runs the generator function it was given."""

    name = "scripted"

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.rollout = program  # type: ignore[method-assign]


def stack_of(program: Any) -> MethodStack:
    stack = MethodStack([Scripted(program)])
    stack.claims["rollout"] = stack.methods
    return stack


@dataclass
class Rewarding:
    """The part of verl's agent-loop worker that scores: the number of tokens, and what it was given."""

    reward_loop_worker_handles: Any = ()
    seen: list[dict[str, Any]] = field(default_factory=list)

    async def _compute_score(self, outputs: Any, kwargs: dict[str, Any]) -> None:
        (output,) = outputs
        self.seen.append(kwargs)
        output.reward_score = float(len(output.response_ids))
        output.extra_fields["reward_extra_info"] = {"a": 1.0, "b": float(kwargs["extra_info"].get("bonus", 0))}


@dataclass
class ScriptedServer:
    """Gives the outputs of a list, one per request."""

    outputs: list[TokenOutput]
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any) -> TokenOutput:
        self.asked.append({"id": request_id, "prompt": prompt_ids, **sampling_params})
        return self.outputs.pop(0)


SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.0, "logprobs": True}
COLUMNS = {
    "uid": "u",
    "session_id": 0,
    "global_steps": 4,
    "raw_prompt": [{"role": "user", "content": "a:12"}],
    "extra_info": {"level": 3, "x": 1},
    "reward_model": {"ground_truth": "7", "x": 2},
    "data_source": "here",
}


DATA = {"continuous_token": {"enable": False}}  # read by 0.9.0


def loop(server: Any, **rollout: Any) -> ProgramAgentLoop:
    sizes = {"prompt_length": 16, "response_length": 24, "max_model_len": None, "name": "hf_cpu"}
    cfg = OmegaConf.create({"actor_rollout_ref": {"rollout": sizes | rollout}, "data": DATA})
    family = ["qwen3"][: "hf_model_type" in inspect.signature(AgentLoopBase).parameters]  # from 0.9.1 on
    return ProgramAgentLoop(DictConfigWrap(cfg), server, TOKENIZER, None, None, DictConfigWrap(cfg.data), *family)


def made_by(
    program: Any, server: Any, n: int = 2, rewards: Any = None, worker: Any = None, rollout: Any = None, **kwargs: Any
) -> Any:
    """What the agent loop returns for a program."""

    async def go() -> Any:
        session = Session(worker or Rewarding(), stack_of(program), n, True, rewards or {}, (EOS,))
        return await loop(server, **(rollout or {})).run(SAMPLING, **{**COLUMNS, SESSION: session, **kwargs})

    return asyncio.run(go())


def output(tokens: list[int], first: float = -1.0, reason: str = "completed", steps: Any = (4, 4)) -> TokenOutput:
    fields = {"min_global_steps": steps[0], "max_global_steps": steps[1], "global_steps": steps[1]}
    return TokenOutput(
        token_ids=tokens, log_probs=[first - i for i in range(len(tokens))], stop_reason=reason, extra_fields=fields
    )


@pytest.mark.parametrize("router", [None, "router.yaml"])
def test_a_router_sees_tasks_and_rollouts(router: str | None) -> None:
    """Without one, all requests of a prompt have one id, so that verl sends them to the server that has the prompt."""

    def program(prompt: Any) -> Any:
        def one(k: int) -> Any:
            t = prompt.start()
            for _ in range(2):
                (made,) = yield Generate(t, max_tokens=2 + k)
                t = t.add(made)
            return t

        return (yield from independent(prompt, one))

    server = ScriptedServer([output([7]) for _ in range(4)])
    made_by(program, server, rollout={"router_config_path": router})
    ids = {limit: {asked["id"] for asked in server.asked if asked["max_tokens"] == limit} for limit in (2, 3)}
    assert ids == ({2: {"here|u_0_0"}, 3: {"here|u_0_1"}} if router else {2: {"u_0"}, 3: {"u_0"}})


def test_prompts_are_verls_own() -> None:
    seen = []

    def program(prompt: Any) -> Any:
        seen.append(prompt)
        yield []
        return []

    note = note_of(PlanRow(3, 5, 2, payload={"k": 1}, prefix=(9,), max_tokens=20, max_turns=6, redundant=3), "w", 0, 0)
    assert made_by(program, None, n=3, **{COLUMN: note | {"planned_at": 7, "draw": 1}}) == []
    (prompt,) = seen
    assert TOKENIZER.decode(prompt.tokens) == "<user>a:12<asst>"
    assert prompt.chat.prompt(COLUMNS["raw_prompt"]) == prompt.tokens
    assert prompt.chat.reply([{"role": "user", "content": "9"}]) == prompt.chat.encode("<user>9<asst>")
    assert (prompt.n, prompt.max_tokens, prompt.max_context, prompt.batch) == (3, 20, 40, 7)
    assert (prompt.prefix, prompt.payload, prompt.training, prompt.seed) == ((9,), {"k": 1}, True, "0|scripted|5")
    assert prompt.redundant == 3
    assert prompt.max_turns == 6 and prompt.turns(9) == 6 and prompt.turns(4) == 4
    assert prompt.columns["level"] == 3 and prompt.columns["x"] == 1, "extra_info before reward_model"
    assert prompt.columns["ground_truth"] == "7" and prompt.columns["prompt"] == COLUMNS["raw_prompt"]
    made_by(program, None, **{COLUMN: note | {"planned_at": 7, "draw": 2}})
    assert seen[1].seed == "0|scripted|5|2", "a second plan of one batch draws other numbers"


def test_requests_become_verls_sampling_parameters() -> None:
    server = ScriptedServer([output([7, 8, 9]), output([7, EOS], -3.0, steps=(2, 3)), output([6]), output([5, 6, 7])])
    made: list[Any] = []

    def program(prompt: Any) -> Any:
        start = prompt.start()
        made.append((yield Generate(start, n=2, max_tokens=5, stop=("34",))))
        made.append((yield [Generate(start.force((9,)), temperature=0.0), Generate(start, top=0, max_tokens=2)]))
        return []

    made_by(program, server)
    first, second, greedy, short = server.asked
    same = {"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.0, "logprobs": True}
    ids = list(TOKENIZER("<user>a:12<asst>", add_special_tokens=False)["input_ids"])
    stop = {"stop": ["34"], "include_stop_str_in_output": True}
    assert first == second == {"id": "u_0", "prompt": ids, "temperature": 0.8, "max_tokens": 5, **same, **stop}
    assert greedy == {"id": "u_0", "prompt": [*ids, 9], **same, "temperature": 0.0, "max_tokens": 23} | {
        "top_p": 1.0,
        "top_k": -1,
    }
    assert short["max_tokens"] == 2
    one, two = made[0]
    assert (one.tokens, one.logprobs, one.finish, one.version) == ((7, 8, 9), (-1.0, -2.0, -3.0), "length", 4)
    assert (two.finish, two.version, two.sampled) == ("eos", 3, True)
    (argmax,), (cut,) = made[1]
    assert not argmax.sampled and cut.tokens == (5, 6), "never more than was asked for"
    text = TOKENIZER.decode([7, 8, 9])
    stopped = ScriptedServer([output([7, 8, 9])])

    def until(prompt: Any) -> Any:
        made.append((yield Generate(prompt.start(), stop=(text[-2:],))))
        return []

    made_by(until, stopped)
    assert made[-1][0].finish == "stop"


def test_what_an_engine_cannot_do_is_said() -> None:
    def asking(**options: Any) -> Any:
        def program(prompt: Any) -> Any:
            yield Generate(prompt.start(), **options)
            return []

        return program

    with raises(MethodError, match=r"2.*rollout.name=vllm"):
        made_by(asking(top=2), ScriptedServer([]), rollout={"name": "vllm"})
    with raises(MethodError, match="rollout.name=hf_cpu or vllm"):
        made_by(asking(stop=("x",)), ScriptedServer([]), rollout={"name": "sglang"})
    without = TokenOutput(token_ids=[7, 8], log_probs=None, stop_reason="completed")
    with raises(MethodError, match="2.*0"):
        made_by(asking(), ScriptedServer([without]))


def test_an_interrupted_generation_keeps_its_tokens() -> None:
    nothing = TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields={"global_steps": None})
    first = output([7, 8], reason="aborted", steps=(2, 3))
    first.extra_fields[VERSIONS] = [[[2, 1], [3, 1]]]  # as `VersionsClient` tells the attempts of a request
    server = ScriptedServer([first, nothing, output([9, EOS], steps=(5, 5))])
    made: list[Any] = []

    def program(prompt: Any) -> Any:
        t = prompt.start()
        while not made or made[-1].finish == "abort":
            (g,) = yield Generate(t)
            made.append(g)
            t = t.add(g)
        return [t]

    ((row,),) = made_by(program, server, n=1)
    assert [g.finish for g in made] == ["abort", "abort", "eos"]
    assert row.response_ids == [7, 8, 9, EOS] and row.response_logprobs == [-1.0, -2.0, -1.0, -2.0]
    fields = row.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (2, 5), "oldest and newest weights of the row"
    assert fields[VERSIONS] == [[[2, 1], [3, 1], [5, 2]]]


def test_scores_are_verls_and_not_made_again() -> None:
    worker = Rewarding()
    got: list[Any] = []

    def program(prompt: Any) -> Any:
        one = prompt.start().force((7, 8, 9)).noted(bonus=4)
        got.append((yield Score(one)))
        return [one.scored(got[0]), one.force((6,))]

    rows = made_by(program, None, rewards={"a": 1.0, "b": 0.5}, worker=worker)
    assert got[0].rewards == {"a": 1.0, "b": 4.0} and got[0].reward == 3.0
    assert worker.seen[0]["extra_info"] == {"level": 3, "x": 1, "bonus": 4} and SESSION not in worker.seen[0]
    (scored,), (unscored,) = rows
    assert scored.reward_score == 3.0 and scored.extra_fields["reward_extra_info"] == {"a": 1.0, "b": 4.0}
    assert unscored.reward_score is None and len(worker.seen) == 1
    assert isinstance(got[0].rewards, VerlRewards)
    with raises(MethodError, match=r"a reward model[^.]*\. Give .*enable_resource_pool=True"):
        made_by(program, None, worker=Rewarding(reward_loop_worker_handles=None))


def test_rewards_of_a_programs_own_are_weighted() -> None:
    def program(prompt: Any) -> Any:
        yield []
        start = prompt.start().force((7,))
        rewards = ({"a": 2.0, "b": 4.0}, {"a": math.nan, "b": 4.0}, {"a": math.nan, "b": math.nan})
        return [type(start)(**{**vars(start), "rewards": r}) for r in rewards]

    rows = made_by(program, None, n=3, rewards={"a": 1.0, "b": 0.5})
    assert [r.reward_score for (r,) in rows[:2]] == [4.0, 2.0] and math.isnan(rows[2][0].reward_score)


# ---- rows


def test_a_row_says_where_its_tokens_come_from() -> None:
    server = ScriptedServer([output([7, EOS])])

    def program(prompt: Any) -> Any:
        begun = prompt.start().force((10, 11)).observe((6, 6)).turn(0, ("s", 1), 0.5)
        (g,) = yield Generate(begun)
        one = begun.add(g).turn(4, "next", valid=False).noted(k=[1])
        other = Trajectory((5, 6, 7), group=("g", 2))
        self_log.append(1)
        return [[one, other.observe((9,))], other]

    self_log: list[int] = []
    (one, other), (empty,) = made_by(program, server)
    assert one.response_ids == [10, 11, 6, 6, 7, EOS] and one.response_mask == [1, 1, 0, 0, 1, 1]
    assert one.response_logprobs == [0.0, 0.0, 0.0, 0.0, -1.0, -2.0]
    fields = one.extra_fields
    assert fields[FORCED] == [[0, 2]] == fields[UNKNOWN]
    assert fields[VERSIONS] == [[[-1, 2], [4, 2]]], "of the trained tokens; no policy made those that were put in"
    assert empty.extra_fields["max_global_steps"] == 3, "no engine was asked: the newest published weights"
    assert fields[TURNS][0] | {"reward": 0.5} == {
        "start": 0,
        "stop": 4,
        "anchor": ("s", 1),
        "reward": 0.5,
        "valid": True,
    }
    assert fields[MADE]["finish"] == "eos" and fields[MADE]["meta"] == {"k": [1]} and fields[MADE]["group"] is None
    assert (fields[MADE]["rollout"], fields[MADE]["index"]) == (0, 0)
    assert (other.extra_fields[MADE]["rollout"], other.extra_fields[MADE]["index"]) == (0, 1)
    assert other.prompt_ids == [5, 6, 7] and (other.response_ids, other.response_mask) == ([9], [0])
    assert (empty.response_ids, empty.response_mask) == ([EOS], [0]), "one end token that is not trained"
    assert empty.extra_fields[MADE]["rollout"] == 1 and empty.extra_fields[MADE]["group"] == "('g', 2)"
    assert empty.as_dict()["responses"].tolist() == [EOS]


def test_ranges_and_marks() -> None:
    assert ranges([True, True, False, True]) == [[0, 2], [3, 4]] and ranges([]) == [] and ranges([False]) == []
    of = Ragged.of(torch.nested.as_nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged))
    assert of.marked([[[1, 2]], [[0, 2]]]).tolist() == [False, True, False, True, True]


def test_sessions_of_verl() -> None:
    """In training every row has its own reward; in validation a rollout is a session, whose last row counts."""
    engine = VerlEngine(None, {}, Session(None, None, 1, True, {}, (EOS,)), COLUMNS, SAMPLING, "u")  # type: ignore[arg-type]
    a, b, c = (
        engine.output(Trajectory((1,)).force((7,)), False, AgentLoopMetrics(), {"rollout": 0, "index": 0})
        for _ in range(3)
    )
    c.reward_score = math.nan
    assert sessions([[a, b], [], [c]], {"session_id": 2}, False) == [(2, [a]), (3, [b]), (4, [c])]
    assert math.isnan(c.reward_score)
    assert sessions([[a, b], [], [c]], {"session_id": 0}, True) == [(0, [a, b]), (2, [c])]
    assert c.reward_score == 0.0


def test_the_worker_runs_one_program_per_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[dict[str, Any]] = []

    async def _run_prompt(self: Any, prompt: Any, *rest: Any) -> None:
        ran.append(prompt)

    monkeypatch.setattr(workers.AgentLoopWorker, "_run_prompt", _run_prompt)
    worker = object.__new__(ProgramWorker)
    worker.config = config("actor_rollout_ref.rollout.val_kwargs.n=5")
    worker._settings, worker._eos = type("S", (), {"rewards": {}}), (EOS,)
    worker._methods = stack_of(None)

    def served(prompt: dict[str, Any], validate: bool = False) -> dict[str, Any]:
        asyncio.run(worker._run_prompt(prompt, {}, {"validate": validate}))
        return ran[-1]

    note = {"given": []}
    plain = served({COLUMN: note, "__rollout_n__": torch.tensor(4)})
    assert (plain["__rollout_n__"], plain["agent_name"], plain[SESSION].n) == (1, "rl_plugins_program", 4)
    given = served({COLUMN: {"given": [1, 2]}, "__rollout_n__": 4})
    assert given["__rollout_n__"] == 3 and given[SESSION].n == 2, "two given completions and the program"
    assert served({COLUMN: {"given": [1, 2]}})["__rollout_n__"] == 2, "nothing is left for a program"
    assert SESSION not in served({}, validate=True)
    monkeypatch.setattr(Scripted, "in_eval", ("rollout",))
    assert served({}, validate=True)[SESSION].n == 5 and not ran[-1][SESSION].training


def test_a_program_on_a_real_generator() -> None:
    """The tiny model behind verl's interface: log-probs of a conversation equal those of one pass over it."""
    model = build_model(3).eval()
    server = Server(Decoder(model, [EOS], TOKENIZER), Limits(16, 24, 40))
    sampling = {**SAMPLING, "temperature": 1.0, "top_p": 1.0, "top_k": -1}

    def program(prompt: Any) -> Any:
        t = prompt.start()
        for _ in range(2):
            (g,) = yield Generate(t, max_tokens=5)
            t = t.add(g).observe(prompt.chat.reply([{"role": "user", "content": "7"}]))
        return [t]

    async def go() -> Any:
        session = Session(Rewarding(), stack_of(program), 1, True, {}, (EOS,))
        return await loop(server).run(sampling, **{**COLUMNS, SESSION: session})

    ((made,),) = asyncio.run(go())
    ids = torch.tensor([[*made.prompt_ids, *made.response_ids]])
    with torch.no_grad():
        plain = model(ids).logits[0, len(made.prompt_ids) - 1 : -1].log_softmax(1)
    for t, (token, trained, lp) in enumerate(
        zip(made.response_ids, made.response_mask, made.response_logprobs, strict=True)
    ):
        if trained:
            assert lp == pytest.approx(float(plain[t, token]), abs=2e-5)
    assert sum(made.response_mask) > 2 and 0 in made.response_mask


# ---- on the driver


def program_row(group: int, reward: float, rollout: int, index: int = 0, label: Any = None, **more: Any) -> dict:
    made = {"rollout": rollout, "index": index, "group": label, "finish": more.pop("finish", "eos"), "meta": {}}
    out = row(group, reward, length=more.pop("length", 3))
    out["extra_fields"] = {MADE: made | {k: more.pop(k) for k in ("meta", "metrics") if k in more}, **more}
    return out


def test_groups_apart_come_after_those_of_the_plan(queue: MemoryQueue) -> None:
    rows = {
        "b_0_0": program_row(1, 1.0, 0, finish="length"),
        "b_1_0": program_row(1, 0.0, 1, label="x"),
        "a_0_0": program_row(0, 1.0, 0, label="y"),
        "a_1_0": program_row(0, 0.0, 0, index=1, label="y", finish=""),
        "a_2_0": program_row(0, 3.0, 1, label="x"),
        "a_3_0": program_row(0, 2.0, 2),
    }
    selected, before, done = run(queue, rows, rows_of_batch=6)
    r = selected.generated
    assert before.keys == ["a_0_0", "a_1_0", "a_2_0", "a_3_0", "b_0_0", "b_1_0"]
    assert r.group.tolist() == [2, 2, 3, 0, 1, 4], "labels of different prompts are different groups"
    assert r.rollout.tolist() == [0, 0, 0, 0, 0, 0] and r.index.tolist() == [0, 1, 0, 0, 0, 0]
    assert r.truncated.tolist() == [False, False, False, False, True, False]
    assert done.decision.estimator == "rl_plugins"
    a = 1 / (2**0.5 + 2e-6)
    assert done.decision.row_advantages.tolist() == pytest.approx([a, -a, 0, 0, 0, 0], abs=1e-5)


def test_other_estimators_do_not_see_groups_apart(queue: MemoryQueue) -> None:
    rows = {"a_0_0": program_row(0, 1.0, 0), "a_1_0": program_row(0, 0.0, 1, label="x")}
    with raises(ConfigError, match="program"):
        run(queue, rows, config=config("algorithm.adv_estimator=rloo"))


def test_rows_of_programs_are_bounded_by_the_batch(queue: MemoryQueue) -> None:
    """verl's own agent loops may give any number of rows per rollout; a program's are counted."""
    rows = {f"a_{i}_0": program_row(0, float(i), i // 2, index=i % 2) for i in range(5)}
    with raises(MethodError, match="5.*4"):
        run(queue, rows)


def test_what_programs_logged_reaches_the_log(queue: MemoryQueue) -> None:
    rows = {
        "a_0_0": program_row(0, 1.0, 0, metrics={"m/x": ("mean", 6.0, 2.0)}),
        "b_0_0": program_row(1, 1.0, 0, metrics={"m/x": ("mean", 1.0, 1.0)}),
    }
    _, _, done = run(queue, rows)
    assert done.metrics["m/x"] == pytest.approx(7 / 3)


def test_log_probs_nobody_has_are_those_of_the_policy(queue: MemoryQueue) -> None:
    rows = {"a_0_0": program_row(0, 1.0, 0, **{UNKNOWN: [[1, 2]], FORCED: [[0, 2]]}), "a_1_0": program_row(0, 0.0, 1)}
    for i, r in enumerate(rows.values()):
        r["rollout_log_probs"] = torch.tensor([-1.0, 0.0, -3.0]) - i
        r["old_log_probs"] = torch.tensor([-1.1, -2.1, -3.1]) - i
    queue.put_rows(rows)
    batch = KVBatchMeta(partition_id="train", keys=list(rows), tags=[{"global_steps": 1}] * 2)
    selected, _, _ = run(queue, rows)
    metrics: dict[str, Any] = {}
    batch_module.complete_rollout_logprobs(batch, selected.unknown, metrics)
    assert queue.rows["a_0_0"]["rollout_log_probs"].tolist() == pytest.approx([-1.0, -2.1, -3.0])
    assert queue.rows["a_1_0"]["rollout_log_probs"].tolist() == [-2.0, -1.0, -4.0]
    forced = selected.forced["a_0_0"], selected.forced["a_1_0"]
    assert forced == ([[0, 2]], []) and metrics["training/rollout_probs_diff_max"] < 0.6


class Wants(probes.Probe):
    name = "wants"
    needs = frozenset({"column:level", "column:found"})

    def observe(self, rollouts, tokens, stats):
        pass


def test_columns_of_rows_win_over_those_of_the_dataset(queue: MemoryQueue) -> None:
    rows = {
        "a_0_0": program_row(0, 1.0, 0, meta={"level": 7, "found": "x"}),
        "a_1_0": program_row(0, 0.0, 1),
        "b_0_0": row(1, 0.0),
    }
    rows["b_0_0"]["extra_fields"] = {"found": "y"}  # an agent loop of the user's
    for r in rows.values():
        r["extra_info"] = {"level": 1}
    selected, _, _ = run(queue, rows, "wants")
    assert selected.generated.meta == {"level": [7, 1, 1], "found": ["x", None, "y"]}
    with raises(MethodError, match="`wants`.*`found`"):
        run(queue, {"c_0_0": row(0, 1.0) | {"extra_info": {"level": 1}}}, "wants")


# ---- turns of verl's own agent loops


def native(mask: list[int], **extra: Any) -> dict[str, Any]:
    out = row(0, 1.0, length=len(mask))
    out["response_mask"] = torch.tensor(mask)
    return out | {"responses": torch.arange(10, 10 + len(mask)), "prompts": torch.tensor([5, 6]), "extra_fields": extra}


def turns(*rows: dict[str, Any]) -> list[Any]:
    class Decode:
        def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
            return [" ".join(map(str, i)) for i in ids]

    columns = {
        k: torch.nested.as_nested_tensor([r[k] for r in rows], layout=torch.jagged)
        for k in ("response_mask", "responses", "prompts")
    }
    return read_turns(columns | {"extra_fields": [r["extra_fields"] for r in rows]}, Decode())


def test_turns_of_agent_loops() -> None:
    mask = [1, 1, 0, 0, 1, 0, 1]
    read, scores, tools, wrong, told, none = turns(
        native(mask),
        native(mask, turn_scores=[1.0, 2.0, 3.0], tool_rewards=[9.0, 9.0]),
        native(mask, turn_scores=[], tool_rewards=[0.5, 0.25]),
        native(mask, tool_rewards=[0.5]),
        native(mask, **{TURNS: [{"anchor": 1, "reward": 2.0}, {"anchor": 3, "valid": False}]}),
        native([0, 0]),
    )
    assert [(t.start, t.stop) for t in read] == [(0, 2), (4, 5), (6, 7)]
    assert [t.anchor for t in read] == ["5 6", "12 13", "15"], "the prompt, then what was read before the turn"
    assert [t.reward for t in scores] == [1.0, 2.0, 3.0]
    assert [t.reward for t in tools][:2] == [0.5, 0.25] and math.isnan(tools[2].reward)
    assert all(math.isnan(t.reward) for t in wrong), "a list that does not fit says nothing"
    assert [(t.anchor, t.valid) for t in told] == [(1, True), (3, False), (None, True)] and told[0].reward == 2.0
    assert none == ()


class SeesTurns(probes.Probe):
    """Advantages 1, 2, 3, .. in the order of turns."""

    name = "sees_turns"
    needs = frozenset({"turns"})
    advantages_per = "turn"

    def advantages(self, rollouts):
        return rollouts.turns.turn.double() + 1


@pytest.mark.parametrize("layout", ["one row per rollout", "one row per turn"])
def test_both_layouts_give_the_same_turns(queue: MemoryQueue, layout: str) -> None:
    if layout == "one row per rollout":
        rows = {"a_0_0": native([1, 0, 1, 1]), "a_1_0": native([1])}
        expected = {"a_0_0": [1, 0, 2, 2], "a_1_0": [1]}
    else:
        rows = {"a_0_1": native([1, 1]), "a_0_0": native([1]), "a_1_0": native([1])}
        expected = {"a_0_0": [1], "a_0_1": [2, 2], "a_1_0": [1]}
    selected, _, done = run(queue, rows, "sees_turns")
    assert selected.generated.turns.turn.tolist() == [0, 1, 0]
    assert {k: queue.rows[k]["advantages"].tolist() for k in done.batch.keys} == expected


# ---- start


PROGRAM = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.rollout.name=hf_cpu",
    "trainer.v1.trainer_mode=rl_plugins_sync",
    "+rl_plugins.methods=[rolls]",
]


class Rolls(probes.Probe):
    name = "rolls"
    brings = {"forced_tokens"}
    rows_per_rollout = 2
    needs = frozenset({"engine:logprobs=2", "turns", "column:mine"})
    in_eval = ("rollout", "plan")

    def plan(self, plan):
        return None

    def rollout(self, prompt):
        yield []
        return []


class WantsLogprobs(probes.Probe):
    name = "wants_logprobs"
    needs = frozenset({"rollout_logprobs"})

    def observe(self, rollouts, tokens, stats):
        pass


class Turning(WantsLogprobs):
    name = "turning"
    needs = frozenset({"turns"})


def test_programs_get_workers_of_ours() -> None:
    c = config(*PROGRAM)
    prepare(c)
    assert OmegaConf.select(c, MANAGER) == PROGRAM_MANAGER
    prepare(c)  # the driver and the trainer both do
    loaded = __import__("verl.utils.import_utils", fromlist=["x"]).load_class_from_fqn(
        PROGRAM_MANAGER, "AgentLoopManager"
    )
    assert loaded is workers.ProgramManager


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.rollout.name=vllm"], "name=vllm"),
        (["actor_rollout_ref.rollout.multi_turn.enable=True"], "multi_turn.enable"),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"], "default_agent_loop=tool_agent"),
        (["+actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B"], "agent_loop_manager_class=a.B"),
        (["algorithm.rollout_correction.rollout_is=token"], "rollout_is=token"),
        (["algorithm.rollout_correction.bypass_mode=True"], "bypass_mode=True"),
        (["+rl_plugins.methods=[rolls,wants_logprobs]"], "`wants_logprobs` needs it"),
        (["+rl_plugins.methods=[rolls,probing]"], "`probing`.*`rolls`"),
        (["trainer.v1.trainer_mode=rl_plugins_colocate_async"], "2"),
    ],
)
def test_refused_before_ray_starts(overrides: list[str], message: str) -> None:
    keys = {o.split("=")[0] for o in overrides}
    with raises(ConfigError, match=message):
        prepare(config(*[o for o in PROGRAM if o.split("=")[0] not in keys], *overrides))


def test_turns_need_an_agent_loop_that_has_some(tmp_path: Path) -> None:
    from datasets import Dataset as Table

    def table(**columns: Any) -> str:
        file = tmp_path / f"{'_'.join(columns)}.parquet"
        Table.from_list([{"prompt": "x", **columns}]).to_parquet(str(file))
        return f"data.train_files={file}"

    turning = [*PROGRAM[:-1], "+rl_plugins.methods=[turning]"]
    with raises(ConfigError, match="single_turn_agent"):
        prepare(config(*turning, table(a=1)))
    prepare(config(*turning, table(a=1), "actor_rollout_ref.rollout.agent.default_agent_loop=mine"))
    prepare(config(*turning, table(agent_name="tool_agent")))
    for mode in ("sync", "colocate_async"):  # a file that is not here may have the column or not
        unread = [*turning, "data.train_files=elsewhere.parquet", f"trainer.v1.trainer_mode=rl_plugins_{mode}"]
        with raises(ConfigError, match="agent_name"):
            prepare(config(*unread))
        prepare(config(*unread, "actor_rollout_ref.rollout.agent.default_agent_loop=mine"))


def test_prompts_with_agent_loops_of_their_own_are_refused() -> None:
    from test_batch import Dataset

    class Named(Dataset):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return super().__getitem__(i) | {"agent_name": "tool_agent" if i == 2 else "single_turn_agent"}

    dataset = Named()
    number_rows(dataset)
    made = PromptBatches(dataset, config())
    batch = made.build([PlanRow(0, 0, 2), PlanRow(1, 1, 2, prefix=(3,))], by_program=True)
    assert list(batch["agent_name"]) == ["single_turn_agent"] * 2, "the worker puts programs in"
    with raises(ConfigError, match=r"single_turn_agent.*tool_agent"):
        made.build([PlanRow(0, 0, 2), PlanRow(2, 1, 2)], by_program=True)


# ---- validation


class Edits(probes.Probe):
    """In evaluation: a hint in front of the first prompt, another level, a payload."""

    name = "edits"
    in_eval = ("plan",)
    change: dict[str, Any] = {}

    def plan(self, plan):
        first, *rest = plan.rows
        prompt = [{"role": "user", "content": f"hint {first.edit['prompt'][0]['content']}"}]
        edited = first.replace(edit={"prompt": prompt, "level": first.edit["level"] + 5}, payload="p")
        return plan.replace(rows=(edited.replace(**self.change), *rest))


def test_plans_of_an_evaluation_edit_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_batch import Dataset
    from verl.utils.dataset.rl_dataset import collate_fn

    dataset = Dataset()
    loader = [collate_fn([dataset[0], dataset[1]]), collate_fn([dataset[2]])]
    stack = MethodStack([Edits()])
    planned = PlannedBatches(loader, stack, PromptBatches(dataset, config()), 3)
    first, second = planned
    assert [p[0]["content"] for p in first["raw_prompt"]] == ["hint 0", "1"]
    assert [x["level"] for x in first["extra_info"]] == [5, 1] and second["extra_info"][0]["level"] == 7
    assert [n["payload"] for n in first[COLUMN]] == ["p", None] and first["dummy_tensor"].shape == (2, 1)
    assert [p[0]["content"] for p in loader[0]["raw_prompt"]] == ["0", "1"], "the loader's own stay"
    for change in ({"spare": 1}, {"given": (probes.Completion((1,)),)}, {"prefix": (1,)}):
        monkeypatch.setattr(Edits, "change", change)
        with raises(MethodError, match="edit prompts"):
            list(planned)


def test_other_texts_beside_images(tmp_path: Path) -> None:
    """The columns of the dataset tell before Ray starts."""
    from datasets import Dataset as Table

    file = tmp_path / "train.parquet"
    Table.from_list([{"prompt": "x", "images": ["a"]}]).to_parquet(str(file))
    seeds = [*PROGRAM[:-1], "+rl_plugins.methods=[xrpo_seeds]", f"data.train_files={file}"]
    with raises(ConfigError, match="`xrpo_seeds`"):
        prepare(config(*seeds))
