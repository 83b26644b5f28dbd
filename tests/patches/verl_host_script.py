"""Drive the verl that is on the import path and write what it does to a JSON file.

Usage: ``python verl_host_script.py OUT_DIR``. The tests run it once with the stock verl and once with the patched copy
first on ``PYTHONPATH``, then compare the two files. Nothing here asserts: the same measurement shows the fault of the
stock host and its absence on the patched one.

One process on the CPU, no Ray and no TransferQueue: verl's own methods run on trainers and workers made without their
set-up, with a dictionary in place of TransferQueue. The CPU platform below is the smallest one that verl accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = Path(sys.argv[1])
PLUGINS = OUT / "plugins"  # the plugin packages of V6
os.environ.update(
    VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_PLUGINS="none", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_PORT="0"
)
os.environ.pop("VERL_ENGINE_DEVICE", None)  # V13: the lookup shall go by the platform

import numpy as np
import tensordict
import torch
import verl
from verl.plugin.platform import PlatformBase, PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """CPU as verl's accelerator: everything an accelerator has and a CPU lacks is a no-op."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(set_device=lambda *args: None, is_available=lambda: False)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl hands it to Tensor.to()

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def ray_resource_name(self) -> str:
        return "GPU"


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


for _name in PlatformBase.__abstractmethods__ - set(vars(PlatformCPU)):
    setattr(PlatformCPU, _name, _nothing)
PlatformCPU.__abstractmethods__ = frozenset()

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transfer_queue import KVBatchMeta
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification
from verl import DataProto
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import agent_loop_tq, register_trainer, replay_buffer, trainer_base, trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import distributed, fsdp_utils, import_utils
from verl.utils import model as model_utils
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.skip.rollout_skip import RolloutTqSkip
from verl.workers.config import ActorConfig, FSDPEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss


def outcome(function: Callable[[], Any]) -> str:
    """Return "ok", or the name and the text of the exception that `function` raised."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def digest(*values: torch.Tensor) -> str:
    """Return a hash of the exact bits."""
    return hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in values)).hexdigest()


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Any:
    """Set attributes of a module or a class, and put the old ones back."""
    old = {name: getattr(owner, name) for name in attributes}
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


@functools.cache
def composed(*overrides: str) -> Any:
    """Compose verl's trainer configuration as `main_ppo` does."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def trainer_config(values: dict[str, Any] | None = None) -> Any:
    """Return a copy of the default configuration with `values` set, new keys among them."""
    config = copy.deepcopy(composed())
    for key, value in (values or {}).items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return a jagged nested tensor."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class FakeQueue:
    """TransferQueue of one partition: columns by name, a read returns those of the selected ones that exist."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.data = tu.list_of_dict_to_tensordict(rows)
        self.selected: list[str] = []
        self.written: dict[str, torch.Tensor] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.selected = list(select_fields)
        return self.data.select(*select_fields, strict=False)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.written = {name: value.to_padded_tensor(0.0) for name, value in fields.items()}
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{}] * len(keys))


# ---- V1 ----------------------------------------------------------------------------------------------------------


def measure_v1() -> dict[str, Any]:
    class Manager:
        rollout_replicas: list[Any] = []
        server_addresses: list[str] = []

        @classmethod
        def create(cls, *args: Any, **kwargs: Any) -> Manager:
            return cls()

        def get_replicas(self) -> list[Any]:
            return []

    config = trainer_config({"actor_rollout_ref.hybrid_engine": False})
    trainer = object.__new__(PPOTrainerSeparateAsync)
    trainer.config, trainer._enable_hybrid_replicas = config, False
    trainer.llm_server_manager, trainer.actor_rollout_wg = Manager(), None
    with (
        replaced(trainer_base.PPOTrainer, _setup=lambda self: None),
        replaced(trainer_separate_async, LLMServerManager=Manager, CheckpointEngineManager=lambda **kwargs: None),
    ):
        result = {"separate_async": outcome(trainer._setup)}
    result["mode"] = getattr(getattr(trainer, "current_mode", None), "value", None)

    class Stub(types.ModuleType):
        """A module of an engine that is not installed: every name in it is an empty class."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    path = "verl.workers.rollout.sglang_rollout.http_server_engine"
    names = ["", ".srt", ".srt.entrypoints", ".srt.entrypoints.EngineBase", ".srt.entrypoints.http_server"]
    names += [".srt.managers", ".srt.managers.io_struct", ".srt.server_args", ".srt.utils"]
    stubs = {f"sglang{name}": Stub(f"sglang{name}") for name in names}
    sys.modules.update(stubs)
    try:
        package = path.rpartition(".")[0]
        sys.modules[package] = types.ModuleType(package)  # its own __init__ wants more of the engine
        sys.modules[package].__path__ = [str(Path(verl.__file__).parent / "workers/rollout/sglang_rollout")]
        engine = importlib.import_module(path)
        engine.logger.setLevel(logging.INFO)  # as VERL_LOGGING_LEVEL=INFO does
        arguments = types.SimpleNamespace(node_rank=1)
        result["sglang"] = outcome(lambda: engine.launch_server_process(arguments, first_rank_in_node=True))
    finally:
        for name in [*stubs, path, package]:
            sys.modules.pop(name, None)
    return result


