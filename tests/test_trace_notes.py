"""What methods say to the trace: the numbers in their notes are those they decided by, and trees are whole."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from cases import case_of
from scipy import stats
from test_contract import BUILT_IN
from test_services import Server
from test_trace import Letters, read
from traces import by_name

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.requests import ORIGIN, Trajectory
from rl_plugins.core.rollouts import GroupSoFar, Rollouts, TokenIds
from rl_plugins.kit.agents import Observation
from rl_plugins.methods.aepo_rollout import AepoRollout
from rl_plugins.methods.branch_text_rollout import BranchTextRollout
from rl_plugins.methods.brorl import BroRL
from rl_plugins.methods.d3s import D3s
from rl_plugins.methods.difficulty_slices import DifficultySlices
from rl_plugins.methods.drive import Drive
from rl_plugins.methods.echo_labels import EchoLabels
from rl_plugins.methods.echo_tree import EchoTree
from rl_plugins.methods.fapo.method import Fapo
from rl_plugins.methods.gigpo import Gigpo
from rl_plugins.methods.hgpo import Hgpo
from rl_plugins.methods.latr import Latr
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.methods.vade import Vade
from rl_plugins.methods.xrpo_allocate import XrpoAllocate
from rl_plugins.runtime import registry
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.plan import first_plan, next_plan
from rl_plugins.runtime.stack import MethodStack, Watcher
from rl_plugins.runtime.trace import trace_of
from rl_plugins.runtime.trace.notes import rendered
from rl_plugins.testing import make_rollouts, make_run, make_tokens, make_turns
from rl_plugins.testing.contract.host import run_batch
from rl_plugins.testing.contract.kit import Kit
from rl_plugins.testing.contract.scenarios import scenarios
from rl_plugins.testing.data import make_token_ids
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program


def traced(folder: Path, methods: Sequence[Method], rollouts: Rollouts) -> Any:
    """Records of the rows, of the batch, and the decision of one batch."""
    stack = MethodStack([*methods, *trace_of(True, "trace", str(folder))])
    stack.start(make_run(chat=Letters(), total_batches=1))
    rollouts = rollouts if rollouts.token_ids else rollouts.replace(token_ids=make_token_ids(rollouts))
    d = decide(stack, rollouts, make_tokens(rollouts), None, grpo_advantages, 10**6)
    return read(folder, "rollouts"), read(folder, "batches")[0], d, stack


def said(rows: Sequence[dict[str, Any]], method: str) -> dict[int, list[dict[str, Any]]]:
    """Row -> its notes of a method, the named numbers as a mapping."""
    found = {
        r["row"]: [{**n, "values": by_name(n["values"])} for n in r["notes"] if n["method"] == method] for r in rows
    }
    return {i: notes for i, notes in found.items() if notes}


def test_notes_have_the_numbers_of_the_decision(tmp_path: Path) -> None:
    rewards = [0.0, 1.0, 2.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    rollouts = make_rollouts(rewards, text=list("abcdefgh"))
    # the pivot of mc_grpo is the row with the median reward
    rows, _, d, _ = traced(tmp_path / "mc", [McGrpo()], rollouts)
    notes = said(rows, "mc_grpo")
    assert sorted(notes) == [i for i in range(8) if not d.stays[i]] and len(notes) == 2
    assert all(notes[i][0]["values"] == {"median": rewards[i]} and notes[i][0]["hook"] == "shape" for i in notes)
    # brorl drops the second group, whose rewards are equal
    rows, _, d, _ = traced(tmp_path / "brorl", [BroRL(BroRL.Params(dynamic_sampling=True))], rollouts)
    notes = said(rows, "brorl")
    assert sorted(notes) == [4, 5, 6, 7] and not d.stays[4:].any() and d.stays[:4].all()
    assert {n[0]["text"] for n in notes.values()} == {"all rewards of the group are equal"}
    # d3s drops the rows whose advantages add least to the variance
    half = D3s(
        D3s.Params(batch_rows_start=None, group_rows_start=0.5, group_rows_end=0.5, tokens_start=1.0, tokens_end=1.0)
    )
    rows, _, d, _ = traced(tmp_path / "d3s", [half], make_rollouts(rewards[:4]))
    notes = said(rows, "d3s")
    assert sorted(notes) == [i for i in range(4) if not d.stays[i]] and len(notes) == 2
    grpo = grpo_advantages(make_rollouts(rewards[:4]))
    assert all(notes[i][0]["values"]["advantage"] == pytest.approx(float(grpo[i])) for i in notes)


def test_majority_labels_and_extremes(tmp_path: Path) -> None:
    texts = [rf"\boxed{{{a}}}" for a in "2223"] + [rf"\boxed{{{a}}}" for a in "1145"]
    rollouts = make_rollouts([0.0] * 8, text=texts)
    rows, _, d, _ = traced(tmp_path / "labels", [EchoLabels()], rollouts)
    notes = said(rows, "echo_labels")
    assert notes[3][0]["text"] == "answered 3; the label 2 has 3 of 4 votes"
    assert notes[4][0]["values"] == {"votes": 2, "size": 4}
    assert [r["rewarded"][0]["reward"] for r in rows] == d.rollouts.reward.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("status", [200, 401], ids=["answers", "refuses and repeats the key"])
def test_no_key_of_a_judge_is_in_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Neither that of the environment nor one in the address, whatever the server answers."""
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-environment")
    server = Server()
    server.replies = [(status, "\\boxed{1}" if status == 200 else {"error": "sk-of-the-environment is no key"})]
    url = server.url.replace("/v1", "/sk-of-the-address/v1")
    options = {"judge_url": url, "judge_model": "m", "judge_key_env": "JUDGE_KEY", "answer_column": None}
    judged = Fapo(Fapo.Params(**options))  # type: ignore[arg-type]
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0], text=list("abcd"), meta={"prompt": ["p"] * 4})
    try:
        rows, _, _, _ = traced(tmp_path, [judged], rollouts)
    finally:
        server.http.shutdown()
        server.http.server_close()
    assert server.seen[0][0].startswith("/sk-of-the-address/")
    assert server.seen[0][1]["Authorization"] == "Bearer sk-of-the-environment"
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert {p.parent.name for p in files} == {"rollouts", "batches", "tokens"}
    for file in files:
        whole = pq.read_table(file)
        assert b"sk-of-the" not in file.read_bytes() and "sk-of-the" not in f"{whole.schema} {whole.to_pylist()}"
    text = "wrong step 1" if status == 200 else "the judge failed"
    assert [n[0]["text"] for n in said(rows, "fapo").values()] == [text] * 2


