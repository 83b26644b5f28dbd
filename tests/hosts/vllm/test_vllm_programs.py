"""Rollout programs on real vLLM in TRL: what a request asks for is what the engine does, and what comes back is what
the policy thinks, in every step and in both modes."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import history, make, weights
from messages import raises
from program_probes import SEEN
from test_trl_turns import Walk
from transformers import AutoModelForCausalLM
from watch import Watch

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.requests import Generate, Kind, Trajectory
from rl_plugins.testing.engine import make_prompt
from rl_plugins.trl.generation import programs as module
from rl_plugins.trl.generation.engine import TrlEngine

_spec = importlib.util.find_spec("vllm")
_installed = _spec is not None and _spec.origin is not None
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not _installed, reason="needs vLLM on CPU; `make test-vllm` installs and runs it"),
]

EXACT = 5e-5  # float32 on both sides
CONTEXT = 64  # tokens the engines of conftest.py take
UNCORRECTED = dict(vllm_importance_sampling_correction=False)


@pytest.fixture(params=["colocate", "server"])
def vllm(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of a trainer, in each mode."""
    options = request.getfixturevalue(request.param)
    return options() if request.param == "colocate" else options


@dataclass
class Batch:
    """What programs made of a generation batch, and the policy at that moment."""

    rows: list[Trajectory]
    policy: dict[str, torch.Tensor]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    seen: list[Batch] = []
    run_programs = module.run_programs

    def watched(trainer: Any, plan: Any, row_of: Any) -> Any:
        policy = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        made = run_programs(trainer, plan, row_of)
        seen.append(Batch([row.trajectory for row in made], policy))
        return made

    monkeypatch.setattr(module, "run_programs", watched)
    return seen


@pytest.fixture
def logprobs(folder: Path) -> Callable[..., torch.Tensor]:
    """(tokens + 1, vocabulary) log-probs of the policy after a context and after each of the tokens that follow, by one
    plain pass of a copy; of the policy on disk, or with other weights."""
    model = AutoModelForCausalLM.from_pretrained(folder / "policy").eval()
    first = {name: value.clone() for name, value in model.state_dict().items()}

    def of(context: Any, tokens: Any, policy: Any = None) -> torch.Tensor:
        model.load_state_dict(first if policy is None else policy)
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *tokens]])).logits[0, len(context) - 1 :]
        return torch.log_softmax(logits.double(), -1)

    return of


def worst_error(batch: Batch, logprobs: Callable[..., torch.Tensor]) -> float:
    """Largest |log-prob a row holds - the policy's own| of its sampled tokens; all others have none."""
    worst, sampled = 0.0, 0
    for row in batch.rows:
        true = logprobs(row.prompt, row.tokens, batch.policy)
        for k, (token, kind, p) in enumerate(zip(row.tokens, row.kinds, row.logprobs, strict=True)):
            assert math.isnan(p) == (kind != Kind.SAMPLED)
            if kind == Kind.SAMPLED:
                worst, sampled = max(worst, abs(p - float(true[k, token]))), sampled + 1
    assert sampled >= len(batch.rows)
    return worst


def train(folder: Path, methods: list[str], *, stale: bool = False, **options: Any) -> tuple[Any, Watch]:
    """A trained trainer and what TRL trained on. `stale`: the engine gets the first weights and then none."""
    SEEN.clear()
    trainer = make(folder, methods, **options)
    watch = Watch(trainer)
    if stale:
        sync, synced = trainer.vllm_generation.sync_weights, []
        trainer.vllm_generation.sync_weights = lambda: None if synced else (synced.append(True), sync())
    trainer.train()
    return trainer, watch


def stepped(trainer: Any, steps: int) -> bool:
    norms = history(trainer, "grad_norm")
    return len(norms) == steps and all(math.isfinite(n) and n > 0 for n in norms)


# ---- requests


def test_a_plain_program(folder, vllm):
    """One engine call of 64 rows; its log-probs reach TRL, with the run's temperature and the weights of the step."""
    trainer, watch = train(folder, ["plain"], **vllm, max_steps=3, learning_rate=0.3, temperature=0.8)
    assert [(len(c.prompts), c.num_generations) for c in watch.calls] == [(64, 1)] * 3
    for batch in watch.batches:
        assert len(batch.error) > 200 and batch.error.max() < EXACT
    assert stepped(trainer, 3) and history(trainer, "sampling/sampling_logp_difference/max")[2] < EXACT


