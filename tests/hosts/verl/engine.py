"""verl's real TrainingWorker (FSDP2 engine, `ppo_loss`) in processes of its own, without Ray.

Each rank is one process on verl's CPU platform. A test describes optimizer steps as a `Case`, every rank trains its
part of the rows, and gradients, weights and metrics come back as plain tensors. The environment and torch.distributed
of the test process stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import pickle
import sys
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
TIMEOUT = 120.0
MAX_LENGTH = 14
EOS = 1


# ---- what a test describes


@dataclass(frozen=True)
class Row:
    """One row of a batch; everything but the prompt and the numbers per row is (response length,)."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor
    rollout: Tensor
    ref: Tensor
    weight: Tensor
    group: int = 0
    real: int = 1
    row_columns: dict[str, float] = field(default_factory=dict)
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    versions: Tensor | None = None

    def but(self, **changes: Any) -> Row:
        return dataclasses.replace(self, **changes)


def padding(like: Row, prompt: int = 20) -> Row:
    """What verl adds to fill a batch, after `clean_padding`: one token, zero in every column."""
    zero = torch.zeros(1)
    return Row(
        prompt=torch.full((prompt,), EOS),
        response=torch.full((1,), EOS),
        mask=torch.zeros(1, dtype=torch.int64),
        **dict.fromkeys(("advantages", "old", "rollout", "ref", "weight"), zero),
        real=0,
        row_columns=dict.fromkeys(like.row_columns, 0.0),
        token_columns=dict.fromkeys(like.token_columns, zero),
    )


@dataclass(frozen=True)
class Case:
    """Optimizer steps on a batch.

    Args:
        rows: of all ranks, step after step.
        methods: None: verl's own loss function.
        actor: options of verl's actor.
        micro: rows of a micro-batch; tokens: of a micro-batch of dynamic size instead.
        steps: optimizer steps the batch is cut into.
        weighted: give verl `rollout_is_weights`.
        marked: give the batch the columns of rl_plugins/verl/batch.py.
        published: newest weights when it is trained.
    """

    rows: list[Row]
    methods: tuple[str, ...] | None = None
    params: dict[str, dict[str, Any]] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    micro: int = 4
    tokens: int | None = None
    steps: int = 1
    epochs: int = 1
    optimizer: str = "SGD"
    lr: float = 0.1
    entropy: bool = False
    temperature: float = 1.0
    weighted: bool = False
    marked: bool = True
    published: int = 0

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def part(self, rank: int, ranks: int) -> Case:
        """The rows of one rank: its share of every optimizer step."""
        size = len(self.rows) // self.steps
        share = size // ranks
        assert share * ranks * self.steps == len(self.rows), "steps and ranks must divide the rows"
        first = [s * size + rank * share for s in range(self.steps)]
        return self.but(rows=[row for i in first for row in self.rows[i : i + share]])


@dataclass(frozen=True)
class Result:
    """What came out on one rank.

    Args:
        gradients: before clipping, whole and flat, one per optimizer step that was made.
        weights: afterwards, whole and flat.
        rates: learning rate of each step; rate: of the optimizer afterwards.
        metrics: as verl's trainer reduces them. methods: what `take_metrics` took out of them.
        losses: (per optimizer step) of the micro-batches.
        seen: what probes put into `loss_probes.SEEN`.
        steps_since: optimizer steps since the newest publication.
    """

    gradients: list[Tensor]
    weights: Tensor
    rates: list[float]
    rate: float
    metrics: dict[str, Any]
    methods: dict[str, float]
    losses: list[list[float]]
    seen: list[Any]
    steps_since: int | None