def test_a_sampler_says_what_it_knows_of_prompts(tmp_path: Path) -> None:
    """The posterior of `vade` before the batch is in the batch, for every prompt that it chose."""
    stack = MethodStack([Vade(), *trace_of(True, "trace", str(tmp_path))])
    stack.start(make_run(chat=Letters(), total_batches=2))
    counts = {}
    for number in range(2):
        state = stack.methods[0].state
        counts[number] = (state["alpha"].clone(), state["beta"].clone())
        plan = first_plan(stack, [0, 1], 4, 8, 16, None)
        prompts = [row.prompt_index for row in plan.rows]
        index = [p for p in prompts for _ in range(4)]
        rollouts = make_rollouts([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], prompt_index=index, batch=number)
        rollouts = rollouts.replace(token_ids=make_token_ids(rollouts))
        decide(stack, rollouts, make_tokens(rollouts), None, grpo_advantages, 10**6)
    for number in range(2):
        (batch,) = read(tmp_path, "batches", number)
        assert [n["prompt_index"] for n in batch["prompts"]] == batch["selected"] and batch["selected"]
        alpha, beta = (c + 1 for c in counts[number])
        for note in batch["prompts"]:
            values, i = by_name(note["values"]), note["prompt_index"]
            assert values["mean"] == pytest.approx(float(alpha[i] / (alpha[i] + beta[i])))
            assert values["std"] == pytest.approx(stats.beta(float(alpha[i]), float(beta[i])).std())
            assert note["hook"] == "select_prompts" and note["method"] == "vade" and note["group"] is None
            assert 0 < values["drawn"] < 1 and values["std"] > 0


@pytest.mark.parametrize("sampler", [Drive, DifficultySlices])
def test_samplers_of_a_set_say_which_one(tmp_path: Path, sampler: type[Method]) -> None:
    """Every prompt that they choose has a note with the size of the set."""
    stack = MethodStack([sampler(), *trace_of(True, "trace", str(tmp_path))])
    stack.start(make_run(chat=Letters(), total_batches=1))
    plan = first_plan(stack, [0, 1, 2, 3], 4, 16, 16, None)
    rollouts = make_rollouts([1.0, 0.0] * 8, prompt_index=[row.prompt_index for row in plan.rows for _ in range(4)])
    rollouts = rollouts.replace(token_ids=make_token_ids(rollouts))
    decide(stack, rollouts, make_tokens(rollouts), None, grpo_advantages, 10**6)
    (batch,) = read(tmp_path, "batches")
    assert sorted(n["prompt_index"] for n in batch["prompts"]) == sorted(batch["selected"]) and batch["selected"]
    assert all(by_name(n["values"])["size"] > 0 and n["method"] == sampler.name for n in batch["prompts"])


