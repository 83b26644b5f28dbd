"""What answers a problem beside methods, by lines that run in a host; and what speaks for and against methods."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from rl_plugins import runtime
from rl_plugins.cards.catalog import cards
from rl_plugins.cards.claims import MEASURES
from rl_plugins.cards.info import info
from rl_plugins.cards.problems import ANSWERS, HOSTS, PROBLEMS
from rl_plugins.cards.results import Result
from rl_plugins.cards.usage import ASYNCHRONOUS, VERL_BASE, asynchronous_lines
from rl_plugins.commands.cli import app
from rl_plugins.commands.suggest import advice, shown
from rl_plugins.lab.pages import choose
from rl_plugins.runtime.stack import build_stack

CARDS = {card.name: card for card in cards()}
OPTIONS = {one.name: one for one in ANSWERS if one.kind == "option"}
TEXTS = ("cost", "against", "watch")


def info_of(name: str) -> str:
    result = CliRunner().invoke(app, ["info", name])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.host
def test_lines_of_trl_build_its_config_or_run(tmp_path):
    """Keys of a config are taken by `GRPOConfig`, `ModelConfig` or the asynchronous trainer's; Python is executed, and
    a trainer takes what it is given. Where rollouts are stale, a key that only one of both trainers has names it."""
    import inspect
    from dataclasses import fields

    import trl
    from trl.experimental.async_grpo import AsyncGRPOConfig

    bound = inspect.signature(trl.GRPOTrainer.__init__).bind_partial
    given = {"GRPOTrainer": partial(bound, None), "your_reward": len, "your_tool": len}
    usual = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}
    of_grpo, of_async = ({f.name for f in fields(kind)} for kind in (trl.GRPOConfig, AsyncGRPOConfig))
    of_model = {f.name for f in fields(trl.ModelConfig)} - of_grpo
    assert of_async - of_grpo >= ASYNCHRONOUS
    for one in ANSWERS:
        if one.kind != "option" or not (line := one.use.get("trl")):
            continue
        if re.match(r"from |GRPOTrainer\(", line):
            exec(line, dict(given))  # names that TRL does not have, and arguments it does not take, raise here
            continue
        values = yaml.safe_load(line)
        trl.ModelConfig(**{k: v for k, v in values.items() if k in of_model})
        ahead = bool(set(values) & (of_async - of_grpo))
        config = (AsyncGRPOConfig if ahead else trl.GRPOConfig)(
            **usual | {k: v for k, v in values.items() if k not in of_model}
        )
        if "stale" in one.problems and not set(values) <= of_grpo & of_async:
            assert ("AsyncGRPOConfig" if ahead else "GRPOTrainer") in one.does, one.name
        assert all(getattr(config, k) == v for k, v in values.items() if k not in of_model), one.name


def test_lines_of_yaml_can_be_pasted():
    """A key a line, and no number that YAML reads as a text, as 1e-6."""
    lines = {one.name: one.use["trl"] for one in OPTIONS.values() if "trl" in one.use}
    pasted = {name: line for name, line in lines.items() if not re.match(r"from |GRPOTrainer\(", line)}
    assert len(pasted) > 20
    for name, line in pasted.items():
        values = yaml.safe_load(line)
        assert len(values) == len(line.splitlines()) and all(re.match(r"\w+: ", key) for key in line.splitlines())
        assert not [v for v in values.values() if isinstance(v, str) and re.match(r"[\d.]", v)], name


def first_options() -> set[str]:
    """Options among the answers that `suggest` shows first of a problem."""
    of = [advice.suggestion(key, (), advice.Asked(host)).found for key in PROBLEMS for host in HOSTS]
    return {one.name for found in of for one in found[: shown.MOST] if one.name in OPTIONS}


def test_options_that_are_shown_first_say_what_they_cost_when_not_and_where_their_work_shows():
    assert len(first_options()) > 10
    for name in first_options():
        text = info_of(name)
        assert all(told and f"\n  {told}." in text for told in map(partial(getattr, OPTIONS[name]), TEXTS)), name


@pytest.mark.host
def test_logs_to_watch_are_logged_by_a_host():
    """Each part of a name is in the source of the host, or in ours for what the adapters log."""
    import trl
    import verl

    roots = [Path(trl.__file__).parent / part for part in ("trainer", "experimental/async_grpo")]
    roots += [Path(verl.__file__).parent / part for part in ("trainer", "workers", "utils")]
    roots += [Path(runtime.__file__).parents[1] / host for host in HOSTS]
    source = "\n".join(file.read_text(encoding="utf-8") for root in roots for file in root.rglob("*.py"))
    texts = [p.watch for p in PROBLEMS.values()] + [one.watch for one in OPTIONS.values()]
    names = {name for text in texts for name in re.findall("`([^` ]+)`", text)} - {"rl_plugins.rewards", "eval_reward"}
    assert len(names) > 25  # the trainers of transformers put `eval_` in front of `reward`
    for name in names:
        whole = re.escape(name).replace("NAME", r"\{\w+\}")
        first, _, last = name.rpartition("/")
        apart = f'"{last}"' in source and re.search(rf"[\"']{first}/[{{\"']", source)  # as in f"timing_s/{name}"
        assert re.search(rf"[\"'/]{whole}", source) or apart, name


def test_a_word_of_the_table_in_the_readme_finds_its_answer():
    page = choose.readme((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"))
    words = re.findall("`([^`]*)`", page.partition("| problem | first |")[2].partition("<!--")[0])
    for word in words:
        name = re.sub(r"rl-plugins (\S+).*", r"\1", word)
        assert info_of(name), word
    assert info_of("get_soft_overlong_punishment") == info_of("overlong_buffer")
    assert info_of("algorithm.rollout_correction.bypass_mode") == info_of("bypass_mode")


@pytest.mark.host
def test_what_needs_rollouts_of_an_older_policy_has_lines_for_an_asynchronous_run():
    """The hosts' own checks take them: a batch is used once there. What makes rollouts wait by itself has one line."""
    from rl_plugins.trl import asynchronous
    from rl_plugins.trl.asynchronous import capabilities as of_trl
    from rl_plugins.verl import capabilities as of_verl
    from rl_plugins.verl.config import compose, read_settings

    config = partial(asynchronous.AsyncGRPOConfig, use_cpu=True, bf16=False, per_device_train_batch_size=64)
    place = SimpleNamespace(trl=SimpleNamespace(asynchronous=SimpleNamespace(AsyncGRPOConfig=config)))
    base, hosts = [f"{k}={v}" for k, v in VERL_BASE.items()], {}
    for name, card in CARDS.items():
        lines = asynchronous_lines(card.found)
        hosts |= {name: set(lines)} if lines else {}
        assert all(f"{host}, asynchronous: {line}\n" in info(card.found) for host, line in lines.items())
        if "trl" in lines:
            args = eval(lines["trl"], {"rl_plugins": place})
            stack = build_stack(args.methods, args.method_params or {})
            of_trl.check(stack, of_trl.KnownAsync(args, [{"prompt": "1 + 1 ="}] * 64, ("right",), False, None))
            assert stack.names[-1] == name
        if "verl" in lines:
            run = compose([*base, *shlex.split(lines["verl"])])
            settings = read_settings(run)
            of_verl.check(settings.stack(), settings, run)
            read = of_verl.Reader(run)
            assert settings.stack().names[-1] == name and read.optimizer_steps_per_batch == 1 and read.mode != "sync"
    both = {"trl", "verl"}
    assert hosts == {**dict.fromkeys(("decoupled_ppo", "dppo", "minpro", "vcpo"), both), "dart_tis": {"verl"}}


