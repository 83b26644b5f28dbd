"""`rl-plugins scale`: more samples per batch at the same mini-batch, read again by the hosts' own parsers."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from rl_plugins.commands.cli import app
from rl_plugins.commands.shared.overrides import with_overrides
from rl_plugins.commands.shared.yaml_edit import with_values
from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.scaling import fewer
from rl_plugins.trl.capabilities import optimizer_steps_per_batch
from rl_plugins.trl.commands import scale as trl_scale
from rl_plugins.verl import capabilities
from rl_plugins.verl import scale as verl_scale
from rl_plugins.verl.config import compose

TRL = """\
# a run of mine
model_name_or_path: policy
per_device_train_batch_size: 8   # fits
gradient_accumulation_steps: 2
num_generations: 4
learning_rate: 3.0e-4
max_steps: 100
bf16: false
"""
SYNC = [
    "data.train_batch_size=64",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=101",
    "trainer.save_freq=20",
    "trainer.test_freq=2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
]
SEPARATE = [
    "trainer.v1.trainer_mode=rl_plugins_separate_async",
    "data.train_batch_size=96",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "trainer.v1.separate_async.parameter_sync_step=3",
    "trainer.total_training_steps=40",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
]


@pytest.fixture(scope="module")
def defaults():
    return compose([])


@pytest.fixture
def quick(defaults, monkeypatch):
    """Overrides on verl's defaults without hydra, which takes a second each time."""

    def composed(words: list[str]) -> Any:
        base = copy.deepcopy(defaults)
        OmegaConf.set_struct(base, False)
        return OmegaConf.merge(base, OmegaConf.from_dotlist([w.lstrip("+") for w in words]))

    for module in ("rl_plugins.verl.config", "rl_plugins.verl.scale", __name__):
        monkeypatch.setattr(f"{module}.compose", composed)