def test_a_planner_says_why_a_prompt_gets_more(tmp_path: Path) -> None:
    stack = MethodStack(
        [XrpoAllocate(XrpoAllocate.Params(phases=2, n_first=2)), *trace_of(True, "trace", str(tmp_path))]
    )
    stack.start(make_run(chat=Letters(), total_batches=1))
    first = first_plan(stack, [3, 5], 4, 8, 16, None)
    found = [torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])]
    so_far = tuple(GroupSoFar(row, r) for row, r in zip(first.rows, found, strict=True))
    more = next_plan(stack, replace(first, rows=(), round=1, so_far=so_far, budget=4), 16)
    extra = {row.group: row.n for row in more.rows}
    rollouts = make_rollouts([0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], prompt_index=[3, 3, 5, 5])
    rollouts = rollouts.replace(token_ids=make_token_ids(rollouts))
    decide(stack, rollouts, make_tokens(rollouts), None, grpo_advantages, 10**6)
    (batch,) = read(tmp_path, "batches")
    notes = {n["group"]: {**n, "values": by_name(n["values"])} for n in batch["prompts"]}
    assert [(g, n["prompt_index"], n["hook"]) for g, n in notes.items()] == [(0, 3, "plan"), (1, 5, "plan")]
    assert {g: n["values"]["more"] for g, n in notes.items() if n["values"]["more"]} == extra and extra[0] >= 1
    assert [(n["values"]["mean"], n["values"]["n"]) for n in notes.values()] == [(0.5, 2), (1.0, 2)]
    # Student's t of 1 degree of freedom at 95 %, and a deviation of sqrt(1/2) of two values
    assert [n["values"]["half_width"] for n in notes.values()] == pytest.approx([12.7062 * 0.5, 0.0], rel=1e-4)


def test_turns_name_those_they_are_compared_with(tmp_path: Path) -> None:
    turns = make_turns([["a", "b"], ["a", "c"], ["a", "b"], ["d"]], [[0, 1], [0, 0], [0, 3], [1]])
    rollouts = make_rollouts([1.0, 0.0, 3.0, 1.0], lengths=[2, 2, 2, 1], turns=turns)
    method = Gigpo(Gigpo.Params(gamma=1.0, invalid_action_penalty_coef=0.0))
    rows, _, d, _ = traced(tmp_path / "gigpo", [method], rollouts)
    compared = {(r["row"], t["turn"]): t["compared"] for r in rows for t in r["turns"]}
    assert all([c["name"] for c in of] == ["state"] and of[0]["method"] == "gigpo" for of in compared.values())
    sets = {key: of[0]["set"] for key, of in compared.items()}
    assert sets[0, 0] == sets[1, 0] == sets[2, 0] != sets[0, 1] == sets[2, 1] and sets[3, 0] not in (sets[0, 0],)
    assert [compared[key][0]["size"] for key in ((0, 0), (0, 1), (1, 1), (3, 0))] == [3, 2, 1, 1]
    # returns 1, 0, 3 of the three turns that begin in "a"; 1 and 3 of those in "b"
    values = [compared[key][0]["advantage"] for key in ((0, 0), (1, 0), (2, 0), (0, 1), (2, 1))]
    assert values == pytest.approx([1 - 4 / 3, -4 / 3, 3 - 4 / 3, -1, 1])
    rows, _, _, _ = traced(tmp_path / "hgpo", [Hgpo(Hgpo.Params(gamma=1.0, history_length=1))], rollouts)
    of = {(r["row"], t["turn"]): t["compared"] for r in rows for t in r["turns"]}
    assert [c["name"] for c in of[0, 1]] == ["state", "history of 1"] and [c["name"] for c in of[0, 0]] == ["state"]
    assert [c["size"] for c in of[0, 1]] == [2, 2]


# ---- trees