# ---- V2 ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Model(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 2)
        self.config = types.SimpleNamespace(tie_word_embeddings=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def measure_v2() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.head.bias})  # one parameter stays a plain tensor

    def local(parameter: Any) -> torch.Tensor:
        return getattr(parameter, "_local_tensor", parameter).detach()

    before = {name: local(parameter).clone() for name, parameter in model.named_parameters()}
    saved, spec = fsdp_utils.fsdp2_sharded_save_to_cpu(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    plain = [name for name, (_, saved_spec) in saved.items() if saved_spec is None]

    def largest_change(now: dict[str, torch.Tensor]) -> dict[str, float]:
        change = {name: (now[name] - before[name]).abs().max().item() for name in before}
        return {"sharded": max(v for k, v in change.items() if k not in plain), "plain": change[plain[0]]}

    result = {
        "model_moved": largest_change({name: local(p) for name, p in model.named_parameters()}),
        "snapshot_moved": largest_change({name: value for name, (value, _) in saved.items()}),
    }
    fsdp_utils.fsdp2_sharded_load_from_cpu(model, saved, spec)
    result["restored_error"] = largest_change({name: local(p) for name, p in model.named_parameters()})
    return result


# ---- V3, V14 -----------------------------------------------------------------------------------------------------


def tiny_llama(**kwargs: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        **kwargs,
    )


def forget_trl() -> None:
    for function in ("is_trl_available", "get_trl_value_head_class"):
        if hasattr(import_utils, function):
            getattr(import_utils, function).cache_clear()


@contextlib.contextmanager
def fake_trl(module_name: str | None) -> Any:
    """A `trl` whose value head class is in `module_name`, or (None) no `trl` at all."""
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "trl"}
    for name in saved:
        del sys.modules[name]
    head = type("AutoModelForCausalLMWithValueHead", (nn.Module,), {})
    if module_name is None:
        sys.modules["trl"] = None  # type: ignore[assignment]  # import fails
    else:
        for name in ("trl", "trl.experimental", "trl.experimental.ppo"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules[module_name].AutoModelForCausalLMWithValueHead = head  # type: ignore[attr-defined]
    forget_trl()
    find_spec = importlib.util.find_spec
    found = lambda name, *args: (module_name and object()) if name == "trl" else find_spec(name, *args)
    try:
        with replaced(import_utils.importlib.util, find_spec=found):
            yield head
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "trl"]:
            del sys.modules[name]
        sys.modules.update(saved)
        forget_trl()


def measure_v3() -> dict[str, Any]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama())
    patch = lambda: apply_monkey_patch(model, use_remove_padding=False)
    result: dict[str, Any] = {"trl": importlib.metadata.version("trl"), "installed": outcome(patch)}
    for name in ("trl", "trl.experimental.ppo"):
        with fake_trl(name) as head:
            result[f"class_in_{name}"] = outcome(patch)
            result[f"state_dict_of_{name}"] = "state_dict" in vars(head)
    with fake_trl(None):
        result["without_trl"] = outcome(patch)
    missing = str(OUT / "no_model")
    load = lambda: model_utils.load_valuehead_model(missing, torch.float32, tiny_llama(), False)
    result["load_valuehead_model"] = outcome(load)
    value_model = types.SimpleNamespace(
        named_parameters=lambda: [("pretrained_model.w", None), ("v_head.w", None)], pretrained_model=model
    )
    result["patch_valuehead_model"] = outcome(lambda: model_utils.patch_valuehead_model(value_model))
    result["ignored_on_save"] = getattr(value_model, "_keys_to_ignore_on_save", None)
    return result