class Engine:
    """Ranks that are ready to train, each in its process."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self.ranks = ranks
        self.processes, self.pipes = [], []
        store = folder / f"store-{uuid.uuid4().hex}"
        for rank in range(ranks):
            pipe, other = context.Pipe()
            process = context.Process(target=_serve, args=(other, str(folder), str(store), rank, ranks), daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)

    def train(self, case: Case) -> Result:
        """The result of the first rank."""
        return self.train_all(case)[0]

    def train_all(self, case: Case) -> list[Result]:
        """The results of all ranks."""
        return self.call("train", *[[case.part(rank, self.ranks)] for rank in range(self.ranks)])

    def call(self, name: str, *arguments: list[Any]) -> list[Any]:
        """Calls a method of `_Host` on every rank, with arguments of its own.

        Raises:
            what a rank raised.
        """
        for pipe, mine in zip(self.pipes, arguments or [[]] * self.ranks, strict=True):
            pipe.send_bytes(pickle.dumps((name, mine)))
        answers = []
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            if not pipe.poll(TIMEOUT):
                raise TimeoutError(f"rank {rank} (pid {process.pid}) did not answer within {TIMEOUT:.0f} s")
            answer, error = pickle.loads(pipe.recv_bytes())
            if error is not None:
                raise error
            answers.append(answer)
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(10)


# ---- what runs in the processes


def _serve(pipe: Any, folder: str, store: str, rank: int, ranks: int) -> None:
    os.environ.update(
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_PLUGINS="rl_plugins",
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",  # not used: the ranks meet in a file
        DIST_INIT_METHOD=f"file://{store}",
        GLOO_SOCKET_IFNAME="lo",
        WG_BACKEND="ray",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    torch.set_num_threads(1)
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "trl")]
    host: Any
    try:
        host = _Host(folder)
    except Exception as e:
        traceback.print_exc()
        host = e
    while True:
        try:
            name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if isinstance(host, Exception):
                raise host
            answer = (getattr(host, name)(*arguments), None)
        except Exception as e:
            traceback.print_exc()
            answer = (None, e)
        pipe.send_bytes(pickle.dumps(answer))


class _Host:
    """verl's worker in one process."""

    def __init__(self, folder: str) -> None:
        import loss_probes
        import probes  # those of the TRL tests
        import verl  # noqa: F401

        import rl_plugins.verl.plugin  # noqa: F401  the entry point; a stale egg-info beside the sources would hide it

        probes.register()
        loss_probes.register()
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine.base import BaseEngine
        from verl.workers.engine_workers import TrainingWorker

        from rl_plugins.verl.config import compose

        self.host_train_batch = BaseEngine.train_batch
        model = "actor_rollout_ref.model"
        actor = "actor_rollout_ref.actor"
        self.config = compose(
            [
                f"{model}.path={folder}/policy",
                f"{model}.use_remove_padding=False",
                f"{model}.enable_gradient_checkpointing=False",
                f"+{model}.override_config.attn_implementation=sdpa",
                "actor_rollout_ref.rollout.name=hf_cpu",
                f"{actor}.strategy=fsdp2",
                f"{actor}.ppo_micro_batch_size_per_gpu=4",
                f"{actor}.fsdp_config.use_torch_compile=False",
                f"+{actor}.fsdp_config.mixed_precision.param_dtype=fp32",
                f"{actor}.optim.total_training_steps=100",
                f"{actor}.optim.clip_grad=1e9",
                f"data.max_response_length={MAX_LENGTH}",
            ]
        )
        self.actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor.model_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=self.actor.model_config,
                engine_config=self.actor.engine,
                optimizer_config=self.actor.optim,
                checkpoint_config=self.actor.checkpoint,
                profiler_config=None,
            )
        )
        self.worker.reset()
        self.engine = self.worker.engine
        self.start = [p.detach().clone() for p in self.engine.module.parameters()]
        self.gradients: list[Tensor] = []
        self.rates: list[float] = []
        self._spy_on_steps()

    def _spy_on_steps(self) -> None:
        step = self.engine.optimizer_step

        def optimizer_step() -> Any:
            self.gradients.append(_flat(p.grad for p in self.engine.module.parameters()))
            self.rates.append(self.engine.optimizer.param_groups[0]["lr"])
            return step()

        self.engine.optimizer_step = optimizer_step

    def kind(self) -> str:
        """Of the module that is trained, with the kind of its first parameter."""
        return f"{type(self.engine.module).__name__} {type(self.start[0]).__name__}"

    def train(self, case: Case) -> Result:
        """From the initial weights, with a new optimizer."""
        import loss_probes
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import reduce_metrics
        from verl.utils.py_functional import rename_dict

        from rl_plugins.verl.loss import PUBLISHED, STEPS, take_metrics, take_steps

        self._reset(case)
        data = _batch(case)
        tu.assign_non_tensor(
            data,
            global_batch_size=len(case.rows) // case.steps * torch.distributed.get_world_size(),
            num_mini_batch=case.steps,
            epochs=case.epochs,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            temperature=case.temperature,
            calculate_entropy=case.entropy,
            compute_loss=True,
            **{PUBLISHED: case.published},
        )
        output = self.worker.train_mini_batch(data)
        metrics = reduce_metrics(rename_dict(tu.get(output, "metrics"), "actor/"))
        return Result(
            gradients=list(self.gradients),
            weights=_flat(self.engine.module.parameters()),
            rates=list(self.rates),
            rate=self.engine.optimizer.param_groups[0]["lr"],
            methods=take_metrics(metrics),
            steps_since=take_steps(metrics) if f"actor/{STEPS}" in metrics else None,
            metrics=metrics,
            losses=list(self.losses),
            seen=loss_probes.take(),
        )

    def read_by_teacher(
        self, responses: list[Tensor], prompts: list[list[int] | None], micro: int, temperature: float, teacher: str
    ) -> list[Tensor]:
        """(response,) log-probs of each row under another prompt, by the policy or by the model in a folder."""
        from types import SimpleNamespace

        from memory_queue import MemoryQueue
        from transfer_queue import KVBatchMeta
        from verl.utils import tensordict_utils as tu

        from rl_plugins.verl import TEACHER_VARIABLE, batch
        from rl_plugins.verl import teacher as module
        from rl_plugins.verl.plugin import teacher_as_reference
        from rl_plugins.verl.rows import TOKEN_COLUMNS

        worker = self.worker
        self._restart()
        if teacher:
            os.environ[TEACHER_VARIABLE] = teacher
            cls = type("ActorRolloutRefWorker", (), {"ref_worker_cls": type(worker)})
            teacher_as_reference(SimpleNamespace(ActorRolloutRefWorker=cls))
            worker = cls().ref_worker_cls(config=worker.config)
            worker.reset()
        worker.engine_config.use_dynamic_bsz = False
        worker.engine_config.infer_micro_batch_size_per_gpu = micro
        batch.tq = module.tq = queue = MemoryQueue()
        keys = [f"row{i}" for i in range(len(responses))]
        queue.put_rows({key: {"responses": response} for key, response in zip(keys, responses, strict=True)})

        def compute(made: Any) -> None:
            data = queue.kv_batch_get(made.keys)
            tu.assign_non_tensor(data, **made.extra_info)
            queue.kv_batch_put(made.keys, fields=worker.infer_batch(data).select("log_probs"))

        rows = KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys), extra_info={})
        told = dict(zip(keys, prompts, strict=True))
        module.read_by_teacher(rows, told, list, compute, temperature, micro)
        return [queue.rows[key][TOKEN_COLUMNS["teacher_logprobs"]] for key in keys]

    def _restart(self) -> None:
        """The weights of the start."""
        with torch.no_grad():
            for p, start in zip(self.engine.module.parameters(), self.start, strict=True):
                p.copy_(start)

    def _reset(self, case: Case) -> None:
        import loss_probes
        from verl.workers.config.optimizer import build_optimizer

        self._restart()
        optim = dataclasses.replace(self.actor.optim, optimizer=case.optimizer, lr=case.lr)
        self.engine.optimizer = build_optimizer(self.engine.module.parameters(), optim)
        self.engine.lr_scheduler = self.engine._build_lr_scheduler(self.engine.optimizer)
        options = self.worker.engine_config
        options.use_dynamic_bsz = case.tokens is not None
        options.max_token_len_per_gpu = case.tokens or 10_000
        options.micro_batch_size_per_gpu = case.micro
        self.gradients.clear()
        self.rates.clear()
        self.losses: list[list[float]] = []
        loss_probes.take()
        self.worker.set_loss_fn(self.loss(case))
        forward = type(self.engine).forward_backward_batch

        def forward_backward_batch(data: Any, loss_function: Any, forward_only: bool = False) -> Any:
            output = forward(self.engine, data, loss_function, forward_only)
            if not forward_only:
                self.losses.append(list(output["loss"]))
            return output

        self.engine.forward_backward_batch = forward_backward_batch

    def loss(self, case: Case) -> Any:
        """The loss function as it arrives in a worker: through pickle."""
        from verl.workers.utils.losses import ppo_loss

        from rl_plugins.verl.config import Settings
        from rl_plugins.verl.loss import MethodsLoss

        actor = dataclasses.replace(self.actor, global_batch_info={}, **case.actor)
        if case.methods is None:
            return functools.partial(ppo_loss, config=actor)
        return pickle.loads(pickle.dumps(MethodsLoss(actor, Settings(case.methods, case.params), self.config)))

    def wrap(self, case: Case) -> dict[str, Any]:
        """What `wrap_train_batch` did to verl: once installed it stays, and it lets other loss functions through."""
        from verl.workers.engine.base import BaseEngine

        BaseEngine.train_batch = self.host_train_batch
        without = self.train(case.but(methods=None))
        self.loss(case.but(methods=()))
        first = BaseEngine.train_batch
        self.loss(case.but(methods=()))
        again = BaseEngine.train_batch
        beside = self.train(case.but(methods=None))
        return {
            "replaced": first is not self.host_train_batch,
            "once": first is again,
            "without": without,
            "beside": beside,
        }

    def pickled(self, case: Case) -> dict[str, Any]:
        """What a loss function that has been used carries to the workers, and what the copy starts with."""
        from rl_plugins.verl.config import Settings
        from rl_plugins.verl.loss import MethodsLoss

        used = MethodsLoss(self.actor, Settings(case.methods or (), case.params), self.config)
        for m in used.stack.methods:
            m.state = {"secret": "x" * 100}
            m.log("left", 1.0)
        used.stack.batch = 7
        text = pickle.dumps(used)
        copy = pickle.loads(text)
        return {
            "keys": sorted(used.__getstate__()),
            "secret": b"secret" in text,
            "names": copy.stack.names,
            "params": [dataclasses.asdict(m.params) for m in copy.stack.methods],
            "state": [dict(m.state) for m in copy.stack.methods],
            "step": copy.stack.batch,
            "metrics": copy.stack.metrics.take(),
            "max_length": copy.max_length,
        }