def recorded(folder: Path, groups: Sequence[Sequence[Trajectory]]) -> list[dict[str, Any]]:
    """Records of the rows of programs, a list of rows for each prompt."""
    rows = [row for of in groups for row in of]
    rollouts = make_rollouts(
        torch.arange(len(rows)).double(),
        [g for g, of in enumerate(groups) for _ in of],
        lengths=[len(row) for row in rows],
        meta={ORIGIN: [row.columns.get(ORIGIN) for row in rows]},
    )
    ids = TokenIds.cat(make_token_ids(rollouts).prompt, [torch.tensor(list(row.tokens)) for row in rows])
    return traced(folder, [], rollouts.replace(token_ids=ids))[0]


def check_tree(rows: Sequence[dict[str, Any]]) -> None:
    """A row and its parent share the tokens before the place where they parted; so does what was pruned."""
    by_row = {r["row"]: r for r in rows}
    for r in rows:
        if r["branch"] is not None and r["branch"]["parent"] is not None:
            parent, start = by_row[r["branch"]["parent"]], r["branch"]["start"]
            assert parent["group"] == r["group"] and parent["row"] != r["row"]
            assert parent["completion_ids"][:start] == r["completion_ids"][:start]
        for p in r["pruned"] or ():
            assert p["start"] <= len(r["completion_ids"]) and p["ids"]


def unsure(text: str) -> dict[str, float]:
    """Two ways at every third letter, then a long stretch that does not depend on it."""
    made = text.split(">")[-1]
    if len(made) >= 24:
        return {EOS: 1.0}
    return {"a": 0.5, "b": 0.5} if len(made) % 3 == 1 else {"x": 0.98, "y": 0.02}


def test_pruned_branches_of_latr(tmp_path: Path) -> None:
    params = {"eta": (1.0,), "eta_steps": (0,), "lookahead": (4,), "tau_abs": 0.15, "tau_rel": 0.25}
    method = Latr(Latr.Params(**params, stop_when_full=False))
    engine = TableEngine(unsure, seed=3)
    logged: dict[str, float] = {}
    prompt = make_prompt(engine.chat, "q", n=4, max_tokens=40, traced=True)
    rows = [row for (row,) in run_program(method, prompt, engine, logged)]
    records = recorded(tmp_path, [rows])
    check_tree(records)
    pruned = [(r, p) for r in records for p in r["pruned"] or ()]
    assert len(pruned) >= 3 and logged["latr/pruning_ratio"] > 0
    whys = Counter(p["why"] for _, p in pruned)
    assert set(whys) == {"edit distance / age below 0.4", "grew on a branch that was pruned"}
    for r, p in pruned:
        if p["why"].startswith("edit"):
            assert p["score"] == 0.25 and len(p["ids"]) == 4, "one of four tokens differs"
        assert p["text"] == Letters().decode(p["ids"]) and r["completion_ids"][p["start"]] != p["ids"][0]
        path = [*prompt.tokens, *r["completion_ids"][: p["start"]], *p["ids"]]
        for k in range(len(path) - len(p["ids"]), len(path)):  # the model makes each of its tokens in its place
            assert engine.probabilities(path[:k]).get(path[k], 0.0) >= 0.5
    untraced = run_program(method, replace(prompt, traced=False), TableEngine(unsure, seed=3))
    assert [(r.tokens, r.logprobs is not None) for (r,) in untraced] == [(r.tokens, True) for r in rows]
    assert all(r.origin is None for (r,) in untraced)


def test_branches_of_echo_and_what_was_cut(tmp_path: Path) -> None:
    """Five certain letters, one of five, and from the ninth on ever less certain ones."""

    def astray(text: str) -> dict[str, float]:
        made = len(text.rsplit(">", 1)[-1])
        if made == 5:
            return {c: 0.2 - 0.01 * i for i, c in enumerate("pqrstu")}
        best = {8: 0.9, 9: 0.7, 10: 0.2}.get(made, 0.97)
        return {"o": best, **dict.fromkeys("pqrstu", (1 - best) / 6)} if made < 14 else {EOS: 1.0}

    rules = dict(entropy_window=2, delta_upper=0.5, logprob_top_k=7, confidence_top_k=3, entropy_high=1.5)
    engine = TableEngine(astray, seed=3)
    prompt = make_prompt(engine.chat, "go", n=6, traced=True)
    rows = [row for (row,) in run_program(EchoTree(EchoTree.Params(**rules)), prompt, engine)]
    records = recorded(tmp_path, [rows])
    check_tree(records)
    branched = [r for r in records if r["branch"] and r["branch"]["parent"] is not None]
    assert [r["row"] for r in branched] == [1, 2, 3]
    p = [0.2 - 0.01 * i for i in range(6)]
    entropy = -sum(x / sum(p) * math.log(x / sum(p)) for x in p)
    for r in branched:
        assert r["branch"]["parent"] == 0 and r["branch"]["start"] == 5
        assert r["branch"]["score"] == pytest.approx(entropy, abs=1e-6) and r["branch"]["why"] == "entropy of the place"
    cut = [r for r in records if r["pruned"]]
    assert [r["row"] for r in cut] == [0, 1, 2, 3]
    for r in cut:
        (tail,) = r["pruned"]
        assert tail["why"] == "entropy spike" and tail["score"] > 0.5
        assert tail["start"] == len(r["completion_ids"]) == 11 and tail["ids"][-1] == 0
    assert records[4]["branch"] is None and records[5]["pruned"] is None