def measure_v14() -> dict[str, Any]:
    torch.manual_seed(0)
    path = OUT / "critic"
    LlamaForTokenClassification(tiny_llama(num_labels=1)).save_pretrained(path)
    result = {}
    for name in ("sdpa", "eager"):
        config = LlamaConfig.from_pretrained(path, attn_implementation=name)
        loaded: list[Any] = []
        load = lambda c=config, to=loaded: to.append(
            model_utils.load_valuehead_model(str(path), torch.float32, c, False)
        )
        result[name] = outcome(load)
        result[f"{name}_used"] = loaded[0].config._attn_implementation if loaded else None
    asked: list[str] = []

    class Recorder:
        @staticmethod
        def from_pretrained(attn_implementation: str, **kwargs: Any) -> None:
            asked.append(attn_implementation)

    with replaced(sys.modules["transformers"], AutoModelForTokenClassification=Recorder):
        for config in (tiny_llama(), tiny_llama(attn_implementation="sdpa")):
            model_utils.load_valuehead_model(str(path), torch.float32, config, False)
    result["asked"] = asked
    return result


# ---- V4, V5 ------------------------------------------------------------------------------------------------------

SCORES = [(1.0, 0.2), (0.0, 0.8), (1.0, 0.5), (0.0, 0.1), (1.0, 0.9), (1.0, 0.3)]  # (accuracy, format) per row
MASKS = [[1, 1, 1], [1, 0, 1, 1, 0], [1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1]]  # holes: tokens of a tool


def advantage_rows() -> list[dict[str, Any]]:
    """Six trajectories of two prompts as the agent loop stores them."""
    rows = []
    for i, ((accuracy, layout), mask) in enumerate(zip(SCORES, MASKS, strict=True)):
        rm_scores = torch.zeros(len(mask))
        rm_scores[-1] = accuracy + layout
        log_probs = -0.1 * torch.arange(1.0, len(mask) + 1.0)
        rows.append(
            {
                "uid": f"prompt{i // 3}",
                "response_mask": torch.tensor(mask),
                "rm_scores": rm_scores,
                "old_log_probs": log_probs,
                "rollout_log_probs": log_probs.clone(),
                "values": torch.linspace(0.0, 0.5, len(mask)),
                "extra_fields": {
                    "reward_extra_info": {"accuracy": accuracy, "layout": layout, "score": accuracy + layout},
                    "task": f"task{i}",
                    **({"rare": i} if i == 4 else {}),
                },
            }
        )
    return rows


def advantage_config(estimator: str, **algorithm: Any) -> Any:
    values = {"adv_estimator": estimator, **algorithm}
    return trainer_config({f"algorithm.{key}": value for key, value in values.items()})


GDPO = {"gdpo_reward_keys": ["accuracy", "layout"], "gdpo_reward_weights": [1.0, 0.5]}


def v1_advantages(estimator: str, rows: list[dict[str, Any]], **algorithm: Any) -> FakeQueue:
    """Run the V1 trainer's `_compute_advantage` and return the queue with what was read and written."""
    trainer = object.__new__(PPOTrainerSync)
    trainer.config = advantage_config(estimator, **algorithm)
    queue = FakeQueue(rows)
    keys = [f"{row['uid']}_{i}_0" for i, row in enumerate(rows)]
    with replaced(trainer_base, tq=queue):
        trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys)), {})
    return queue