@pytest.mark.host
def test_lines_of_verl_are_composed_and_run():
    """Lines that share no key are composed together, which takes a tenth of the time. What a line parametrises is built
    with it: a line without its threshold or its length was refused only in the run."""
    import torch
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.trainer.ppo import rollout_corr_helper as corrections
    from verl.utils.config import omega_conf_to_dataclass

    from rl_plugins.verl.config import compose

    lines = {name: one.use["verl"].split() for name, one in OPTIONS.items() if "verl" in one.use}
    runs: list[dict[str, str]] = []  # key -> the override, of lines of one run
    place: dict[str, int] = {}
    for name, words in lines.items():
        keys = {word.partition("=")[0].lstrip("+"): word for word in words}
        apart = (i for i, run in enumerate(runs) if not set(keys) & set(run) and "model_engine" not in {*keys, *run})
        place[name] = next(apart, len(runs))
        runs += [{}] * (place[name] == len(runs))
        runs[place[name]] = {**runs[place[name]], **keys}
    base = [f"{k}={v}" for k, v in VERL_BASE.items()]
    composed = [compose([*base, *run.values()]) for run in runs]
    for config in composed:
        for node in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm", "distillation"):
            omega_conf_to_dataclass(OmegaConf.select(config, node))
    told = composed[place["vllm_importance_sampling_correction"]].algorithm.rollout_correction
    old, mask = torch.zeros(1, 3), torch.ones(1, 3)
    rollout = -torch.tensor([[0.3, 2.0, -2.0]])  # ratios 1.35, 7.4 and 0.14: the last two are out of bounds
    _, kept, _ = corrections.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask, **{k: told[k] for k in ("rollout_is", "rollout_rs", "rollout_rs_threshold")}
    )
    assert kept.tolist() == [[1, 0, 0]]
    manager = DAPORewardManager(composed[place["overlong_buffer"]], None, len)
    assert manager.overlong_buffer_cfg.len < manager.max_resp_len
    assert "model_engine=megatron" in lines["router_replay"] and "Megatron" in OPTIONS["router_replay"].does