def test_requests_of_all_kinds(folder, vllm, logprobs):
    """Each has its own limit, temperature, stop texts and number of reported tokens, and what agrees in all but the
    limit is one engine call."""
    trainer = make(folder, ["plain"], **vllm)
    calls = Watch(trainer).calls
    engine: TrlEngine = trainer.program_engine(lambda prompt: {})
    prompt = make_prompt(engine.chat, "a:531", n=1, max_tokens=40)
    start = prompt.start()
    begun = start.force(engine.chat.encode("=1"))
    asked = [Generate(start if k % 2 else begun, n=4, max_tokens=k) for k in range(1, 9)]
    asked += [
        Generate(start, n=8, max_tokens=6, top=3),
        Generate(begun, n=2, max_tokens=7, temperature=0.0, top=2),
        Generate(start, n=32, max_tokens=12, temperature=1.5, stop=("7", "=")),
        Generate(start, n=8, max_tokens=5, temperature=0.5),
    ]
    host = trainer.vllm_generation
    names = ("generate", "generation_kwargs", "temperature", "max_completion_length", "logprobs")
    before = [getattr(host, name) for name in names]
    with torch.no_grad():
        made = engine.generate([(prompt, request) for request in asked])
    assert [getattr(host, name) for name in names] == before, "everything is put back"
    assert not {"generate"} & {*vars(getattr(host, "llm", None) or host.vllm_client)}
    assert sorted(len(c.prompts) for c in calls) == [2, 8, 8, 32, 32]
    assert [len(many) for many in made] == [request.n for request in asked]
    decoded = sum(len(tokens) for call in calls for tokens in call.completions)
    assert decoded == sum(len(g.tokens) for many in made for g in many), "nothing is decoded beyond a limit"
    eos = engine.chat.eos[0]
    worst, longest, stopped = 0.0, 0, 0
    for request, many in zip(asked, made, strict=True):
        scale = 1.0 if request.temperature is None else request.temperature or 1.0
        for g in many:
            assert 1 <= len(g.tokens) == len(g.logprobs) <= request.max_tokens
            assert g.finish != "length" or len(g.tokens) == request.max_tokens
            assert (g.finish == "eos") == (g.tokens[-1] == eos) and eos not in g.tokens[:-1]
            longest += request in asked[:8] and g.finish == "length"
            plain = logprobs(request.trajectory.context, g.tokens)[:-1]
            scaled = torch.log_softmax(plain / scale, -1)
            own = scaled.gather(1, torch.tensor([g.tokens]).T)[:, 0]
            worst = max(worst, float((own - torch.tensor(g.logprobs).double()).abs().max()))
            assert len(g.top) == (len(g.tokens) if request.top else 0)
            for place, pairs in zip(plain, g.top, strict=False):
                best = place.topk(request.top)
                assert [t for t, _ in pairs] == best.indices.tolist()
                assert [p for _, p in pairs] == pytest.approx(best.values.tolist(), abs=EXACT)
            assert g.sampled == (request.temperature != 0)
            if request.temperature == 0:
                assert list(g.tokens) == plain.argmax(-1).tolist()
            if request.stop:
                text = engine.chat.decode(g.tokens)
                assert (g.finish == "stop") == (text[-1:] in ("7", "=")) and not {"7", "="} & set(text[:-1])
                stopped += g.finish == "stop"
    assert worst < EXACT and longest >= 8 and stopped >= 8


def test_the_context_of_the_engine_is_the_limit(folder, vllm):
    """The engine takes less than the model: 64 of 256 tokens. Prompts that leave room for few are cut there, and where
    there is no room the engine is not asked."""
    trainer, watch = train(folder, ["asks"], **vllm, max_steps=1, max_completion_length=100)
    assert SEEN["prompt"].max_context == CONTEXT
    assert (SEEN["none"][0].tokens, SEEN["none"][0].finish) == ((), "length")
    longest = max(len(p) + len(c) for call in watch.calls for p, c in zip(call.prompts, call.completions, strict=True))
    assert longest <= CONTEXT and len(watch.calls) == 3, "top log-probs, argmax, stop texts"
    engine = trainer.program_engine(lambda prompt: {})
    start = Trajectory((9,) * (CONTEXT - 3))
    with torch.no_grad():
        ((made,),) = engine.generate([(make_prompt(engine.chat, "x"), Generate(start, max_tokens=3, temperature=0.0))])
    assert 1 <= len(made.tokens) <= 3


# ---- programs


def test_two_turns(folder, vllm, batches, logprobs):
    """Token-exact books, forced and read tokens without a log-prob, and the weights of the step in both turns."""
    options = dict(vllm, vllm_importance_sampling_mode="token_truncate", max_steps=2, learning_rate=0.5)
    trainer, watch = train(folder, ["talk"], **options)
    assert [len(c.prompts) for c in watch.calls] == [64] * 4, "one call per turn"
    assert [worst_error(b, logprobs) < EXACT for b in batches] == [True, True]
    for k, (made, batch) in enumerate(zip(batches, watch.batches, strict=True)):
        b, second = batch.tensors, watch.calls[2 * k + 1]
        asked = sorted([*p, *c] for p, c in zip(second.prompts, second.completions, strict=True))
        assert sorted([*row.context] for row in made.rows) == asked, "rows are what the engine read and wrote"
        for i, row in enumerate(made.rows):
            n = len(row)
            assert b["completion_ids"][i, :n].tolist() == list(row.tokens)
            assert b["completion_mask"][i].tolist() == [1] * n + [0] * (b["completion_ids"].size(1) - n)
            assert b["tool_mask"][i, :n].tolist() == list(row.trained)
        known = ~b["sampling_per_token_logps"].isnan() & batch.mask
        assert int((batch.mask & ~known).sum()) == 2 * 8, "the hints of the first rollouts"
        assert (b["sampling_per_token_logps"] - batch.policy)[known].abs().max() < EXACT
        assert (b["importance_sampling_ratio"][batch.mask & ~known] == 1).all()
    assert stepped(trainer, 2) and weights(trainer).isfinite().all()
    batches.clear()
    train(folder, ["talk"], **options, stale=True)
    assert worst_error(batches[0], logprobs) < EXACT < 0.01 < worst_error(batches[1], logprobs)