def _batch(case: Case) -> Any:
    """The rows as TransferQueue hands them to a worker: every column ragged."""
    from tensordict import TensorDict

    from rl_plugins.verl.rows import GROUP, REAL, ROW_COLUMN, ROW_VERSIONS, TOKEN_COLUMN, TOKEN_VERSION

    rows = case.rows

    def ragged(values: list[Any]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    ids = [torch.cat([r.prompt, r.response]) for r in rows]
    columns = {
        "prompts": [r.prompt for r in rows],
        "responses": [r.response for r in rows],
        "input_ids": ids,
        "position_ids": [torch.arange(len(x)) for x in ids],
        "response_mask": [r.mask for r in rows],
        "loss_mask": [r.mask for r in rows],
        "advantages": [r.advantages for r in rows],
        "old_log_probs": [r.old for r in rows],
        "rollout_log_probs": [r.rollout for r in rows],
        "ref_log_prob": [r.ref for r in rows],
    }
    if case.weighted:
        columns["rollout_is_weights"] = [r.weight for r in rows]
    if case.marked:
        columns[REAL] = [torch.tensor([float(r.real)]) for r in rows]
        columns[GROUP] = [torch.tensor([float(r.group)]) for r in rows]
        versions = [torch.zeros_like(r.mask) if r.versions is None else r.versions for r in rows]
        columns[TOKEN_VERSION] = versions
        columns[ROW_VERSIONS["version"]] = [v.min()[None].float() for v in versions]
        columns[ROW_VERSIONS["newest_version"]] = [v.max()[None].float() for v in versions]
        for name in rows[0].row_columns:
            columns[ROW_COLUMN + name] = [torch.tensor([r.row_columns[name]]) for r in rows]
        for name in rows[0].token_columns:
            columns[TOKEN_COLUMN + name] = [r.token_columns[name] for r in rows]
    return TensorDict({name: ragged(values) for name, values in columns.items()}, batch_size=len(rows))


def _flat(tensors: Any) -> Tensor:
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole]).clone()
