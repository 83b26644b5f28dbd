"""Trainers of others: TRL's own besides GRPO, and those of users, with constructors and losses of their own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from harness import config, make, policy, score, stub_sampling, weights
from messages import raises
from transformers import AutoTokenizer
from transformers import Trainer as HfTrainer
from trl.experimental.gmpo import GMPOTrainer

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.lab.pages.source import with_trainers
from rl_plugins.trl import GRPOConfig, GRPOTrainer, MethodsMixin, hosts
from rl_plugins.trl.stateful import StatefulMixin

pytestmark = pytest.mark.host


# ---- constructors


class Keywords(trl.GRPOTrainer):
    """As TRL's own GMPOTrainer is written."""

    def __init__(self, model, reward_funcs, args=None, **kwargs):
        super().__init__(model, reward_funcs, args=args, **kwargs)


class Everything(trl.GRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class Renamed(trl.GRPOTrainer):
    """Words of its own, and a part of the arguments made in it."""

    def __init__(self, policy, recipe, **more):
        rows = more.pop("rows")
        super().__init__(policy, recipe["reward"], recipe["args"], train_dataset=rows, **more)


class MakesItsConfig(trl.GRPOTrainer):
    def __init__(self, model, folder, options, **kwargs):
        args = config(Path(folder), options.pop("methods"), **options)
        super().__init__(model, score, args, **kwargs)


STYLES = [Keywords, Everything, Renamed, MakesItsConfig]


def styled(style: type, folder: Path, model: str, methods: Any, dataset: Any, mixin: Any = MethodsMixin, **more: Any):
    options = dict(more.pop("options", {}))
    cls = type("Mine", (mixin, style), {})
    if style is Renamed:
        return cls(model, {"reward": score, "args": config(folder, methods, **options)}, rows=dataset, **more)
    if style is MakesItsConfig:
        return cls(model, str(folder), {"methods": methods, **options}, train_dataset=dataset, **more)
    args = config(folder, methods, **options)
    if style is Keywords:
        return cls(model, score, args=args, train_dataset=dataset, **more)
    return cls(model, score, args, dataset, **more)


@pytest.mark.parametrize("style", STYLES)
def test_arguments_are_found_whatever_the_constructor(tmp_path, style):
    """All before the model is loaded: there is none at the path."""
    data, model = build_dataset(64), "no/such/model"
    init = trl.GRPOTrainer.__init__
    with raises(ConfigError, match=r"`minpro`.*rollout_func"):
        styled(style, tmp_path, model, ["minpro"], data, options=dict(num_iterations=2), rollout_func=lambda p, t: {})
    with raises(ConfigError, match="`latr`.*`rollout`"):
        styled(style, tmp_path, model, ["latr"], data, tools=[lambda x: x])
    with raises(ConfigError, match=r"`given`.*`column:level`.*`level`"):
        styled(style, tmp_path, model, ["given"], data.remove_columns("level"))
    with raises(ConfigError, match="`gdpo`.*1 reward"):
        styled(style, tmp_path, model, ["gdpo"], data)
    with pytest.raises(OSError, match="no/such/model"):  # nothing to object to: TRL goes on
        styled(style, tmp_path, model, ["vade"], data)
    assert trl.GRPOTrainer.__init__ is init


@pytest.mark.parametrize("style", STYLES)
def test_a_method_that_chooses_prompts_runs_under_every_constructor(tmp_path, style):
    model, data = str(policy(tmp_path / "policy")), build_dataset(64, seed=1)
    with stub_sampling():
        own = styled(trl.GRPOTrainer, tmp_path, model, ["vade"], data, options=dict(max_steps=1))
        own.train()
        torch.manual_seed(0)
        theirs = styled(style, tmp_path, model, ["vade"], data, options=dict(max_steps=1))
        theirs.train()
    assert theirs.methods.names == ["vade"] and torch.equal(weights(own), weights(theirs))


def test_a_config_that_never_reaches_trl(tmp_path):
    class Forgets(trl.GRPOTrainer):
        def __init__(self, model, recipe, **kwargs):
            plain = config(tmp_path, cls=trl.GRPOConfig)
            super().__init__(str(policy(tmp_path / "policy")), score, plain, **kwargs)

    with raises(ConfigError, match="Mine.*trl.GRPOTrainer"):
        type("Mine", (MethodsMixin, Forgets), {})("m", config(tmp_path, ["mc_grpo"]), train_dataset=build_dataset(64))


# ---- losses


class Over(MethodsMixin, GMPOTrainer):
    """TRL's GMPO with methods."""


def one_step(folder: Path, cls: type, methods: Any = (), stock: bool = False, **options: Any) -> torch.Tensor:
    """The change of the weights in one step of SGD."""
    options = {"max_steps": 1, "max_grad_norm": 0.0, "epsilon": 0.4, **options}
    with stub_sampling():
        t = make(folder, methods, trainer=cls, stock=stock, **options)
        before = weights(t)
        t.train()
    return weights(t) - before


@pytest.mark.parametrize("options", [{}, dict(gradient_accumulation_steps=2), dict(beta=0.1, loss_type="bnpo")])
def test_rows_that_leave_under_a_mean_over_rows_of_its_own(tmp_path, options):
    """`half` takes out the groups 4 to 7 of 8: what is left is GMPO's own step on the first four prompts."""
    left = one_step(tmp_path, Over, ["half"], **options)
    parts = options.get("gradient_accumulation_steps", 1)
    alone = one_step(tmp_path, GMPOTrainer, stock=True, **options, per_device_train_batch_size=32 // parts)
    assert float(alone.norm()) > 0
    assert float((left - alone).norm() / alone.norm()) < 1e-4


def test_a_loss_that_nobody_knows(tmp_path):
    class Theirs(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    unknown = type("Unknown", (MethodsMixin, Theirs), {})
    unknown_outside = type("Outside", (MethodsMixin, trl.GRPOTrainer), {"compute_loss": lambda self, *a, **k: 0})
    again = type("Again", (Over,), {"_compute_loss": lambda self, model, inputs: 0})
    for cls, name in ((unknown, "Theirs"), (unknown_outside, "Outside"), (again, "Again")):
        for method in ("half", "ppo", "corridor"):
            with raises(ConfigError, match=rf"{name}.*`{method}`"):
                make(tmp_path, [method], trainer=cls)
    with raises(ConfigError, match="Theirs"):
        one_step(tmp_path, unknown, ["filter"])
    with raises(ConfigError, match="Theirs"):
        one_step(tmp_path, unknown, ["thinned"])
    # advantages and prompts are no matter of the loss, and a batch that stays full neither
    for methods in (["vade"], ["mc_grpo"]):
        assert torch.equal(one_step(tmp_path, unknown, methods), one_step(tmp_path, GRPOTrainer, methods))
    stated = type("Stated", (MethodsMixin, Theirs), {"loss_like": "host"})
    for method in ("half", "ppo"):
        assert torch.equal(one_step(tmp_path, stated, [method]), one_step(tmp_path, GRPOTrainer, [method]))
    wrong = type("Wrong", (MethodsMixin, Theirs), {"loss_like": "rows"})
    with raises(ConfigError, match=r"Wrong.loss_like.*'rows'.*'host'.*'dapo'"):
        make(tmp_path, ["half"], trainer=wrong)


def test_a_loss_that_takes_one_advantage_per_row(tmp_path):
    """GMPO would broadcast (rows, 1, time) in silence."""
    with raises(ConfigError, match="`by_position`.*GMPOTrainer"):
        one_step(tmp_path, Over, ["by_position"])


def test_known_losses_are_those_of_the_installed_trl():
    """What the table says of GMPO was read from this body: a mean over rows, masked, one advantage per row."""
    source = inspect.getsource(GMPOTrainer._compute_loss)
    assert "loss = per_sequence_loss.mean()" in source and 'inputs["tool_mask"]' in source
    assert {n for n in vars(GMPOTrainer) if not n.startswith("__")} == {"_tag_names", "_compute_loss"}


# ---- TRL's trainers


def test_every_trainer_of_the_installed_trl_is_in_the_table():
    found = set()
    for package in (trl.trainer, importlib.import_module("trl.experimental")):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not info.name.endswith("_trainer"):
                continue
            for name, cls in vars(importlib.import_module(info.name)).items():
                if inspect.isclass(cls) and cls.__module__ == info.name and issubclass(cls, HfTrainer):
                    found.add((info.name, name))
    found = {f for f in found if not f[1].startswith("_")} - {
        ("trl.experimental.bema_for_ref_model.dpo_trainer", "DPOTrainer")
    }
    assert {(t.module, t.name) for t in hosts.TRAINERS} == found
    served = {t.name for t in hosts.TRAINERS if t.methods}
    for t in hosts.TRAINERS:
        cls = getattr(importlib.import_module(t.module), t.name)
        if t.name != "AsyncGRPOTrainer":  # has a mixin of its own, see test_asynchronous.py
            assert issubclass(cls, trl.GRPOTrainer) == (t.name in served), t.name


def test_the_docs_show_the_table():
    page = (Path(__file__).parents[3] / "docs" / "trl_details.md").read_text(encoding="utf-8")
    assert hosts.trainer_table() in with_trainers(page)


@pytest.mark.parametrize("trainer", [t for t in hosts.TRAINERS if not t.methods], ids=lambda t: t.name)
def test_a_trainer_that_serves_no_method_says_why(tmp_path, trainer):
    host = getattr(importlib.import_module(trainer.module), trainer.name)
    cls = type("Mine", (MethodsMixin, type("Theirs", (host,), {})), {})
    with raises(ConfigError) as e:
        cls(model="no/such/model", args=config(tmp_path, ["mc_grpo"]))
    assert f"not served by {trainer.name}: {trainer.why}" in str(e.value)


class Recorder:
    """A trainer that only notes what it was called with, and has every name the mixin overrides."""

    train_dataset = object()

    def __getattr__(self, name):
        raise AttributeError(name)


NO_ANSWER = ("_set_signature_columns_if_needed", "save_model", "_save_rng_state")


def test_without_methods_every_override_hands_on_what_it_got():
    """Whatever the parameters of the trainer behind it are."""
    names = [
        n
        for n, f in {**vars(StatefulMixin), **vars(MethodsMixin)}.items()
        if inspect.isfunction(f) and "super()." in inspect.getsource(f) and n not in ("__init__", "program_engine")
    ]
    assert len(names) >= 12
    calls: list[Any] = []
    behind = {n: lambda self, *args, n=n, **kwargs: calls.append((n, args, kwargs)) or n for n in names}
    t = object.__new__(type("Mine", (MethodsMixin, type("Theirs", (Recorder,), behind)), {}))
    for name in names:
        parameters = inspect.signature(getattr(MethodsMixin, name)).parameters.values()
        fixed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        args = tuple(None if p == "resume_from_checkpoint" else object() for p in fixed)  # a resume looks at its files
        open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        more: dict[str, Any] = {"word": 1} if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
        args += (object(), object()) if open_ended else ()
        expected = name if name not in NO_ANSWER else None
        assert getattr(t, name)(*args, **more) == expected
        assert calls.pop() == (name, args, more), name


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def parity(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(str(c)) % 2) for c in completions]


GENERATING = dict(num_generations=4, max_completion_length=8)
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # trainer: module, options, arguments, columns beside the prompt
    "RLOO": ("trl", GENERATING, {"reward_funcs": score}, {}),
    "GMPO": ("trl.experimental.gmpo", GENERATING, {"reward_funcs": score}, {}),
    "A2PO": (
        "trl.experimental.a2po",
        dict(max_completion_length=3, num_value_samples=2),  # it samples for every row before the first step
        {"reward_funcs": parity},
        {},
    ),
    "OnlineDPO": ("trl.experimental.online_dpo", dict(max_new_tokens=8, max_length=200), {"reward_funcs": parity}, {}),
    "SDPO": ("trl.experimental.sdpo", GENERATING, {"reward_funcs": score}, {"privileged_context": "1"}),
    "DPO": ("trl", {}, {}, {"chosen": said("1 2"), "rejected": said("3")}),
    "CPO": ("trl.experimental.cpo", {}, {}, {"chosen": said("1 2"), "rejected": said("3")}),
    "ORPO": ("trl.experimental.orpo", {}, {}, {"chosen": said("1 2"), "rejected": said("3")}),
    "TPO": ("trl.experimental.tpo", {}, {}, {"chosen": said("1"), "rejected": said("3"), "reference": said("1 2")}),
    "KTO": ("trl", {}, {}, {"completion": said("1 2"), "label": True}),
    "GRPO": ("trl", GENERATING, {"reward_funcs": score}, {}),
    "SFT": ("trl", {}, {}, {"completion": said("1 2")}),
}


def test_the_table_says_which_were_run():
    run = {f"{name}Trainer" for name in OTHERS} | {"AsyncGRPOTrainer"}  # in test_asynchronous.py
    assert {t.name for t in hosts.TRAINERS if t.unchanged} == run


@pytest.mark.parametrize("name", OTHERS)
def test_without_methods_the_mixin_changes_no_trainer(tmp_path, name):
    """Two steps of TRL's own and of the mixin before it end at the same weights, to the bit."""
    module, options, arguments, columns = OTHERS[name]
    host, settings = (getattr(importlib.import_module(module), name + what) for what in ("Trainer", "Config"))
    model = policy(tmp_path / "policy")
    data = build_dataset(16, seed=1).select_columns(["prompt"]).map(lambda row: columns)
    ended = []
    for cls in (host, type("Mine", (MethodsMixin, host), {})):
        args = settings(
            output_dir=str(tmp_path / "out"),
            max_steps=2,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            optim="sgd",
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            gradient_checkpointing=False,
            **options,
        )
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        torch.manual_seed(0)
        t = cls(model=str(model), args=args, train_dataset=data, processing_class=tokenizer, **arguments)
        torch.manual_seed(0)
        t.train()
        assert t.state.global_step == 2
        ended.append(weights(t))
    assert torch.equal(*ended)


def test_a_config_of_another_trainer_with_methods(tmp_path):
    """One may put the words into any config; the error comes before anything is loaded."""

    @dataclasses.dataclass
    class WithMethods(trl.RLOOConfig):
        methods: list[str] = dataclasses.field(default_factory=list)

    cls = type("Mine", (MethodsMixin, trl.RLOOTrainer), {})
    args = WithMethods(output_dir=str(tmp_path), methods=["mc_grpo"], use_cpu=True, bf16=False)
    with raises(ConfigError, match="RLOOTrainer"):
        cls(model="no/such/model", reward_funcs=score, args=args)


def test_methods_that_change_advantages_or_rows_run_over_gmpo(tmp_path):
    """Two steps each: a method of advantages, one that selects, and none."""
    runs = {m: one_step(tmp_path, Over, [m] if m else [], max_steps=2) for m in ("", "mc_grpo", "half", "vade")}
    assert torch.equal(runs[""], one_step(tmp_path, GMPOTrainer, stock=True, max_steps=2))
    assert all(float((runs[m] - runs[""]).abs().max()) > 0 for m in ("mc_grpo", "half"))
    assert isinstance(config(tmp_path, []), GRPOConfig)