def v0_batch(rows: list[dict[str, Any]]) -> DataProto:
    """The same trajectories as the legacy trainer holds them: padded, reward components in `non_tensor_batch`."""
    pad = lambda values: torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    lengths = torch.tensor([len(row["response_mask"]) for row in rows])
    attended = (torch.arange(lengths.max()) < lengths[:, None]).long()
    prompts = torch.ones(len(rows), 3, dtype=torch.long)
    rewards = pad([row["rm_scores"] for row in rows])
    tensors = {
        "prompts": prompts,
        "attention_mask": torch.cat([prompts, attended], dim=1),
        "response_mask": pad([row["response_mask"] for row in rows]),
        "token_level_scores": rewards,
        "token_level_rewards": rewards.clone(),
    }
    columns = {key: [row["extra_fields"]["reward_extra_info"][key] for row in rows] for key in ("accuracy", "layout")}
    non_tensors = {key: np.array(value) for key, value in columns.items()}
    non_tensors["uid"] = np.array([row["uid"] for row in rows], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def measure_v4() -> dict[str, Any]:
    rows = advantage_rows()
    config = advantage_config("gdpo", **GDPO).algorithm
    reference = compute_advantage(v0_batch(rows), adv_estimator="gdpo", config=config).batch["advantages"]
    result: dict[str, Any] = {"v0": digest(reference), "v0_values": reference[:, 0].tolist()}
    queues: list[FakeQueue] = []
    result["v1"] = outcome(lambda: queues.append(v1_advantages("gdpo", rows, **GDPO)))
    if queues:
        result["error"] = (queues[0].written["advantages"] - reference).abs().max().item()
    del rows[4]["extra_fields"]["reward_extra_info"]["layout"]
    result["missing_component"] = outcome(lambda: v1_advantages("gdpo", rows, **GDPO))
    result["unknown_component"] = outcome(lambda: v1_advantages("gdpo", rows, gdpo_reward_keys=["nothing"]))
    result["fields"], result["digests"] = {}, {}
    for estimator in ("gae", "grpo", "rloo", "reinforce_plus_plus"):
        queue = v1_advantages(estimator, advantage_rows())
        result["fields"][estimator] = queue.selected
        result["digests"][estimator] = digest(queue.written["advantages"], queue.written["returns"])
    return result


def measure_v5() -> dict[str, Any]:
    seen: dict[str, dict[str, Any]] = {}

    def answer(name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        columns = arguments.get("non_tensor_batch")
        seen[name] = {
            "arguments": sorted(arguments),
            "columns": {} if columns is None else {key: list(value) for key, value in columns.items()},
        }
        rewards = arguments["token_level_rewards"]
        return rewards, rewards

    @core_algos.register_adv_est("declared")
    def declared(token_level_rewards, response_mask, config=None, index=None, non_tensor_batch=None, batch=None):  # type: ignore[no-untyped-def]
        arguments = {"token_level_rewards": token_level_rewards, "non_tensor_batch": non_tensor_batch, "batch": batch}
        return answer("declared", {key: value for key, value in arguments.items() if value is not None})

    @core_algos.register_adv_est("fixed")
    def fixed(token_level_rewards, response_mask, config=None, index=None):  # type: ignore[no-untyped-def]
        return answer("fixed", {"token_level_rewards": token_level_rewards})

    @core_algos.register_adv_est("open_ended")
    def open_ended(token_level_rewards, response_mask, config=None, index=None, **kwargs):  # type: ignore[no-untyped-def]
        return answer("open_ended", {"token_level_rewards": token_level_rewards, **kwargs})

    for name in ("declared", "fixed", "open_ended"):
        queue = v1_advantages(name, advantage_rows())
        seen[name]["fields"] = queue.selected
    declared_in_v1 = seen["declared"]
    rows = advantage_rows()
    compute_advantage(v0_batch(rows), adv_estimator="declared", config=advantage_config("declared").algorithm)
    return {**seen, "declared": declared_in_v1, "legacy": seen["declared"]}


# ---- V6 ----------------------------------------------------------------------------------------------------------


def measure_v6() -> dict[str, Any]:
    """Run `verl/__init__.py` again under each policy, with three installed plugins."""
    for name, entry, body in [
        ("good_plugin", "good", ""),
        ("mixed_case_plugin", "MyPlug", ""),
        ("broken_plugin", "broken", "raise RuntimeError('no such chip')"),
    ]:
        (PLUGINS / f"{name}-1.0.dist-info").mkdir(parents=True)
        (PLUGINS / f"{name}-1.0.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (PLUGINS / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[verl.plugins]\n{entry} = {name}\n")
        (PLUGINS / f"{name}.py").write_text(f"{body}\n")
    modules = {"good_plugin": "good", "mixed_case_plugin": "MyPlug", "broken_plugin": "broken"}
    sys.path.insert(0, str(PLUGINS))
    importlib.invalidate_caches()
    ours = importlib.metadata.entry_points
    only = lambda **kwargs: importlib.metadata.EntryPoints(
        point
        for point in ours(**kwargs)
        if point.value in modules  # no plugin of this environment
    )
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("verl").addHandler(handler)
    result = {}
    try:
        for policy in ("auto", "none", "good", "MyPlug", "myplug,good", "good,absent", "broken"):
            for module in modules:
                sys.modules.pop(module, None)
            records.clear()
            os.environ["VERL_USE_EXTERNAL_PLUGINS"] = policy
            with replaced(importlib.metadata, entry_points=only):
                ended = outcome(lambda: importlib.reload(verl))
            result[policy] = {
                "import": ended,
                "loaded": sorted(entry for module, entry in modules.items() if module in sys.modules),
                "warnings": [
                    f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}".strip()
                    for record in records
                    if record.levelno >= logging.WARNING
                ],
            }
    finally:
        os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
        logging.getLogger("verl").removeHandler(handler)
        sys.path.remove(str(PLUGINS))
    return result


# ---- V7 ----------------------------------------------------------------------------------------------------------


def measure_v7() -> dict[str, Any]:
    worker_class = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 1, "val_kwargs": {"n": 1}}}})
    status: list[str] = []
    stored: list[TensorDict] = []

    class Queue:
        async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
            status.append(tag["status"])

        async def async_kv_batch_put(self, fields: TensorDict, **kwargs: Any) -> None:
            stored.append(fields)

    def output(tokens: list[int], **kwargs: Any) -> AgentLoopOutput:
        metrics = AgentLoopMetrics()
        return AgentLoopOutput(
            prompt_ids=[1, 2], response_ids=tokens, response_mask=[1] * len(tokens), metrics=metrics, **kwargs
        )

    def run(outputs: list[AgentLoopOutput]) -> dict[str, Any]:
        worker = object.__new__(worker_class)
        worker.config, worker.processor, worker.distillation_enabled = config, None, False
        worker.reward_loop_worker_handles = ["unused"]
        status.clear()
        stored.clear()

        async def session(sampling_params: Any, trajectory: Any, trace: bool, session_id: int, **prompt: Any) -> None:
            kwargs = {**prompt, "session_id": session_id, "global_steps": 1}
            await worker._agent_loop_postprocess(outputs, False, **kwargs)

        worker._run_agent_loop = session
        logging.getLogger(agent_loop_tq.__name__).setLevel(logging.CRITICAL)
        with replaced(agent_loop_tq, tq=Queue()):
            asyncio.run(worker._run_prompt({"uid": "a"}, {}, {"validate": False}))
        rows = stored[0] if stored else None
        return {
            "status": status[-1],
            "rewards": [] if rows is None else [row.sum().item() for row in rows["rm_scores"].unbind()],
            "extra": []
            if rows is None
            else [row.get("reward_extra_info") for row in rows.get("extra_fields").tolist()],
        }

    info = {"reward_extra_info": {"acc": 1.0}}
    return {
        "own_reward": run([output([3]), output([4, 5], reward_score=0.5)]),
        "own_reward_and_info": run([output([3]), output([4, 5], reward_score=0.5, extra_fields=info)]),
    }