TREE = {"tau_abs": 0.1, "tau_rel": 0.6, "lookahead": [3], "tau_ed": 0.4, "max_tree_tokens": 5, "decode_ahead": 2}


def test_latr(folder, colocate, batches, logprobs):
    """Argmax and second choices are the policy's: the trees of vLLM are those of transformers."""
    params = {"latr": {**TREE, "eta": [1.0], "eta_steps": [0]}}
    options = dict(method_params=params, learning_rate=0.1)
    trainer, watch = train(folder, ["latr"], **colocate(), **UNCORRECTED, **options, max_steps=2)
    assert max(worst_error(b, logprobs) for b in batches) < EXACT
    assert stepped(trainer, 2) and max(len(c.prompts) for c in watch.calls) <= 64
    make(folder, ["latr"], **options, max_steps=1).train()

    def trees(batch: Batch) -> list[tuple[int, ...]]:
        return [row.context[: len(row.prompt) + row.kinds.count(Kind.FORCED)] for row in batch.rows]

    assert trees(batches[0]) == trees(batches[2]) != trees(batches[1])
    assert len(set(trees(batches[0]))) > 12, "8 prompts, and branches"


@pytest.mark.parametrize("turn_tokens", [3, None])
def test_turn_control(folder, vllm, batches, logprobs, turn_tokens):
    """Turns in an environment. Without a limit of tokens per turn every row has another room, and still a turn of all
    rollouts is one call."""
    params = {"turn_control": {"environment": Walk, "strategy": "unlimited", "turn_tokens": turn_tokens}}
    options = dict(max_completion_length=50, learning_rate=0.1, method_params=params)
    trainer, watch = train(folder, ["turn_control"], **vllm, **options, max_steps=2)
    assert max(worst_error(b, logprobs) for b in batches) < EXACT
    turns = [max(len(row.turns) for row in b.rows) for b in batches]
    assert len(watch.calls) == sum(turns) and min(turns) >= 2
    assert turn_tokens or len({len(p) for p in watch.calls[1].prompts}) > 4
    read = [k for b in batches for row in b.rows for k in row.kinds if k == Kind.OBSERVED]
    assert read and stepped(trainer, 2)


# ---- what is refused


def test_what_vllm_cannot_do_is_refused(folder, colocate):
    with raises(ConfigError, match=r"`over_begin`.*`admit`"):
        make(folder, ["over_begin"], **colocate())
    with raises(ConfigError, match=r"`asks`.*0\.7.*temperature=1\.0"):
        make(folder, ["asks"], **colocate(), temperature=0.7)
    with raises(ConfigError, match=r"`latr`.*vllm_importance_sampling_correction=True"):
        make(folder, ["latr"], **colocate())


@pytest.mark.parametrize(
    ("options", "temperature", "what"),
    [
        ({}, 0.7, "temperature=0.7"),
        ({"top_p": 0.9}, 1.0, "top_p=0.9"),
        ({"generation_kwargs": {"min_p": 0.2}}, 1.0, "min_p=0.2"),
        ({"repetition_penalty": 1.2}, 0.0, "repetition_penalty=1.2"),
        ({"top_k": 3}, 0.0, ""),
    ],
)
def test_top_log_probs_are_the_policys_or_refused(folder, colocate, logprobs, options, temperature, what):
    trainer = make(folder, ["plain"], **colocate(), **options)
    engine = trainer.program_engine(lambda prompt: {})
    prompt = make_prompt(engine.chat, "a:531", n=1, max_tokens=40)
    request = Generate(prompt.start(), max_tokens=4, temperature=temperature, top=5)
    ask = functools.partial(engine.generate, [(prompt, request)])
    if what:
        with raises(ConfigError, match=f"5.*{what}"):
            ask()
        return
    with torch.no_grad():
        ((made,),) = ask()
    for place, pairs in zip(logprobs(prompt.tokens, made.tokens), made.top, strict=False):
        assert [p for _, p in pairs] == pytest.approx(place.topk(5).values.tolist(), abs=EXACT)