def scale(*words: str, status: int = 0) -> tuple[str, str]:
    """stdout and stderr of the command."""
    result = CliRunner().invoke(app, ["scale", *words], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout, result.stderr


def refused(*words: str) -> str:
    return " ".join(scale(*words, status=2)[1].split())


def file(folder: Path, text: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# ---- TRL


def test_a_config_of_trl_keeps_its_comments_and_its_inner_loop(tmp_path):
    path, out = file(tmp_path, TRL), tmp_path / "new.yaml"
    table, _ = scale(path, "--by", "4", "--out", str(out), "--world-size", "2")
    new = out.read_text()
    assert "steps_per_generation: 8\n" in new and new.replace("steps_per_generation: 8\n", "") == TRL
    (a, _), (b, _) = (trl_scale.read(p, 2) for p in (Path(path), out))
    assert (a.generation_batch_size, b.generation_batch_size) == (32, 128)
    assert (optimizer_steps_per_batch(a), optimizer_steps_per_batch(b)) == (1, 4)
    for name in (*trl_scale.KEPT, "epsilon_high", "max_steps", "warmup_steps", "lr_scheduler_type"):
        assert getattr(a, name) == getattr(b, name), name
    assert "steps_per_generation  not set  8" in table and "has 128 rows (before: 32)" in table
    assert "takes 4 optimizer steps (before: 1) of 32 rows each" in table and "one more forward pass" in table
    assert "learning_rate=0.0003" in table and "not raised" in table


@pytest.mark.parametrize("by", [1, 2, 3, 8])
@pytest.mark.parametrize("more", ["steps_per_generation: 6", "generation_batch_size: 48", "num_iterations: 3"])
def test_samples_are_counted_exactly(tmp_path, by, more):
    """As many rows per optimizer step, `by` times the steps per batch, and no fewer samples than before."""
    path = Path(file(tmp_path, f"{TRL}{more}\n"))
    scaled = trl_scale.scaled(path, by, 1)
    new = Path(file(tmp_path, with_values(path.read_text(), scaled.values), "new.yaml"))
    (a, _), (b, _) = (trl_scale.read(p, 1) for p in (path, new))
    assert b.generation_batch_size == by * a.generation_batch_size
    steps = optimizer_steps_per_batch(b)
    assert steps == by * optimizer_steps_per_batch(a)
    if by == 1:
        assert new.read_text() == path.read_text()
        return
    assert b.max_steps >= 100 and b.max_steps % steps == 0 and b.max_steps - 100 < steps, "whole batches, rounded up"
    assert ("max_steps" in scaled.values) == (100 % steps > 0)


def test_what_trl_cannot_read_or_split_is_refused(tmp_path):
    short = file(tmp_path, TRL.replace("steps: 2", "steps: 4") + "steps_per_generation: 2\n")
    text = refused(short, "--by", "3", "--world-size", "1")
    assert (
        "A generation batch has 16 rows and an optimizer step 32" in text and "3 x 16 = 48 is no multiple of 32" in text
    )
    assert "Give --by a multiple of 2, e.g. --by 4" in text
    assert "steps_per_generation: 8" in scale(short, "--by", "4", "--world-size", "1")[0]
    assert "`batch_size`" in refused(file(tmp_path, TRL + "batch_size: 3\n"), "--by", "2")
    both = TRL + "steps_per_generation: 2\ngeneration_batch_size: 16\n"
    assert "TRL refuses the config" in refused(file(tmp_path, both), "--by", "2", "--world-size", "1")
    assert "by its config file alone" in refused("--by", "2")
    assert "by its config file alone" in refused("a.yaml", "b=1", "--by", "2")
    kept = file(tmp_path, TRL)
    assert "exists. Nothing was written" in refused(kept, "--by", "2", "--out", kept)
    assert Path(kept).read_text() == TRL
    scale(kept, "--by", "2", "--out", kept, "--force", "--world-size", "1")
    assert "steps_per_generation: 4" in Path(kept).read_text()


# ---- verl


def values(overrides: list[str]) -> capabilities.Reader:
    return capabilities.Reader(compose(overrides))


def test_overrides_of_verl():
    out, table = scale("--host", "verl", "--by", "4", "--", "python", "-m", "verl.trainer.main_ppo", *SYNC)
    new = out.split("\n")[:-1]
    a, b = values(SYNC), values(new)
    assert len(new) == len(SYNC) and b("data.train_batch_size") == 256
    assert (a.optimizer_steps_per_batch, b.optimizer_steps_per_batch) == (
        2,
        8,
    ) and a.rows_per_update == b.rows_per_update
    assert all(a(name) == b(name) for name in verl_scale.KEPT)
    assert b("trainer.total_training_steps") == 26, "101 batches are 25.25 of the new ones; none is left out"
    assert (b("trainer.save_freq"), b("trainer.test_freq")) == (5, 1)
    assert b("actor_rollout_ref.actor.optim.lr_warmup_steps") == 3
    assert "total_training_steps" in table and "rounded up" in table and "begins at learning rate 0" in table
    assert "hydra refuses" in refused("--host", "verl", "--by", "4", "--", "data.batch=3")


def test_separate_async_scales_the_sync_step_and_leaves_the_schedule(quick):
    out, table = scale("--host", "verl", "--by", "2", "--", *SEPARATE)
    b = values(out.split())
    batch, sync, mini = (b(n) for n in (verl_scale.BATCH, verl_scale.SYNC, verl_scale.MINI))
    assert (batch, sync, mini) == (192, 6, 32) and batch == sync * mini, "what verl asserts"
    assert b("actor_rollout_ref.actor.optim.lr_warmup_steps") == 10 and b("trainer.total_training_steps") == 20
    # verl's horizon of the schedule is total_training_steps x parameter_sync_step
    assert 20 * 6 == 40 * 3 and "the schedule is not changed" in table


def test_a_factor_of_one_changes_nothing(tmp_path, quick):
    assert scale("--host", "verl", "--by", "1", "--", *SYNC)[0].split() == SYNC
    assert scale(file(tmp_path, TRL), "--by", "1")[0] == TRL


def test_the_default_sync_step_of_verl_is_written_out(quick):
    """verl's default is 4: the file does not name it, the new one must."""
    words = [w for w in SEPARATE if "sync_step" not in w and "train_batch" not in w] + ["data.train_batch_size=128"]
    assert "trainer.v1.separate_async.parameter_sync_step=8" in scale("--host", "verl", "--by", "2", "--", *words)[0]


NESTED = """\
# mine
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 64}  # prompts
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 64
trainer:
  save_freq: 10
rl_plugins:
  methods: [vade]
"""


def test_files_of_verl(tmp_path, quick):
    nested = scale(file(tmp_path, NESTED), "--host", "verl", "--by", "2")
    assert nested[0] == NESTED.replace("train_batch_size: 64", "train_batch_size: 128").replace("freq: 10", "freq: 5")
    assert "Parameters of vade are not changed" in " ".join(nested[1].split())
    listed = file(tmp_path, yaml.safe_dump(SYNC), "overrides.yaml")
    assert yaml.safe_load(scale(listed, "--host", "verl", "--by", "2")[0]) == with_overrides(
        SYNC, verl_scale.scaled(compose(SYNC), 2).values
    )
    script = "set -x\npython3 -m verl.trainer.main_ppo \\\n " + " \\\n ".join(SYNC) + ' "trainer.logger=[console]" $@\n'
    out = tmp_path / "new.txt"
    scale(file(tmp_path, script, "run.sh"), "--host", "verl", "--by", "2", "--out", str(out))
    again = scale(str(out), "--host", "verl", "--by", "2")[0].split()
    four = scale("--host", "verl", "--by", "4", "--", *SYNC)[0].split()
    assert [w for w in again if "batch_size" in w] == [w for w in four if "batch_size" in w]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [*SYNC, "data.train_batch_size=48"],
            ["is 48", "is 32", "3 x 48 = 144 is no multiple of 32", "multiple of 2", "--by 4"],
        ),
        ([*SYNC, "trainer.v1.trainer_mode=mine"], ["trainer_mode is 'mine'", "Scale its config by hand"]),
        ([*SEPARATE, "data.train_batch_size=64"], ["is 64", "is 3", "Correct one of them first"]),
        ([*SYNC, "data.train_batch_size=2.5"], ["data.train_batch_size is 2.5", "integer above 0"]),
    ],
)
def test_what_verl_cannot_have_is_refused(words, parts, quick):
    text = refused("--host", "verl", "--by", "3", "--", *words)
    for part in parts:
        assert part in text, text