# ---- V8 ----------------------------------------------------------------------------------------------------------


def measure_v8() -> dict[str, Any]:
    vanilla = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    other = lambda *args, **kwargs: None
    result = {"again": outcome(lambda: core_algos.register_policy_loss("vanilla")(vanilla))}
    result["policy_loss"] = outcome(lambda: core_algos.register_policy_loss("vanilla")(other))
    result["vanilla_is_kept"] = core_algos.POLICY_LOSS_REGISTRY["vanilla"] is vanilla
    core_algos.POLICY_LOSS_REGISTRY["vanilla"] = vanilla
    core_algos.POLICY_LOSS_REGISTRY.pop("new", None)
    result["new_policy_loss"] = outcome(lambda: core_algos.register_policy_loss("new")(other))

    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

    registry = agent_loop._agent_loop_registry
    entry = dict(registry["single_turn_agent"])
    loop = type("OtherLoop", (AgentLoopBase,), {})
    register = lambda cls: lambda: agent_loop.register("single_turn_agent")(cls)
    result["agent_loop_again"] = outcome(register(SingleTurnAgentLoop))
    result["agent_loop"] = outcome(register(loop))
    result["agent_loop_is_kept"] = dict(registry["single_turn_agent"]) == entry
    registry["single_turn_agent"] = entry
    result["new_agent_loop"] = outcome(lambda: agent_loop.register("new_agent")(loop))
    result["unknown_estimator"] = outcome(lambda: core_algos.get_adv_estimator_fn("nothing"))
    return result


