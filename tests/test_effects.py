"""Every parameter of every method changes something, and where it is declared to change nothing it does not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from methods.swarm import Letters, Memory, package, send
from test_contract import BUILT_IN, PARAMS, PREPARE

from rl_plugins.commands.check import check_and_print
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import MethodParams, param
from rl_plugins.kit.agents import Observation
from rl_plugins.methods.dots import save_adapter
from rl_plugins.methods.dots.predictor import Adapter
from rl_plugins.runtime import registry
from rl_plugins.testing.contract.effects import Beside, World, idle_parameters
from rl_plugins.testing.engine import EOS
from rl_plugins.tools.messages.contracts import Contract


def draw(*what: Any) -> float:
    """A number in [0, 1) that depends on these alone."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") / 2**32


def harder_and_easier(rollouts: Any) -> Any:
    """Right and wrong rollouts; of every four prompts in a row two are hard."""
    of_row = zip(rollouts.prompt_index.tolist(), rollouts.rollout.tolist(), strict=True)
    right = [
        float(draw(prompt, number, rollouts.batch) < (0.02, 0.1, 0.7, 0.9)[prompt % 4]) for prompt, number in of_row
    ]
    return rollouts.replace(reward=torch.tensor(right, dtype=torch.float64))


def writes(*turns: str) -> Callable[[str], Mapping[str, float]]:
    """A model that writes one of these texts in each turn, sure of it but where they part."""

    def model(text: str) -> Mapping[str, float]:
        place = text.rindex(">") + 1
        begun, chances = text[place:], dict[str, float]()
        for i, turn in enumerate(turns):
            if turn.startswith(begun):
                letter = turn[len(begun) : len(begun) + 1] or EOS
                chances[letter] = chances.get(letter, 0.0) + 0.05 + draw(text[:place], i)
        return chances or {EOS: 1.0}

    return model