def test_further_refusals_for_verl(tmp_path, quick):
    unknown = file(tmp_path, "data: {train_batch: 3}\n")
    assert "none of verl's" in refused(unknown, "--host", "verl", "--by", "2") and "train_batch" in refused(
        unknown, "--host", "verl", "--by", "2"
    )
    other = file(tmp_path, "defaults: [my_trainer]\n")
    assert "Only [ppo_trainer, _self_]" in refused(other, "--host", "verl", "--by", "2")
    assert "neither options of verl nor" in refused(file(tmp_path, "3\n"), "--host", "verl", "--by", "2")
    shell = file(tmp_path, 'python -m verl.trainer.main_ppo "${words[@]}" $@', "run.sh")
    assert "'${words[@]}'" in refused(shell, "--host", "verl", "--by", "2")
    assert "as one file or as overrides" in refused("--host", "verl", "--by", "2")
    assert "--world-size is for TRL" in refused("--host", "verl", "--by", "2", "--world-size", "2", "--", *SYNC)


# ---- parts


def test_batches_are_rounded_up():
    for value, by in itertools.product(range(1, 40), range(1, 9)):
        s = fewer("x", value, by, "length")
        assert s.after * by >= value > (s.after - 1) * by and ("rounded up" in s.why) == (value % by > 0)


@pytest.mark.parametrize(
    ("text", "values", "new"),
    [
        ("a: 1 # one\nb: 2\n", {"a": 5}, "a: 5 # one\nb: 2\n"),
        ("a:\nb: 2\n", {"a": 5}, "a: 5\nb: 2\n"),
        ("# head\nb: 2\n", {"a": 5}, "# head\na: 5\nb: 2\n"),
        ("a:\n  b: 2\n", {"a.c.d": 5}, "a:\n  c: {d: 5}\n  b: 2\n"),
        ("a: {b: 2}\n", {"a.b": 3, "a.c": 4}, "a: {c: 4, b: 3}\n"),
    ],
)
def test_yaml_is_edited_in_place(text: str, values: dict[str, Any], new: str):
    assert with_values(text, values) == new


@pytest.mark.parametrize("text", ["x: &n 4\na: *n\n", "a: {}\n", "d: &d {a: {b: 1, c: 2}}\n<<: *d\n"])
def test_shared_values_are_not_edited(text: str):
    with pytest.raises(ConfigError, match="Write"):
        with_values(text, {"a.b" if "b" in text else "a" if "x" in text else "a.c": 5})


def test_the_last_override_counts():
    assert with_overrides(["a.b=1", "++a.b=2", "a.bc=3"], {"a.b": 5, "c": 6}) == ["a.b=1", "++a.b=5", "a.bc=3", "c=6"]