# ---- V9, V11 -----------------------------------------------------------------------------------------------------

SEPARATE = {
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
}


def measure_v9() -> dict[str, Any]:
    @register_trainer("my_sync")
    class MySync(PPOTrainerSync):
        pass

    @register_trainer("my_separate_async")
    class MySeparateAsync(PPOTrainerSeparateAsync):
        pass

    @register_trainer("my_colocate_async")
    class MyColocateAsync(PPOTrainerColocateAsync):
        pass

    methods = {name: getattr(PPOTrainerSync, name) for name in trainer_base.PPOTrainer.__abstractmethods__}
    own_base = register_trainer("own_base")(type("OwnBase", (trainer_base.PPOTrainer,), methods))

    def built(cls: type, name: str, **section: Any) -> dict[str, Any]:
        """Build a trainer; `section` goes to the part of the configuration under its name."""
        own = {f"trainer.v1.{name}.{key}": value for key, value in section.items()}
        config = trainer_config({**SEPARATE, "trainer.v1.trainer_mode": name, **own})
        trainer = cls(config)
        given = trainer.replay_buffer.trainer_config
        return {
            "mode": trainer.trainer_mode,
            "parameter_sync_step": trainer.parameter_sync_step,
            "replay_buffer": type(trainer.replay_buffer).__name__,
            "rollout_skip": RolloutTqSkip(config.skip.rollout_tq, config).parameter_sync_step,
            "section": OmegaConf.to_container(given) if OmegaConf.is_config(given) else dict(given),
        }

    return {
        "sync": built(PPOTrainerSync, "sync"),
        "colocate_async": built(PPOTrainerColocateAsync, "colocate_async"),
        "separate_async": built(PPOTrainerSeparateAsync, "separate_async"),
        "my_sync": built(MySync, "my_sync"),
        "my_colocate_async": built(MyColocateAsync, "my_colocate_async"),
        "my_separate_async": built(MySeparateAsync, "my_separate_async"),
        "own_section": built(MySeparateAsync, "my_separate_async", num_warmup_batches=3, mine=7),
        "own_base": built(own_base, "own_base"),
    }


class InheritedSampler(ReplayBuffer):
    """A custom sampler with verl's constructor."""


class PassingSampler(ReplayBuffer):
    """A custom sampler that sets its own interval and passes on the rest."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=0.5, **kwargs)


def measure_v11() -> dict[str, Any]:
    def waited(config: Any) -> list[float]:
        """Seconds the sampler of this configuration sleeps between two polls."""
        slept: list[float] = []
        clock = types.SimpleNamespace(time=time.time, sleep=slept.append, perf_counter=time.perf_counter)
        buffer = PPOTrainerSync(config).replay_buffer
        with replaced(replay_buffer, time=clock):
            buffer._wait_for_next_poll("train", time.time())
        return slept

    def faster(sampler: str | None = None) -> Any:
        values: dict[str, Any] = {"trainer.v1.sampler.poll_interval": 0.05}
        if sampler is not None:
            values["trainer.v1.sampler.custom_sampler"] = {"path": str(Path(__file__).resolve()), "name": sampler}
        return trainer_config(values)

    older = trainer_config()
    with open_dict(older):
        older.trainer.v1.sampler.pop("poll_interval", None)
    module = lambda path, name: globals()[name]  # this file, without running it again
    with replaced(trainer_base, load_extern_type=module):
        return {
            "key": OmegaConf.select(trainer_config(), "trainer.v1.sampler.poll_interval"),
            "default": waited(trainer_config()),
            "without_key": waited(older),
            "faster": waited(faster()),
            "inherited": waited(faster("InheritedSampler")),
            "passing": waited(faster("PassingSampler")),
        }


# ---- V12 ---------------------------------------------------------------------------------------------------------


def loss_batch() -> tuple[dict[str, torch.Tensor], TensorDict, list[torch.Tensor]]:
    """Model output and batch of three sequences, as the engine hands them to `ppo_loss`."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4]
    rows = lambda: [torch.randn(n, generator=generator) * 0.1 for n in lengths]
    prompts = [torch.ones(2, dtype=torch.long) for _ in lengths]
    responses = [torch.ones(n, dtype=torch.long) for n in lengths]
    weights = [torch.arange(1.0, n + 1.0) for n in lengths]
    log_probs = nested([torch.randn(2 + n, generator=generator) * 0.1 for n in lengths])
    data = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(responses),
            "response_mask": nested(responses),
            "old_log_probs": nested(rows()),
            "advantages": nested(rows()),
            "token_weight": nested(weights),
        },
        batch_size=len(lengths),
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=sum(lengths), global_batch_size=len(lengths))
    return {"log_probs": log_probs}, data, weights