def sets_of_four(rollouts: Any) -> Any:
    """Texts that differ from rollout to rollout, in sets of four wordings."""
    of_row = list(zip(rollouts.prompt_index.tolist(), rollouts.rollout.tolist(), strict=True))
    words = ["the", "answer", "to", "this", "question", "is", "1", "2", "3"]
    texts = [" ".join(w for w in words if draw(i, j, w, rollouts.batch) < 0.6) for i, j in of_row]
    return rollouts.replace(text=texts, meta={**rollouts.meta, "paraphrase_set_id": [i // 4 for i, _ in of_row]})


class Bench:
    """An environment whose answers depend on the action and on how many came before."""

    def __init__(self) -> None:
        self.taken = 0

    def reset(self, columns: Any) -> Observation:
        return Observation("go", state="start")

    def act(self, action: str) -> Observation:
        self.taken += 1
        chance = draw(action, self.taken)
        text = "NameError" if chance > 0.6 else "ok" if chance > 0.3 else "Tool call success"
        return Observation(text, chance, done=chance < 0.15, valid=chance < 0.35, state=self.taken % 3)

    def score(self) -> float:
        return float(self.taken)

    def close(self) -> None:
        pass


class Desk(Bench):
    """Another one."""

    def act(self, action: str) -> Observation:
        return super().act(f"{action}!")


def several_rewards(names: Sequence[str]) -> Callable[[Any], Any]:
    def prepare(r: Any) -> Any:
        others = [torch.tensor([float(draw(n, i, g) < 0.5) for i, g in enumerate(r.group.tolist())]) for n in names[1:]]
        rewards = torch.stack([r.reward, *(o.double() for o in others)], dim=1)
        return r.replace(rewards=rewards, reward_names=tuple(names), reward_weights=torch.ones(len(names)).double())

    return prepare


def cut_off(r: Any) -> Any:
    """Truncated rows, some of them loops of period 1 or 2, of mixed versions, with gradings that failed."""
    n = len(r)
    ends = [[5, 5, 5, 5], [5, 6, 5, 6], [5, 6, 7, 8], [5, 6, 7, 7]]
    ids = r.token_ids
    if ids is not None:
        completion = [torch.tensor([*c.tolist(), *ends[i % 4]]) for i, c in enumerate(ids.completion)]
        observed = [torch.cat([o, torch.ones(4, dtype=torch.bool)]) for o in ids.observed]
        r = r.replace(token_ids=type(ids)(ids.prompt, tuple(completion), tuple(observed)))
    accuracy = torch.tensor([float(draw(i, 3) < 0.5) for i in range(n)], dtype=torch.float64)
    return r.replace(
        truncated=torch.tensor([draw(i, 1) < 0.7 for i in range(n)]),
        newest_version=r.version + torch.tensor([int(draw(i, 2) < 0.3) for i in range(n)]),
        rewards=torch.stack([accuracy, r.reward], 1),
        reward_names=("accuracy", "other"),
        reward_weights=torch.ones(2).double(),
        meta={**r.meta, "broken": [draw(i, 4) < 0.3 for i in range(n)]},
    )


def tool_texts(r: Any) -> Any:
    def text(i: int, g: int) -> str:
        parts = [f"<tool_response>{'Error' if draw(i, g, k) < 0.5 else 'fine'}</tool_response>" for k in range(i % 4)]
        parts += ["<answer>1</answer>"] * (1 + (draw(g, i) < 0.4))
        return "".join([*parts, "<|im_end|><|im_start|>assistant<|im_end|>" * (i % 2)])

    return r.replace(raw_text=[text(i, g) for i, g in zip(r.rollout.tolist(), r.group.tolist(), strict=True)])


def long_anchors(r: Any) -> Any:
    """Texts of 300 letters of which the first differs, and short ones."""

    def anchor(i: int) -> str:
        if i % 2:
            return f"room number {i % 5}"
        return f"{i % 3}" + "".join("abcdefgh"[int(8 * draw(k))] for k in range(299))

    return r.replace(turns=r.turns.replace(anchor=[anchor(i) for i in range(len(r.turns.row))]))


def graded_turns(r: Any) -> Any:
    keys = list(zip(r.turns.row.tolist(), r.turns.turn.tolist(), strict=True))
    reward = torch.tensor([draw("reward", r.batch, *k) for k in keys], dtype=torch.float64)
    return r.replace(turns=r.turns.replace(reward=reward, valid=torch.tensor([draw("valid", *k) < 0.8 for k in keys])))


def episodes(r: Any) -> Any:
    turns = [n + r.batch for n in r.length.tolist()]
    reasons = [("done", "limit", "length", "error")[int(4 * draw(r.batch, i)) ** 2 // 3] for i in range(len(r))]
    return r.replace(meta={"turns": turns, "stop_reason": reasons, "extended": [False] * len(r)})


def head_features(r: Any) -> Any:
    size = 14

    def note(i: int) -> dict[str, Any]:
        return {"features": [draw(r.batch, i, k) for k in range(size)], "keep": 0.05 + 0.95 * draw(i), "q": None}

    return r.replace(meta={**r.meta, "arrol": [note(i) for i in range(len(r))]})


def judge(prompt: Any, a: Any, b: Any) -> tuple[float, float]:
    return draw(a, b, 1), draw(b, a, 2)  # it prefers places


def flaw(prompt: Any, answer: Any, completion: Any) -> int:
    return int(draw(str(prompt), str(answer), completion) * 3) - 1


def last_is_worst(messages: Any, steps: Sequence[str], columns: Any) -> list[float]:
    """The longer the right part, the lower the mean."""
    return [0.6] * (len(steps) - 1) + [-float(len(steps) ** 2)]


def advice(question: str) -> str:
    text = f"{draw(question):.12f}"
    operations = [
        {"operation": "ADD", "content": text, "option": "add", "experience": text},
        {"option": "merge", "merged_from": ["C0"]},
    ]
    return f"<Experiences>{text}</Experiences> ```json\n{json.dumps(operations)}\n```"


def swarm(files: int) -> Callable[[str], Any]:
    """An exchange in which two others have left questions of different length, so many each."""

    def opened(exchange: str) -> Memory:
        found = Memory()
        for sender in ("ann", "bob"):
            made = [
                package(f"{sender} {exchange}{'?' * 5 * k}", str(k), ("7", "8" * k, "7", "9" * 9))
                for k in range(1, files)
            ]
            send(found, sender, *made)
        return found

    return opened


def deep_trees(r: Any) -> Any:
    """Two rollouts share a token, then each has a node for every token."""
    ways = [
        {"nodes": [0, 1 + i // 2, *range(99 + 9 * i, 99 + 9 * i + n)], "stops": [*range(n + 2)]}
        for i, n in zip(r.rollout.tolist(), r.length.tolist(), strict=True)
    ]
    return r.replace(meta={**r.meta, "branches": ways})


NOWHERE = "http://127.0.0.1:9/v1"
THREE = ("accuracy", "format", "length", "other")
TURNS = ('x{"arguments": "ab"}', 'yy{"arguments": "ac"}', 'x{"name": "d", "arguments": "ab"}', "stop")


@dataclasses.dataclass(frozen=True)
class Case:
    """How the parameters of a method are tried, where generated inputs and guessed values do not do."""

    world: World = dataclasses.field(default_factory=World)
    values: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    settings: Sequence[Mapping[str, Any]] = ({},)
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    elsewhere: Sequence[str] = ()  # parameters that act on inputs which only the method's own tests have


CASES: dict[str, Case] = {
    "adhint_advantages": Case(World(prepare=PREPARE["adhint_advantages"], n=8)),
    # tests/methods/test_adhint.py: they act on forced tokens, which another method makes
    "adhint_gradients": Case(elsewhere=("kappa", "mask_failures")),
    "aepo_rollout": Case(
        World(model=writes("ab", "cd", "ce", "caba"), n=8, max_tokens=80),
        {"environment": [Desk]},
        params={"environment": Bench, "vocabulary": 8, "top_logprobs": 3},
    ),
    "arrol": Case(
        World(prepare=head_features, n=8),
        {"features": [lambda contexts: [[draw(c, k) for k in range(14)] for c in contexts]]},
        ({"detect_tokens": 4},),
        {"cold_start": 1, "min_keep": 1},
    ),
    "branch_advantages": Case(World(prepare=PREPARE["branch_advantages"]), {"clip": [0.5]}),
    "branch_pruning": Case(
        World(prepare=deep_trees),
        {"depths": [(3,)], "interval": [2], "stop_depth": [3, 0], "until": [0.5], "ratio": [1.0]},
        ({}, {"depths": (3,), "interval": 2}, {"width": "extreme"}, {"code_compat": True}),
    ),
    "branch_text_rollout": Case(World(n=8), {"places": [(0, 2, 5)]}, ({"places": (0, 1, 2)},)),
    "brpo": Case(
        World(),
        {"judge": [lambda prompt, a, b: "A"], "judge_url": ["http://127.0.0.1:8/v1"], "judge_key_env": ["PATH"]}
        | {"judge_template": ["{prompt}{a}{b}"], "judge_batch_size": [2]},
        ({}, {"judge": None, "judge_url": NOWHERE, "judge_model": "m", "judge_retries": 0}),
        {"judge": judge},
    ),
    "fapo": Case(
        World(prepare=harder_and_easier),
        {"judge": [lambda prompt, answer, completion: 0], "judge_url": ["http://127.0.0.1:8/v1"]}
        | {"judge_key_env": ["PATH"], "judge_batch_size": [2]}
        | {"prompt_column": ["answer"], "answer_column": [None, "prompt"]},
        ({}, {"judge": None, "judge_url": NOWHERE, "judge_model": "m", "judge_retries": 0}),
        {"judge": flaw},
        elsewhere=("judge_template",),
    ),
    "best_perm": Case(
        values={
            "prompt_column": ["answer"],
            "templates": [("{prompt} again",)],
            "hints_column": ["answer"],
            "hint_template": ["{hint}{prompt}"],
            "values": [(0.1, 0.9)],
        },
        settings=({"templates": ("{prompt}?", "{prompt}!")}, {"hints_column": "hints"}),
    ),
    "brorl": Case(values={"ramp": [((1, 8),)], "answer": [len]}),
    "cleaner": Case(
        World(model=writes(*TURNS), max_tokens=600),
        {
            "role": ["assistant"],
            "environment": [Desk],
            "marker": ['"'],
            "success_marker": ["ok"],
            "patterns": [("Name",)],
        },
        ({}, {"marker": '{"'}, {"gamma": 0.8}),
        {"environment": Bench, "marker": "{"},
    ),
    # generated weights are close to 1
    "decoupled_ppo": Case(values={"lower": [1.02]}, settings=({"upper": 1.05}, {"upper": 1.1, "level": "sequence"})),
    "dart_rollouts": Case(World(prepare=harder_and_easier), {"threshold": [0.3, 0.9], "n_min": [2, 3]}),
    "dora_data": Case(
        World(prepare=cut_off, n=8),
        {"accuracy": ["accuracy"], "failed_column": ["broken"], "loop_tokens": [2, 3], "loop_period": [1]},
        ({}, {"loop_tokens": 4, "loop_period": 2}, {"truncated": "mask_unscored", "loop_tokens": 4, "loop_period": 2}),
    ),
    "dora_length": Case(
        World(n=8), {"shares": [(0.3, 0.6, 1.0)], "window": [4]}, ({"window": 8}, {"window": 8, "shares": (0.1, 0.2)})
    ),
    "dora_reuse": Case(settings=({"spare_share": 1.0},), elsewhere=("max_staleness", "buffer_groups")),
    "dora_loss": Case(settings=({}, {"neg_high": 1.2}, {"weight_cap": 1.05}), elsewhere=("mu",)),
    "difficulty_slices": Case(
        World(prepare=harder_and_easier),
        {"column": ["level"], "head": [1], "refresh": [3]},
        ({"refresh": 1}, {"refresh": 1, "heads": 2}, {"heads": 2, "refresh": 1, "decay": 0.5}, {"column": "level"}),
    ),
    "dots": Case(
        World(),
        {"embeddings": [lambda data: [[math.cos(3.0 * i + j) for j in range(4)] for i in range(16)]], "adapter": []},
        params=PARAMS["dots"],
    ),
    "drpo": Case(
        World(prepare=several_rewards(THREE), facts={"reward_names": THREE}),
        {"reward": ["format"]},
        params=PARAMS["drpo"],
    ),
    "echo_labels": Case(values={"extract": [len]}),
    "echo_tree": Case(
        World(n=8),
        {"max_branches": [2]},
        (
            {"entropy_delta_threshold": -1.0},
            {"entropy_delta_threshold": -1.0, "branch_threshold": 1.0},
            {"entropy_delta_threshold": -1.0, "alpha": 4.0},
            {"delta_upper": 0.2, "delta_rise_steps": 1},
            {"prune_threshold": 2.0},
            {"tail_threshold": 2.0, "tail_decline_steps": 1},
        ),
        {"logprob_top_k": 5, "confidence_top_k": 2, "entropy_high": 0.9, "entropy_low": 0.3}
        | {"branch_threshold": 1.5, "min_depth": 1, "alpha": 0.5, "max_branches": 5},
    ),
    # a first batch has no corridor but its own
    "epo": Case(settings=({}, {"include_current": True, "kl": 0.9, "kr": 1.1})),
    "fission_grpo": Case(
        World(
            prepare=lambda r: several_rewards(THREE)(
                r.replace(meta={**r.meta, "prompt": [[{"role": "user", "content": str(p)}] for p in r.meta["prompt"]]})
            ),
            facts={"reward_names": THREE},
        ),
        {"trigger": [50], "correctness": ["format"], "message": [lambda facts: "wrong"]},
    ),
    "drive": Case(
        World(prepare=harder_and_easier),
        values={"rollouts": [(2,)], "max_tokens": [(3,)], "sizes": [(0.5,)], "batches": [(3,)]},
        settings=(
            {"sizes": (0.5,), "batches": ()},
            {"sizes": (0.2,), "batches": ()},
            {"sizes": (1.0, 0.5), "batches": (4,)},
        ),
    ),
    "fission_grpo_reward": Case(
        World(prepare=several_rewards(THREE), facts={"reward_names": THREE}),
        {"format": ["other"], "correctness": ["other"], "length": ["length"]},
        params=PARAMS["fission_grpo_reward"],
    ),
    "gdro_prompt": Case(World(prepare=harder_and_easier), settings=({}, {"edges": ()})),
    "gdro_rollout": Case(
        World(prepare=harder_and_easier),
        settings=({}, {"edges": ()}, {"arm_sign": "paper", "baseline": "none"}),
        elsewhere=("price_rate",),  # plans of equal groups are always met
    ),
    "gigpo": Case(World(prepare=long_anchors), {"similarity": [0.9]}),
    "grpo_roc": Case(
        World(prepare=tool_texts),
        {"penalty": [lambda r: r.length]},
        ({}, {"reject_equal_reward": False}),
    ),
    "latr": Case(
        World(model=lambda text: {"a": 0.5, "b": 0.5} if draw(text) < 0.1 else {"c": 1.0}, n=6),
        {"eta_steps": [(0, 1, 2, 3, 4)]},
        ({"eta": (1.0,), "eta_steps": (0,)}, {}),
        {"tau_abs": 0.1, "tau_rel": 0.9, "lookahead": (2, 4)},
    ),
    "linear_ts": Case(
        values={"column": ["answer"], "context": [("constant", "progress")]},
        settings=({}, {"draws": 7}),
        params={"column": "domain"},
    ),
    "m_grpo": Case(World(prepare=PREPARE["m_grpo"]), {"main_agent": ["sub"]}),
    "m_grpo_rollout": Case(
        World(
            prepare=lambda r: r.replace(meta={**r.meta, "invalid": [k % 2 for k in range(len(r))]}),
            model=writes("call 1 + 1 = 3. It is 3 m", "call bb", "end"),
            max_tokens=400,
        ),
        {
            "parse": [lambda text: [text, text] if "call" in text else []],
            "contract": [lambda: Contract("result", {"type": "string", "maxLength": 2})],
            "guard_facts": ["answer"],
            "guard_verifier": [lambda fields: "red"],
            "guard_splitter": [lambda message: []],
            "guard_entailment": [lambda fields: "red"],
        },
        ({}, {"guard": "strict"}, {"contract": lambda: Contract("result", {"type": "integer"})}),
        {"parse": lambda text: [text] if "call" in text else []},
        elsewhere=("guard_log",),  # tests/methods/test_agent_rollouts.py: it writes files
    ),
    # their effect is on updates, whose KL generated batches do not have
    "reward_audit": Case(
        elsewhere=(  # tests/methods/test_reward_audit.py: these act on reward functions, or on many groups
            *("preflight", "on_preflight", "on_training", "answer_column", "gold_renderer", "corrupter"),
            *("answer_extractor", "verifier", "verify_share", "wrong_answers", "max_rows", "tol", "tol_stochastic"),
            *("tau", "delta", "declared_prompt_features", "n_min", "alpha", "source_column", "allow_change"),
        )
    ),
    "ppo_million": Case(elsewhere=("window", "test", "alpha", "kl_share", "factor", "max_cuts")),
    "ps_grpo": Case(
        World(prepare=sets_of_four),
        {"set_column": ["answer"], "similarity": [lambda a, b: [0.5] * len(a)], "answer_column": ["prompt"]},
    ),
    "rtv_pdr": Case(
        World(model=writes("Best: 1", "Best: 2", "1 or 2", "aa"), max_tokens=100),
        {
            "environment": [Bench],
            "summarizer": [lambda problem, attempt: attempt[::-1]],
            "judge": [lambda problem, summaries: 1 + len(summaries[0]) % 2],
        },
        ({}, {"training": "refined"}, {"training": "hard"}),
    ),
    "scope": Case(
        World(
            prepare=PREPARE["scope"],
            model=writes("aa;bb;cc;dd", "ab;ba;ca", "aa;cb;d;e", "ba;bc;bd", "bb;cc;dd", "ca;cc;aa;bb;dd"),
            reward=lambda text, columns: float(draw(text) < 0.4 or "right" in text),
            columns={"solution": "right;end"},
            max_tokens=60,
            n=8,
        ),
        {
            "prm": [lambda messages, steps, columns: [draw(s, 1) for s in steps]],
            "corrector": [lambda messages, text, columns: "right;end"],
            "separator": ["c"],
            "solution_column": ["answer"],
        },
        ({}, {"min_correct": 9}, {"success_threshold": 2.0, "prm": last_is_worst}),
        {"prm": lambda messages, steps, columns: [draw(s) for s in steps], "separator": ";", "min_prefix": 0.1}
        | {"min_step": 1},
    ),
    "swarm_sapo": Case(
        World(facts={"chat": Letters()}),
        {"accept": [lambda found: "ann" in found["prompt"]], "transport": [swarm(1)], "sender_quota": [2]}
        | {"max_characters": [45], "max_prompt_tokens": [45], "inbox_groups": [3], "max_age": [0], "spare_groups": [0]}
        | {"exchange": ["memory://other"], "key_env": ["PATH"]},
        ({}, {"sender_quota": 2}, {"external_groups": 1}),
        {**PARAMS["swarm_sapo"], "transport": swarm(8)},
        elsewhere=("key_env",),  # of an endpoint, which is not in these worlds
    ),
    "training_free_grpo": Case(
        World(),
        {
            "llm": [lambda text: advice(text + " ")],
            "llm_url": ["http://127.0.0.1:8/v1"],
            "llm_key_env": ["PATH"],
            "library": [],  # files of the test
            "learn": [],
        },
        ({}, {"llm": None, "llm_url": NOWHERE, "llm_model": "m", "llm_retries": 0}),
        {"llm": advice},
    ),
    "turn_control": Case(
        World(model=writes(*TURNS), prepare=episodes, max_tokens=400),
        {"environment": [Desk], "limit": [2], "should_extend": [lambda environment: environment.taken % 2 == 0]}
        | {
            "window": [4],
            "min_turns": [9],
            "last_percentile": [52],
            "role": ["assistant"],
            "reminder": ["{remaining}"],
            "extension_text": ["{extension}"],
        },
        (
            {"calibration_episodes": 4},
            {"calibration_episodes": 4, "calibration": "rolling", "update_every": 1},
            {"limit": 2, "remind_from": 1},
            {"limit": 2, "strategy": "dynamic", "extension": 2},
        ),
        {"environment": Bench},
    ),
    "ui_s1": Case(World(prepare=graded_turns), settings=({}, {"filter_by": "none"})),
    "ui_s1_rollout": Case(
        World(
            model=writes("yes", "no", "perhaps"),
            columns={"expert": [["a", "yes"], ["b", "no"], ["c", "yes"]], "other": [["a", "no"], ["b", "no"]]},
        ),
        {
            "column": ["other"],
            "match": [lambda response, wanted, columns: (response[0] == "y", 0.5)],
            "write": [lambda messages, history, seen: [*messages, {"role": "user", "content": f"{len(history)}"}]],
        },
    ),
    "xrpo_seeds": Case(
        values={
            "embed": [lambda texts: [[draw(t, k) for k in range(4)] for t in texts]],
            "prompt_column": ["question"],
            "template": ["{examples} {problem}"],
            "max_characters": [1],
        },
        settings=({}, {"corpus_size": 3}),
    ),
    "v0": Case(
        values={"prior": [lambda prompts, context: [draw(p) for p in prompts]], "prior_column": ["score"]},
        settings=({}, {"prior": "column", "prior_column": "rate"}),
        params={"max_rollouts": 5},
    ),
    "v0_5": Case(
        values={"prior": [lambda prompts, context: [draw(p) for p in prompts]], "prior_column": ["score"]}
        | {"prior_value": [0.25], "k_max": [3], "increment": [2]},
        settings=(
            {},
            {"prior": "column", "prior_column": "rate"},
            {"prior": "constant", "prior_value": 0.9},
        ),
        params={"k_init": 2, "k_max": 4, "cost": 0.0},
    ),
}


def case_of(name: str, folder: Any) -> Case:
    case = CASES.get(name, Case(World(prepare=PREPARE.get(name)), params=PARAMS.get(name, {})))
    if name == "dots":
        path = folder / "adapter.safetensors"
        torch.manual_seed(0)
        save_adapter(path, Adapter(4, 8))
        case = dataclasses.replace(case, values={**case.values, "adapter": [str(path)]})
    if name == "m_grpo_rollout":
        case = dataclasses.replace(case, values={**case.values, "guard_log": [str(folder / "guard")]})
    if name == "training_free_grpo":
        path = folder / "library.json"
        path.write_text(json.dumps({"format": 1, "experiences": {"G0": "look twice"}}))
        learn = [Beside(False, {"llm": None, "library": str(path)})]
        case = dataclasses.replace(case, values={**case.values, "library": [str(path)], "learn": learn})
    return case


METHODS = [name for name in BUILT_IN if not isinstance(registry.load(name), Bundle)]


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_changes_something(name: str, tmp_path: Any) -> None:
    case = case_of(name, tmp_path)
    cls: Any = registry.load(name)
    idle = idle_parameters(cls, case.world, case.values, case.settings, **case.params)
    assert {name: tried for name, tried in idle.items() if name not in case.elsewhere} == {}


# ---- the search itself, and what `rl-plugins check` says


@dataclasses.dataclass(frozen=True)
class ToyParams(MethodParams):
    scale: float = param(1.0, "of the advantages", gt=0)
    unread: float = param(1.0, "of nothing", gt=0)
    power: int = param(1, "of the scale", ge=1, only_if={"scale": 1.0})


class Toy(Method):
    name = "toy"
    Params = ToyParams

    def advantages(self, rollouts: Any) -> Any:
        return self.params.scale**self.params.power * rollouts.reward.nan_to_num(nan=0.0)


def test_a_parameter_that_nobody_reads_is_found() -> None:
    idle = idle_parameters(Toy)
    assert list(idle) == ["unread", "power"]  # 1 to any power is 1: the condition says the opposite of what is true
    assert len(idle["unread"]) > 3 and 2.0 in idle["unread"] and len(idle["power"]) > 1


def test_a_setting_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ConfigError, match="`power` has no effect"):
        idle_parameters(Toy, settings=({"scale": 2.0, "power": 2},))


def test_check_notes_parameters_that_changed_nothing(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("rl_plugins.commands.check._classes", lambda target: [Toy])
    monkeypatch.setattr("rl_plugins.testing.contract.check_method", lambda cls, **params: "toy keeps the contract")
    assert check_and_print("toy") == 0
    out = capsys.readouterr().out
    assert "note         parameter `unread` changed nothing on generated inputs; tried: 0.05, 2.0, " in out
    assert "`scale`" not in out