def test_splits_at_given_places(tmp_path: Path) -> None:
    engine = TableEngine(lambda text: {"a": 0.5, "b": 0.5}, seed=1)
    method = BranchTextRollout(BranchTextRollout.Params(places=(2, 4)))
    prompts = [make_prompt(engine.chat, text, n=4, max_tokens=6, traced=True) for text in ("one", "two")]
    groups = [[row for (row,) in of] for of in run_program(method, prompts, engine)]
    records = recorded(tmp_path, groups)
    check_tree(records)
    found = [(r["branch"]["parent"], r["branch"]["start"]) for r in records]
    assert found == [(None, 0), (0, 4), (0, 2), (2, 4), (None, 0), (4, 4), (4, 2), (6, 4)]


def test_chains_of_an_agent(tmp_path: Path) -> None:
    engine = TableEngine({">": {"a": 0.5, "b": 0.5}, "a": {EOS: 1.0}, "b": {EOS: 1.0}}, seed=2)
    params = dict(environment=Talk, initial_rollouts=2, branch_probability=0.0, top_logprobs=2)
    method = AepoRollout(AepoRollout.Params(**params, max_turns=3))
    prompt = make_prompt(engine.chat, "go", n=5, max_tokens=40, traced=True)
    logged: dict[str, float] = {}
    rows = [row for (row,) in run_program(method, prompt, engine, logged)]
    records = recorded(tmp_path, [rows])
    check_tree(records)
    grown = [r for r in records if r["branch"]["parent"] is not None]
    assert len(grown) == logged["aepo_rollout/branches"] == 3
    assert all(r["branch"]["score"] == pytest.approx(0.0) and r["branch"]["start"] > 0 for r in grown)
    assert sum(r["branch"]["parent"] is None for r in records) == 2


class Talk:
    """Answers three times."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, row: Any) -> Any:
        return Observation("hello")

    def act(self, action: str) -> Any:
        self.turns += 1
        return Observation("more", reward=1.0, done=self.turns == 3)

    def close(self) -> None:
        pass


class Reasons(Watcher):
    """Keeps the rows that a `select` hook took out, and those of them that it said nothing of."""

    name = "reasons"

    def __init__(self) -> None:
        super().__init__()
        self.gone, self.untold = 0, 0

    def saw(self, hook: str, method: str, args: tuple[Any, ...], result: Any, notes: Any) -> None:
        if hook == "select" and result is not None:
            gone = args[0].kept & ~torch.as_tensor(result).bool()
            told = {row for note in notes for row, _ in rendered(note, len(gone))}
            self.gone += int(gone.sum())
            self.untold += len(set(gone.nonzero()[:, 0].tolist()) - told)


SELECTING = [n for n in BUILT_IN if "select" in getattr(registry.load(n), "claims", tuple)()]


@pytest.mark.parametrize("name", SELECTING)
def test_every_row_that_select_takes_out_has_a_reason(name: str) -> None:
    case, reasons = case_of(name), Reasons()
    params = {**case.params, **({"replaces": "no_signal"} if name == "rollout_replay" else {})}
    kit = Kit(registry.load(name), params, case.prepare, case.rows or ())
    kit.build()
    for place, rollouts, tokens in scenarios(kit):
        kit.decide(kit.stack(reasons), rollouts, tokens)
        assert not reasons.untold, place
    stack = kit.stack(reasons)
    for _ in range(4):
        run_batch(kit, stack)
    assert not reasons.untold
    assert reasons.gone or name in ("swarm_sapo", "ui_s1"), "by groups that no rollout here is of"