def measure_v12() -> dict[str, Any]:
    calls: list[dict[str, Any]] = []

    @core_algos.register_policy_loss("recorded")
    def recorded(token_weight: torch.Tensor | None = None, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        calls.append({**kwargs, **({} if token_weight is None else {"token_weight": token_weight})})
        loss, metrics = core_algos.compute_policy_loss_vanilla(**kwargs)
        return loss if token_weight is None else loss * token_weight.sum(), metrics

    def loss(mode: str, extra_fields: list[str] | None = None) -> float:
        policy_loss: dict[str, Any] = {"loss_mode": mode}
        if extra_fields is not None:
            policy_loss["extra_fields"] = extra_fields
        values = {f"policy_loss.{key}": value for key, value in policy_loss.items()} | {
            "ppo_micro_batch_size_per_gpu": 1
        }
        config = trainer_config({f"actor_rollout_ref.actor.{key}": value for key, value in values.items()})
        actor_config: ActorConfig = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        model_output, data, _ = loss_batch()
        return float(ppo_loss(actor_config, model_output, data)[0])

    result: dict[str, Any] = {"vanilla": loss("vanilla"), "recorded": loss("recorded")}
    result["arguments"] = sorted(calls[-1])
    values: list[float] = []
    calls.clear()
    result["weighted"] = outcome(lambda: values.append(loss("recorded", ["token_weight"])))
    result["weighted_loss"] = values
    if calls:
        weight, mask = calls[-1]["token_weight"], calls[-1]["response_mask"]
        expected = torch.nn.utils.rnn.pad_sequence(loss_batch()[2], batch_first=True)
        result["weight_arrived"] = torch.equal(weight, expected) and weight.shape == mask.shape
        result["weighted_arguments"] = sorted(calls[-1])
    result["unknown"] = outcome(lambda: loss("recorded", ["nothing"]))
    return result


# ---- V13 ---------------------------------------------------------------------------------------------------------


def measure_v13_process_group() -> dict[str, Any]:
    """Leaves a gloo process group of one process behind, which the other measurements use."""
    result: dict[str, Any] = {}
    backends: list[str] = []
    record = lambda backend, **kwargs: backends.append(backend)
    with replaced(torch.distributed, init_process_group=record):
        with replaced(distributed, get_device_name=lambda: "cuda", get_nccl_backend=lambda: "nccl"):
            distributed.initialize_global_process_group()
            distributed.initialize_global_process_group_ray()
        distributed.initialize_global_process_group_ray(backend="mine")
    result["cuda_backends"] = backends
    for name in ("initialize_global_process_group", "initialize_global_process_group_ray"):
        ranks = "" if name.endswith("_ray") else "?rank=0&world_size=1"  # that one gives them itself
        os.environ["DIST_INIT_METHOD"] = f"file://{OUT.resolve() / name}{ranks}"
        result[name] = outcome(getattr(distributed, name))
        if torch.distributed.is_initialized():
            result[f"{name}_backend"] = torch.distributed.get_backend_config()
            distributed.destroy_global_process_group()
    os.environ["DIST_INIT_METHOD"] = f"file://{OUT.resolve() / 'group'}"
    distributed.initialize_global_process_group_ray(backend="cpu:gloo")
    return result


def measure_v13() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("language_model", "value_model"):
        for backend in ("fsdp", "fsdp2"):
            result[f"{name}_{backend}"] = outcome(lambda n=name, b=backend: EngineRegistry.get_engine_cls(n, b))
    devices = EngineRegistry._engines["language_model"]["fsdp2"]
    result["devices"] = sorted(key for key in devices if isinstance(key, str))
    for case, settings in {
        "reference": {"forward_only": True},
        "offload": {"offload_policy": True},
        "plain": {},
    }.items():
        engine = object.__new__(FSDPEngineWithLMHead)
        engine.engine_config = FSDPEngineConfig(
            strategy="fsdp2", mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"}, **settings
        )
        engine.device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        engine.model_config = types.SimpleNamespace(enable_activation_offload=False, lora_rank=0)
        built: list[Any] = []
        torch.manual_seed(0)
        model = Model()
        expected = model(torch.ones(1, 4)).detach()

        def build(engine: Any = engine, model: Any = model, built: list[Any] = built) -> None:
            built.append(engine._build_fsdp_module(model)(torch.ones(1, 4)).detach())

        result[case] = outcome(build)
        result[f"{case}_same_output"] = bool(built) and torch.allclose(built[0], expected)
    pinned: list[bool] = []

    class Stop(Exception):
        pass

    def policy(pin_memory: bool) -> None:
        pinned.append(pin_memory)
        raise Stop

    with replaced(transformer_impl, CPUOffloadPolicy=policy, get_device_name=lambda: "cuda"):
        engine.engine_config = FSDPEngineConfig(strategy="fsdp2", forward_only=True)
        outcome(lambda: engine._build_fsdp_module(Model()))
    result["pinned_on_cuda"] = pinned
    return result


# ---- V17 ---------------------------------------------------------------------------------------------------------


def measure_v17() -> dict[str, Any]:
    """What the resuming client says of attempts of the versions 2, 3 (without a token) and 5."""
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import TokenOutput

    script = [(2, [7, 8], "aborted"), (3, [], "aborted"), (5, [9], "completed")]

    async def attempt(self: Any, **kwargs: Any) -> Any:
        version, tokens, reason = script.pop(0)
        fields = {"global_steps": version, "top": [[t] for t in tokens], "server": f"s{version}"}
        return TokenOutput(token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason=reason, extra_fields=fields)

    async def at_once(seconds: float) -> None: ...

    client = llm_server.FullyAsyncLLMServerClient(types.SimpleNamespace())
    asks = {"request_id": "a", "prompt_ids": [1], "sampling_params": {"max_tokens": 9}}
    with replaced(llm_server.LLMServerClient, generate=attempt), replaced(asyncio, sleep=at_once):
        output = asyncio.run(client.generate(**asks))
    return {"tokens": output.token_ids, "fields": output.extra_fields}


# ---- configuration -----------------------------------------------------------------------------------------------


def measure_config() -> dict[str, Any]:
    """The default configuration, and whether the generated reference files agree with it."""
    folder = Path(verl.__file__).parent / "trainer" / "config"
    current = {}
    for engine in ("", "megatron", "veomni", "torchtitan"):
        name = f"_generated_ppo_{engine + '_' if engine else ''}trainer.yaml"
        expected = OmegaConf.to_container(composed(*([f"model_engine={engine}"] if engine else [])), resolve=False)
        expected.pop("model_engine")  # the generated files start below it
        generated = OmegaConf.to_container(OmegaConf.load(folder / name), resolve=False)
        current[name] = json.dumps(generated) == json.dumps(expected)  # the order, too
    return {"generated_is_current": current, "default": OmegaConf.to_container(trainer_config(), resolve=False)}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    results: dict[str, Any] = {"host": str(Path(verl.__file__).resolve()), "tensordict": tensordict.__version__}
    results["V13_PROCESS_GROUP"] = measure_v13_process_group()
    measures = [measure_v1, measure_v2, measure_v3, measure_v4, measure_v5, measure_v7, measure_v8, measure_v9]
    measures += [measure_v11, measure_v12, measure_v13, measure_v14, measure_v17, measure_config, measure_v6]
    for measure in measures:
        start = time.perf_counter()
        results[measure.__name__.removeprefix("measure_").upper()] = measure()
        print(f"{measure.__name__} {time.perf_counter() - start:.1f} s", file=sys.stderr)
    torch.distributed.destroy_process_group()
    (OUT / "results.json").write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
