"""What cannot take effect or not be exact is an error before the model is loaded; and what of TRL is pinned."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from dataclasses import replace

import pytest
import torch
import trl
from datasets import Dataset
from harness import config, history, length, make, score, stub_sampling, weights
from messages import raises
from trl import TrlParser

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.lab.demo.environments import Calculator
from rl_plugins.lab.demo.policy import build_tokenizer
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.runtime.tested import number
from rl_plugins.trl import GRPOConfig, GRPOTrainer, capabilities, compat
from rl_plugins.trl.trainer import MethodsMixin

pytestmark = pytest.mark.host


def refused(tmp_path, match, methods, **options):
    """The error must come before the model is loaded: there is no model at the path."""
    params = {k: v for k, v in options.items() if k in methods}
    rest = {k: v for k, v in options.items() if k not in ("reward", "more", "columns", *methods)}
    args = config(tmp_path, methods, method_params=params or None, **rest)
    from rl_plugins.trl import GRPOTrainer

    with raises(ConfigError, match=match) as e:
        GRPOTrainer(
            model="no/such/model",
            reward_funcs=options.get("reward", score),
            args=args,
            **{"train_dataset": build_dataset(64), **options.get("more", {})},
        )
    assert "\n\n" not in str(e.value)


def test_names_and_parameters(tmp_path):
    for methods, params, match in [
        (["mc_grop"], None, r"no method `mc_grop`\. Did you mean `mc_grpo`.*\? `rl-plugins list`"),
        (["mc_grpo"], {"mc_grpo": {"mad_epz": 1}}, r"no parameter `mad_epz`\. Did you mean `mad_eps`\?"),
        (["mc_grpo"], {"mc_grpo": {"mad_eps": -1}}, r"`mad_eps` is -1\.0; it must be > 0"),
        (["mc_grpo"], {"vade": {}}, r"parameters for `vade`, which is not among the methods of this run"),
        (["mc_grpo", "gdpo"], None, "`mc_grpo` and `gdpo` both decide `advantages`, and only one can"),
        (["grpo"], None, "`grpo` is the host's own algorithm"),
    ]:
        with raises(ConfigError, match=match):
            make(tmp_path, methods, method_params=params, reward=[score, length])


def test_rounds_and_other_texts_beside_images(tmp_path):
    """Before the model is loaded: the columns of the dataset tell."""
    images = {"more": {"train_dataset": build_dataset(64).add_column("image", ["a.png"] * 64)}}
    refused(tmp_path, "`probing`", ["probing"], **images)
    refused(tmp_path, "`xrpo_seeds`", ["xrpo_seeds"], **images)


def test_groups_rewards_and_services_that_methods_need(tmp_path, monkeypatch):
    pair = dict(per_device_train_batch_size=8, num_generations=2)
    refused(tmp_path, r"`grpo_roc`.*min_wrong.*min_correct.*2.*2.*2", ["grpo_roc"], **pair)
    refused(tmp_path, "`v0`.*2.*`min_rollouts`.*3", ["v0"], **pair, v0={"min_rollouts": 3})
    refused(tmp_path, "`v0_5`.*2", ["v0_5"], **pair)
    refused(
        tmp_path,
        "9.*8.*72.*16",
        ["m_grpo_rollout"],
        per_device_train_batch_size=16,
    )
    names = "the reward functions of this run are: score, length, my_model"
    rewards = [score, functools.partial(length), "somebody/my_model"]
    refused(
        tmp_path,
        f"`drpo`.*`reward`.*'right'.*{names}",
        ["drpo"],
        drpo={"reward": "right"},
        reward=rewards,
    )
    refused(
        tmp_path,
        "`fission_grpo`.*`correctness`.*'right'",
        ["fission_grpo"],
        fission_grpo={"correctness": "right"},
    )
    refused(
        tmp_path,
        "`fission_grpo_reward`.*`format`",
        ["fission_grpo_reward"],
        reward=[score, length],
    )
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    endpoint = {"judge_url": "http://localhost:1/v1", "judge_model": "m", "judge_key_env": "NO_SUCH_KEY"}
    refused(tmp_path, "`brpo`.*NO_SUCH_KEY", ["brpo"], brpo=endpoint)
    learned = {"llm_url": "localhost", "llm_model": "m"}
    refused(
        tmp_path,
        "`training_free_grpo`.*'localhost'",
        ["training_free_grpo"],
        training_free_grpo=learned,
    )


def test_a_missing_chat_template_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "model"  # there are no weights
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    talk = Dataset.from_list([{"prompt": [{"role": "user", "content": "a:1"}], "mood": ""}] * 64)
    text = Dataset.from_list([{"prompt": "a:1", "mood": ""}] * 64)
    agent = {"turn_control": {"environment": Calculator}}
    bare = build_tokenizer()
    bare.chat_template = None

    def error(methods, dataset, model=str(folder), processor=None, **params):
        args = config(tmp_path, methods, method_params=params or None)
        with pytest.raises((ValueError, OSError)) as e:
            GRPOTrainer(model=model, reward_funcs=score, args=args, train_dataset=dataset, processing_class=processor)
        return e

    for methods, dataset, params in ((["vade"], talk, {}), (["turn_control"], text, agent)):
        assert error(methods, dataset, **params).type is not ConfigError, "the template is there, the model is not"
    (folder / "chat_template.jinja").unlink()
    conversations = (
        "The prompts of the dataset are conversations, and the tokenizer of .* has no chat template. Give it"
    )
    writes = "`turn_control` needs a chat template of the tokenizer.*: the tokenizer of .* has no chat template"
    assert error(["vade"], talk).match(conversations) and error(["vade"], talk, processor=bare).match(conversations)
    assert error(["turn_control"], text, **agent).match(writes)
    assert error(["vade"], text).type is not ConfigError
    assert error(["turn_control"], text, processor=tokenizer, **agent).type is not ConfigError

    asked = []
    monkeypatch.setattr(
        capabilities, "snapshot_download", lambda name, **k: asked.append((name, k["revision"])) or str(folder)
    )
    assert error(["vade"], talk, model="somebody/model").match("the tokenizer of somebody/model has no chat template")
    assert asked == [("somebody/model", None)]


def test_signals_options_and_hooks(tmp_path):
    refused(tmp_path, "`gdpo`.*1", ["gdpo"])
    refused(tmp_path, "`minpro`.*num_iterations=2", ["minpro"])
    refused(
        tmp_path,
        "`minpro`.*top_p=0.9.*top_k=50",
        ["minpro"],
        num_iterations=2,
        top_p=0.9,
        top_k=50,
    )
    refused(
        tmp_path,
        "`aepo_clip`.*1.*num_iterations=2",
        ["aepo_clip"],
    )
    refused(
        tmp_path,
        "`gdpo` sets multi_objective_aggregation='sum_then_normalize', but the config has "
        "multi_objective_aggregation='normalize_then_sum'",
        ["gdpo"],
        reward=[score, length],
        multi_objective_aggregation="normalize_then_sum",
    )
    refused(
        tmp_path,
        "`softmax`.*`before_update`",
        ["softmax"],
        steps_per_generation=3,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=16,
        num_generations=8,
    )
    refused(
        tmp_path,
        "`softmax`.*`before_update`.*steps_per_generation=2",
        ["softmax"],
        steps_per_generation=4,
        gradient_accumulation_steps=2,
    )
    waits = (
        "`rollart_redundancy` needs rollouts that begin beyond.*: without a rollout program TRL generates all rollouts"
    )
    refused(tmp_path, f"{waits}.*turn_control", ["rollart_redundancy"])
    tree = '`latr` makes the rollouts and does not say that each is alone.*set `brings = {"redundancy"}`'
    refused(tmp_path, tree, ["latr", "rollart_redundancy"])
    grid = {"turn_control": {"environment": Calculator}}
    bundle = "TRL's GRPOTrainer does not generate while it trains"
    refused(tmp_path, bundle, ["turn_control", "rollart"], **grid)


def test_corrections_of_tokens_nobody_sampled(tmp_path):
    refused(
        tmp_path,
        "(?s)`forcing` puts tokens into rollouts.*`minpro` needs it",
        ["forcing", "minpro"],
        use_vllm=True,
        num_iterations=2,
    )
    asks = "`forcing` puts tokens into rollouts.*vllm_importance_sampling_correction=True asks"
    refused(tmp_path, asks, ["forcing"], use_vllm=True)


def test_losses_that_cannot_be_exact(tmp_path):
    refused(
        tmp_path,
        "loss_type='bnpo'.*`half`",
        ["half", "mc_grpo"],
        loss_type="bnpo",
    )
    refused(tmp_path, "`corridor`", ["corridor"], loss_type="bnpo")
    refused(
        tmp_path,
        "`half`.*loss_type='grpo'",
        ["half"],
        loss_type="grpo",
        entropy_coef=0.01,
    )
    with raises(ConfigError, match="loss_type='bnpo'"):
        make(tmp_path, ["filter"], loss_type="bnpo").train()
    with raises(ConfigError, match="`filter`"):
        make(tmp_path, ["filter"], loss_type="dr_grpo", entropy_coef=0.01).train()


def test_methods_that_keep_the_batch_full_are_not_refused(tmp_path):
    """As many rows are trained as TRL alone would train, so there is nothing to rescale: with advantages that are all
    0 only the entropy bonus moves the weights, by as much as in plain TRL with rewards that are all equal."""

    def equal(completion_ids=None, **columns):
        return [0.5] * len(completion_ids)

    for methods, loss_type, bonus in (
        (["mc_grpo"], "bnpo", 0.0),
        (["mc_grpo"], "dr_grpo", 0.01),
        (["v0"], "bnpo", 0.0),
        (["echo_labels"], "grpo", 0.01),
    ):
        params = {"echo_labels": {"n_votes": 16}} if methods == ["echo_labels"] else None
        with stub_sampling():
            t = make(tmp_path, methods, loss_type=loss_type, entropy_coef=bonus, method_params=params, max_steps=1)
            t.train()
        moved = methods == ["v0"]  # as many rollouts as TRL's own, which is not worth a line in the logs
        assert t.state.global_step == 1 and history(t, "rl_plugins/rows_trained") == ([] if moved else [64.0])
    ended = []
    for methods, stock in (([], True), (["spare_of_its_own"], False)):
        with stub_sampling():
            options = dict(loss_type="grpo", entropy_coef=0.1, max_steps=1, max_grad_norm=0.0)
            t = make(tmp_path, methods, stock=stock, reward=equal, **options)
            t.train()
            ended.append(weights(t))
    assert float((ended[0] - ended[1]).abs().max()) < 1e-7


def test_a_batch_that_is_not_full_though_a_method_says_so(tmp_path):
    with raises(MethodError, match="1.*64.*`unfilled`.*`keeps_batch_size`"):
        make(tmp_path, ["unfilled"], loss_type="bnpo", max_steps=1).train()


def test_a_sum_of_its_own_does_not_depend_on_the_loss_type(tmp_path, capsys):
    """`drpo`: all eight loss types end at the same weights, and the option is listed as one without effect."""

    def right(completion_ids=None, **columns):
        return [float(sum(c) % 2) for c in completion_ids]

    ended = {}
    for loss_type in ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "vespo"):
        with stub_sampling():
            t = make(tmp_path, ["drpo"], reward=right, loss_type=loss_type, max_steps=1, learning_rate=0.1)
            before = weights(t)
            t.train()
        ended[loss_type] = weights(t)
        listed = f"loss_type={loss_type} (drpo brings its own sum)" in capsys.readouterr().out
        assert listed == (loss_type != "dapo")
    assert float((ended["dapo"] - before).abs().max()) > 0
    for loss_type, end in ended.items():
        assert float((end - ended["dapo"]).abs().max()) < 1e-8, loss_type


def test_what_stays_of_a_loss_type_under_a_surrogate_of_a_method(tmp_path, capsys):
    ended = {}
    for loss_type in ("dapo", "cispo", "vespo", "grpo", "sapo"):
        with stub_sampling():
            t = make(tmp_path, ["minpro"], num_iterations=2, loss_type=loss_type, max_steps=2)
            t.train()
        ended[loss_type] = weights(t)
        text = f"without effect: the surrogate of loss_type={loss_type} (minpro; its average stays)"
        assert (text in capsys.readouterr().out) == (loss_type in ("cispo", "vespo", "sapo"))
    assert torch.equal(ended["dapo"], ended["cispo"]) and torch.equal(ended["dapo"], ended["vespo"])
    assert torch.equal(ended["grpo"], ended["sapo"]) and not torch.equal(ended["grpo"], ended["dapo"])


def test_generation_kwargs_that_change_what_is_sampled(tmp_path):
    for given, told in (
        ({"top_p": 0.9}, "generation_kwargs top_p=0.9"),
        ({"do_sample": False}, "generation_kwargs do_sample=False"),
        ({"temperature": 0.5}, "generation_kwargs temperature=0.5"),
        ({"bad_words_ids": [[5]], "seed": 1}, r"generation_kwargs bad_words_ids=\[\[5\]\]"),
        ({"top_k": 50, "typical_p": 0.5}, "generation_kwargs top_k=50, generation_kwargs typical_p=0.5"),
    ):
        match = f"with {told} the distribution that was sampled"
        refused(tmp_path, match, ["minpro"], num_iterations=2, generation_kwargs=given)
    harmless = {"do_sample": True, "use_cache": True, "top_p": 1.0, "top_k": 0, "temperature": 1.0, "min_p": None}
    t = make(tmp_path, ["minpro"], num_iterations=2, generation_kwargs=harmless, max_steps=1)
    t.train()
    assert t.state.global_step == 1


def test_options_of_vllm_are_not_set_without_it(tmp_path, capsys):
    make(tmp_path, ["minpro"], num_iterations=2)
    assert "host options set" not in capsys.readouterr().out


def test_a_dataset_smaller_than_a_batch(tmp_path):
    """TRL itself reports success after 0 steps."""
    with raises(ConfigError, match=r"7.*8"):
        make(tmp_path, ["mc_grpo"], dataset=build_dataset(7), max_steps=1).train()
    trainer = make(tmp_path, ["mc_grpo"], dataset=build_dataset(8), max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    few = make(tmp_path, ["mc_grpo"], dataset=build_dataset(7), more={"eval_dataset": build_dataset(8, seed=2)})
    assert "eval_reward" in few.evaluate()
    for given in (-1.0, float("nan"), float("inf")):
        with raises(ConfigError, match=f"rollout_cache_gb={given}"):
            make(tmp_path, ["mc_grpo"], rollout_cache_gb=given)


def test_every_problem_is_told_at_once(tmp_path):
    refused(tmp_path, "(?s)`gdpo` needs two or more.*`minpro` needs tokens that another", ["gdpo", "minpro"])
    refused(
        tmp_path,
        "(?s)no method `nosuch`.*no parameter `nope`.*`column` is missing.*`vade` and `linear_ts`.*`minpro` needs",
        ["vade", "linear_ts", "nosuch", "minpro"],
        vade={"nope": 1},
    )


def test_idle_host_options_are_shown(tmp_path, capsys):
    make(tmp_path, ["mc_grpo"], scale_rewards="none")
    assert "host options without effect: scale_rewards=none (mc_grpo)" in capsys.readouterr().out
    make(tmp_path, ["mc_grpo"], rollout_cache_gb=1.0)
    assert "without effect: rollout_cache_gb=1.0 (no method makes rollouts by a program)" in capsys.readouterr().out
    make(tmp_path, ["plain"], rollout_cache_gb=1.0)
    make(tmp_path, ["mc_grpo"])
    assert "without effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("yaml", "arguments", "methods", "params"),
    [
        ("methods: mc_grpo", [], ["mc_grpo"], {}),
        (
            "methods: [vade, mc_grpo]\nmethod_params: {mc_grpo: {mad_eps: 1e-3}}",
            [],
            ["vade", "mc_grpo"],
            {"mc_grpo": {"mad_eps": "1e-3"}},
        ),
        ("methods: [vade]", ["--methods", "mc_grpo"], ["mc_grpo"], {}),
        (
            "learning_rate: 1e-5",
            ["--methods", "vade,mc_grpo", "--method_params", '{"mc_grpo": {"mad_eps": 0.5}}'],
            ["vade", "mc_grpo"],
            {"mc_grpo": {"mad_eps": 0.5}},
        ),
    ],
)
def test_yaml_and_command_line_say_the_same(tmp_path, yaml, arguments, methods, params):
    (tmp_path / "run.yaml").write_text(yaml + f"\noutput_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n")
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(["--config", str(tmp_path / "run.yaml"), *arguments])
    assert args.methods == methods and args.method_params == params
    from rl_plugins.runtime.stack import build_stack

    stack = build_stack(args.methods, args.method_params)
    assert [m.name for m in stack.methods] == methods
    if "mc_grpo" in params:
        assert stack.methods[-1].params.mad_eps == float(params["mc_grpo"]["mad_eps"])


def test_left_over_parameters_on_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"methods: [mc_grpo]\nmethod_params: {{mc_grpo: {{mad_eps: 1e-3}}}}\n"
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\n"
    )
    words = ["--config", str(tmp_path / "run.yaml"), "--methods", "vade"]
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config(words)
    with raises(ConfigError, match="`mc_grpo`"):
        GRPOTrainer(model="no/such/model", reward_funcs=score, args=args, train_dataset=build_dataset(64))


# ---- what the adapter relies on


def test_pinned_symbols_are_where_they_were():
    assert compat.moved_symbols() == []
    installed = number(compat.trl_version())
    assert set(compat.closed_parts()) == {part for part, first in compat.PARTS.items() if installed < number(first)}


# Bodies of TRL 1.16.0 the adapter was written against. A change is no fault by itself: read the new body, then renew.
BODIES = {
    "_calculate_rewards": "736ae29b0838",
    "_compute_loss": "80295546bbdb",
    "_generate": "2a27fdf8f5e6",
    "_generate_and_score_completions": "1fa48922792d",
    "_generate_single_turn": "e0f02e4fc094",
    "_get_per_token_logps_and_entropies": "ea73c3909275",
    "_prepare_inputs": "f824e7fb0714",
    "_save_checkpoint": "ec91bde12364",
    "_set_signature_columns_if_needed": "564a2edd0b39",
    "_tokenize_prompts": "d2d27f7c9bfd",
    "compute_loss": "a2d6ef8bd29c",
    "get_high_entropy_mask": "ce6e86287bac",
    "get_off_policy_mask": "8ee1e1964611",
    "get_train_dataloader": "2bffe5a57c53",
    "training_step": "9e18632f7dd8",
}


def digest(name):
    source = inspect.getsource(inspect.unwrap(getattr(trl.GRPOTrainer, name)))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


@pytest.mark.skipif(not compat.trl_version().startswith("1.16."), reason="the digests are of TRL 1.16")
def test_bodies_are_those_the_adapter_was_written_against():
    called = {p.name for p in compat.PINNED if p.owner.endswith(":GRPOTrainer") and p.parameters is not None}
    assert set(BODIES) >= {n for n in called if n in vars(trl.GRPOTrainer)}
    for name, known in BODIES.items():
        found = digest(name)
        assert found == known, f"TRL {compat.trl_version()} changed GRPOTrainer.{name}: read it, then put {found} here"


def test_a_moved_symbol_is_named(tmp_path, monkeypatch, caplog):
    class Moved(trl.GRPOTrainer):
        __module__ = "trl.trainer.grpo_trainer"

        def compute_loss(self, policy, batch):
            return None

    class Ours(MethodsMixin, Moved):
        pass

    trainer = {"model": "no/such/model", "reward_funcs": score, "args": config(tmp_path, ["mc_grpo"])}
    with raises(ConfigError, match=r"Moved\.compute_loss\(policy, batch\) used to be \(model, inputs\)"):
        Ours(**trainer)
    monkeypatch.setenv(compat.ALLOW_VARIABLE, "1")  # opens this part of the gate, too
    with pytest.raises(OSError, match="no/such/model"), caplog.at_level("WARNING"):
        Ours(**trainer)
    assert "Moved.compute_loss" in caplog.text


def test_an_untested_version_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.17.2")
    with raises(ConfigError, match=r"1\.17\.2.*1\.14.*1\.17"):
        compat.check_versions()
    monkeypatch.setenv(compat.ALLOW_VARIABLE, "1")
    compat.check_versions()


def test_the_config_adds_nine_fields_and_changes_none():
    own = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    stock = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    added = {"methods", "method_params", "rollout_cache_gb", "max_unrewarded_batches", "count_costs"}
    added |= {"rollout_precision", "trace", "on_reward_error", "accept_changed_checkpoint"}
    assert set(own) - set(stock) == added
    assert all(own[k] == v for k, v in stock.items())


def test_no_host_body_is_copied():
    """Every override of the mixin calls super(), and shares no run of five lines with TRL's trainer."""
    import rl_plugins.trl.trainer as module

    ours = inspect.getsource(module)
    theirs = {line.strip() for line in inspect.getsource(trl.GRPOTrainer).splitlines() if len(line.strip()) > 25}
    run = longest = 0
    for line in ours.splitlines():
        run = run + 1 if line.strip() in theirs else 0
        longest = max(longest, run)
    assert longest < 3
    for name, function in vars(MethodsMixin).items():
        if inspect.isfunction(function) and hasattr(trl.GRPOTrainer, name):
            assert "super()" in inspect.getsource(function), name