def test_the_page_of_stale_rollouts_says_of_each_method_what_choose_says():
    page = (Path(__file__).parents[1] / "docs" / "staleness.md").read_text(encoding="utf-8")
    rows = [row.split("|")[2:4] for row in page.partition("## Which method")[2].partition("##")[0].splitlines()]
    told = {re.findall(r"`(\w+)`", row[0])[0]: row[1].strip() for row in rows[2:] if "`" in "".join(row)}
    assert set(told) >= {"decoupled_ppo", "minpro", "vcpo"}
    assert {name: word.split(":")[0] for name, word in told.items()} == {n: CARDS[n].standing.word for n in told}


def test_what_was_not_met_speaks_against_a_method():
    """`vade` was measured to give more signal, and not more right answers; `linear_ts` lost held-out answers in a run
    with no control. A measured harm outweighs better gradients, and gradients that are worse in more worlds count for
    nothing."""
    vade, linear_ts = CARDS["vade"].standing, CARDS["linear_ts"].standing
    assert "equal rewards" in vade.good and "right answers" not in vade.good
    assert any("more right answers" in text and "-0.022" in text for text in vade.against)
    assert any("0.453" in text for text in linear_ts.against)
    assert CARDS["vcpo"].standing.word == CARDS["pkpo"].standing.word == "skip"
    assert "no verdict; measured: " in CARDS["gigpo"].good and "29.0" in CARDS["gigpo"].good
    assert "curriculum" in CARDS["dynamic_sampling"].good
    record = Result("m", "c", "higher", "GRPO", value=(0.4, 0.01), other=(0.43, 0.01))
    assert record.worse and not replace(record, better="lower").worse and not replace(record, other=(0.41, 0.01)).worse


def test_a_metric_is_named_in_the_direction_in_which_it_went():
    """Fewer groups of equal rewards helped; a harmed metric went the other way than promised; of what was not met, the
    promised direction is named, and one that was met by too little is not called unseen."""
    standing = {name: card.standing for name, card in CARDS.items()}
    assert standing["vade"].helped[0].startswith(f"fewer {MEASURES['no_signal']}")
    assert standing["linear_ts"].helped[0].startswith(f"more {MEASURES['right']}")
    assert standing["dots_rr"].against[0].startswith(f"fewer {MEASURES['right']}")
    assert standing["aepo"].against[0].startswith(f"lower {MEASURES['score']}")
    assert f"fewer {MEASURES['length']}" in standing["drpo"].against[0]
    small = next(text for text in standing["turn_control"].against if MEASURES["tokens"] in text)
    assert small.startswith(f"fewer {MEASURES['tokens']}") and "-1599" in small
    for card in CARDS.values():
        for text in (*card.standing.helped, *card.standing.against):
            for what in MEASURES.values():
                assert what not in text or re.search(rf"(more|fewer|higher|lower) {re.escape(what)}", text), text
