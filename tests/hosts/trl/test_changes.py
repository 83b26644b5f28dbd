"""What the adapter changes in objects of TRL: all of it in one table, and nothing of it without methods."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from messages import raises
from trl import GRPOTrainer as HostTrainer
from trl.trainer import grpo_trainer
from waiting import NEVER

from rl_plugins.runtime.host_names import Pinned
from rl_plugins.trl.changes import changed
from rl_plugins.trl.host import _FORWARD_KEYS

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.host


def test_pinned_names_that_moved():
    """Gone, of other parameters, no function, set in `__init__` only, optional."""
    trainer = "trl.trainer.grpo_trainer:GRPOTrainer"
    told = {
        Pinned("trl.nothing:Class", "_x", None, ""): "trl.nothing:Class is gone",
        Pinned("trl.trainer.grpo_trainer:Nobody", "_x", None, ""): "trl.trainer.grpo_trainer:Nobody is gone",
        Pinned("trl.trainer.grpo_trainer", "_x", None, ""): "trl.trainer.grpo_trainer._x is gone",
        Pinned("trl.trainer.grpo_trainer", "GRPOTrainer", None, ""): "",
        Pinned(trainer, "_step", None, ""): "",
        Pinned(trainer, "_stepp", None, ""): "GRPOTrainer._stepp is gone",
        Pinned(trainer, "_stepp", None, "", optional=True): "",
        Pinned(trainer, "_step", ("a",), ""): "",
        Pinned(trainer, "_tag_names", ("a",), ""): "GRPOTrainer._tag_names is no function",
        Pinned(trainer, "_generate", ("inputs",), ""): "GRPOTrainer._generate(prompts) used to be (inputs)",
        Pinned(trainer, "_generate", (), ""): "",
    }
    assert {p: p.moved() for p in told} == told


def test_what_is_put_in_the_place_of_nothing():
    """A module of a host that lost a name: nobody would look at what is put there (seen: the fused head, TRL 1.14)."""
    with pytest.raises(AttributeError, match="grpo_trainer has no no_such_name"):  # noqa: SIM117
        with changed(grpo_trainer, no_such_name=None):
            pass


def test_all_that_the_log_probs_take_is_handed_to_them():
    """A key of TRL's batch that we do not know would be left out of every pass of ours."""
    own = getattr(HostTrainer, "_full_logits_logps", HostTrainer._get_per_token_logps_and_entropies)  # 1.14
    given = {"self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"}
    given |= {"compute_entropy", "compute_aux_loss"}
    assert set(inspect.signature(own).parameters) - given <= set(_FORWARD_KEYS)


UNTOUCHED = """
import sys
import torch, transformers, trl
from transformers import trainer as hf_trainer
from trl.scripts import grpo
from trl.trainer import grpo_trainer

_ = trl.GRPOConfig, trl.GRPOTrainer
owners = [hf_trainer, hf_trainer.Trainer, grpo_trainer, grpo_trainer.GRPOTrainer, trl.GRPOConfig, trl, grpo,
          transformers.GenerationMixin, transformers.TrainingArguments]
before = [dict(vars(o)) for o in owners]
callbacks = list(hf_trainer.DEFAULT_CALLBACKS)
folder, tests, out = sys.argv[1:]
sys.path.insert(0, tests)
from pathlib import Path
from harness import make, stub_sampling, score
from rl_plugins.trl import GRPOConfig, GRPOTrainer
from rl_plugins.trl.commands import doctor, script

def same():
    for o, then in zip(owners, before):
        now = vars(o)
        moved = [k for k in then if k not in now or now[k] is not then[k]]
        moved += [k for k in now if k not in then and not hasattr(type(o), "__getattr__")]  # trl loads when it is asked
        moved = [k for k in moved if not k.startswith("__") and not k.startswith("_abc")]
        assert not moved, (o, moved)
    assert hf_trainer.DEFAULT_CALLBACKS == callbacks

same()
make_config = GRPOConfig(out, use_cpu=True, bf16=False)
same()
options = dict(remove_unused_columns=True)  # TRL then asks for the columns to keep
ours, stock = make(Path(folder), [], **options), make(Path(folder), stock=True, **options)
same()
names = lambda t: [type(c).__name__ for c in t.callback_handler.callbacks]
assert names(ours) == names(stock)
assert set(vars(ours)) == set(vars(stock))
batches = []
for t in (ours, stock):
    host = t._generate_and_score_completions
    t._generate_and_score_completions = lambda inputs, host=host: batches.append(host(inputs)) or batches[-1]
    t.train()
assert set(batches[0]) == set(batches[1])
assert ours._signature_columns == stock._signature_columns == ["prompt", "image", "images"]
assert not any(k.startswith("rlp_") for b in ours._buffered_inputs for k in b)
assert not vars(ours.model).keys() ^ vars(stock.model).keys()
same()

seen = []
grpo.main = lambda *args: seen.append(trl.GRPOTrainer)
before[owners.index(grpo)]["main"] = grpo.main
arguments = ["--output_dir", out, "--use_cpu", "true", "--bf16", "false", "--reward_funcs", "accuracy_reward"]
script.run(arguments)
same()
script.run([*arguments, "--methods", "mc_grpo"])
assert seen == [trl.GRPOTrainer, GRPOTrainer] and trl.GRPOTrainer is grpo_trainer.GRPOTrainer
from rl_plugins.trl.config import RefuseStockTrainer
assert hf_trainer.DEFAULT_CALLBACKS == [*callbacks, RefuseStockTrainer], "from the first config that names methods on"
"""


def test_without_methods_nothing_is_touched(tmp_path):
    """In a fresh process: classes, modules, callbacks, the trainer and its batches are TRL's own."""
    (tmp_path / "run").mkdir()
    arguments = [str(tmp_path / "run"), str(Path(__file__).parent), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", UNTOUCHED, *arguments], capture_output=True, text=True, timeout=NEVER)
    assert done.returncode == 0, done.stderr[-3000:]


def test_methods_named_later_are_not_ignored_either(tmp_path):
    """`methods` set on a config that is there already."""
    import trl
    from harness import config, policy, score

    from rl_plugins.core.errors import ConfigError
    from rl_plugins.lab.demo.tasks import build_dataset

    args = config(tmp_path)
    args.methods = ["mc_grpo"]
    with raises(ConfigError, match="TRL"):
        trl.GRPOTrainer(
            model=str(policy(tmp_path / "policy")), reward_funcs=score, args=args, train_dataset=build_dataset(20)
        )