# ---- what is known of a run


@pytest.mark.parametrize(
    ("options", "steps", "batches"),
    [
        ({}, 25, 25),
        (dict(num_iterations=3), 75, 25),
        (dict(steps_per_generation=1, gradient_accumulation_steps=2, per_device_train_batch_size=64), 13, 26),
        (dict(steps_per_generation=3, gradient_accumulation_steps=2, per_device_train_batch_size=32), 24, 16),
        (dict(max_steps=7, num_iterations=2), 7, 4),
    ],
)
def test_a_trainer_and_a_dry_run_tell_methods_the_same(tmp_path, monkeypatch, options, steps, batches):
    """One from itself when training starts, one from the config alone; numbers of an epoch of 200 prompts."""
    import probes

    from rl_plugins.trl.capabilities import KnownRun, run_of

    told = []

    def start(self, run):
        told.append(run)
        raise RuntimeError("enough")

    monkeypatch.setattr(probes.Counter, "start", start)
    data = build_dataset(200, seed=1)
    t = make(tmp_path, ["counter"], dataset=data, **{"max_steps": -1, "num_train_epochs": 1, **options})
    with raises(MethodError, match="enough"):
        t.train()
    known = KnownRun(t.args, data, 200, ("score",))
    assert [f.name for f in told[0].reward_functions] == ["score"]
    assert told[0].chat.eos == tuple(t.eos_token_ids) and told[0].fingerprint.startswith("200 rows")
    assert (
        [replace(r, chat=None, fingerprint="", reward_functions=()) for r in told] == [run_of(known)]
        and told[0].dataset is data
        and told[0].columns == tuple(data.column_names)
    )
    assert (told[0].total_steps, told[0].total_batches) == (steps, batches)
