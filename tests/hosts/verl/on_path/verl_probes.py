"""On PYTHONPATH of the real runs: a trainer that takes another stack of methods every step and writes down what it saw.

Loaded through verl's own entry point group, like any plugin; the methods come from tests/hosts/trl/probes.py and from
here through the entry point group `rl_plugins.methods`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rl_plugins.core.rollouts import Completion, PlanRow
from rl_plugins.verl.imports import after_import

OUT = Path(os.environ.get("RL_PLUGINS_TEST_OUT", "."))
# Every step of a carousel begins as the first one did: weights, optimizer, prompts of the loader, noise of the sampler.
SAME = "RL_PLUGINS_TEST_SAME" in os.environ
kept: dict[str, Any] = {}  # of a training worker: its engine and the weights it began with


def note(kind: str, **values: object) -> None:
    """One line per event, from any process."""
    with (OUT / "events.jsonl").open("a") as f:
        f.write(json.dumps({"kind": kind, "pid": os.getpid(), "t": time.time(), **values}) + "\n")


def _carousel(module: object) -> None:
    import dataclasses

    import torch
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import register_trainer
    from verl.utils.config import omega_conf_to_dataclass

    from rl_plugins.verl import loss, trainer
    from rl_plugins.verl.capabilities import Reader
    from rl_plugins.verl.config import chat_of
    from rl_plugins.verl.processes import ask
    from rl_plugins.verl.rewards import with_reward_functions

    def waiting_prompts() -> dict:
        """Groups that were begun and are not trained yet, with their tags."""
        keys = (tq.kv_list("train") or {}).get("train", {})
        return {key: tag for key, tag in keys.items() if tag.get("is_prompt")}

    def watch(cls: type) -> type:
        """Writes what a step decided."""

        class Watched(cls):
            def on_init_end(self):
                self.replay_buffer.poll_interval = 0.05  # stock two seconds
                super().on_init_end()

            def on_step_begin(self):
                note("step", step=self.global_steps)
                super().on_step_begin()

            def _next_train_batch(self, num_prompts=None):
                down = str(self.global_steps) in os.environ.get("RL_PLUGINS_TEST_OUTAGE", "").split(",")
                (OUT / "outage").touch() if down else (OUT / "outage").unlink(missing_ok=True)
                batch = super()._next_train_batch(num_prompts)
                note(
                    "plan",
                    step=self.global_steps,
                    prompts=[r.prompt_index for r in self._submitted.values()],
                    groups=[str(uid) for uid in batch["uid"]],
                )
                return batch

            def on_sample_begin(self):
                """With RL_PLUGINS_TEST_SETTLED every group that was begun is complete before weights are published: as
                in a run whose generation is faster than its training, on a machine of any speed."""
                while os.environ.get("RL_PLUGINS_TEST_SETTLED") and any(
                    tag.get("status") in ("pending", "running") for tag in waiting_prompts().values()
                ):
                    time.sleep(0.1)
                super().on_sample_begin()

            def _sample(self, global_steps, partition_id, batch_size):
                batch, metrics = super()._sample(global_steps, partition_id, batch_size)
                groups = [key.split("_")[0] for key in batch.keys]
                note("sampled", step=global_steps, groups=groups)
                return batch, metrics

            def _compute_advantage(self, batch, metrics):
                result = super()._compute_advantage(batch, metrics)
                if self._decided is not None:
                    d = self._decided.decision
                    torch.save(
                        {
                            "names": self.methods.names,
                            "decision": d,
                            "batch_rows": len(result),
                            "padding": sum(bool(t.get("is_padding")) for t in result.tags),
                            "meta": dict(d.rollouts.meta),
                        },
                        OUT / f"step{self.global_steps}.{len(list(OUT.glob('step*.pt')))}.pt",
                    )
                    note(
                        "decided",
                        step=self.global_steps,
                        methods=self.methods.names,
                        prompts=d.rollouts.prompt_index.tolist(),
                        rewards=d.rollouts.reward.tolist(),
                        advantages=[round(x, 6) for x in d.row_advantages.tolist()],
                    )
                return result

            def _save_checkpoint(self):
                if os.environ.get("RL_PLUGINS_TEST_HOLD") == str(
                    self.global_steps
                ):  # in the middle, to be killed there
                    workers = self.actor_rollout_wg
                    save = workers.save_checkpoint

                    def held(*args, **kwargs):
                        save(*args, **kwargs)
                        note("saving", step=self.global_steps)
                        time.sleep(600)

                    workers.save_checkpoint = held
                super()._save_checkpoint()
                note("saved", step=self.global_steps, waiting=[*waiting_prompts()])

            def step(self, metrics, timing_raw):
                batch = super().step(metrics, timing_raw)
                note("stepped", step=self.global_steps, metrics={k: float(v) for k, v in metrics.items() if _number(v)})
                return batch

            def _compute_metrics(self, batch, metrics, *args, **kwargs):
                super()._compute_metrics(batch, metrics, *args, **kwargs)
                found = {k: float(v) for k, v in metrics.items() if "off_policy" in k}
                note("measured", step=self.global_steps, metrics=found)

            def on_validate_begin(self):
                note("validation", step=self.global_steps)
                super().on_validate_begin()

            def on_step_end(self):
                super().on_step_end()
                time.sleep(float(os.environ.get("RL_PLUGINS_TEST_SLOW", "0")))

        Watched.__qualname__ = Watched.__name__ = f"Watched{cls.__name__}"
        return Watched

    for name in ("sync", "colocate_async", "separate_async"):
        register_trainer(f"watched_{name}")(watch(trainer.TRAINERS[f"rl_plugins_{name}"]))

    class Carousel(watch(trainer.MethodsSync)):
        def __init__(self, config):
            super().__init__(config)
            self._places, known = [], {}  # a place that comes again goes on with its state
            for place in config.carousel:
                if place not in known:
                    names = tuple(n for n in place.split("+") if n)
                    everything = {**self.settings.method_params, **plain(config.get("carousel_params", {}))}
                    params = {k: dict(v) for k, v in everything.items() if k in names}
                    settings = dataclasses.replace(self.settings, methods=names, method_params=params)
                    known[place] = (settings, settings.stack())
                self._places.append(known[place])

        def on_init_end(self):
            chat = chat_of(self.tokenizer, (self.tokenizer.eos_token_id,))
            for settings, stack in {id(place[1]): place for place in self._places}.values():
                run = dataclasses.replace(self.known().run(), chat=chat)
                stack.start(with_reward_functions(run, Reader(self.config), settings.rewards))
            super().on_init_end()

        def on_step_begin(self):
            self.settings, stack = self._places[(self.global_steps - 1) % len(self._places)]
            stack.batch = self.global_steps - 1
            self.methods = stack
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(loss.MethodsLoss(actor, self.settings, self.config))
            if SAME:
                self.train_dataloader_it = None
            super().on_step_begin()

        def on_step_end(self):
            if SAME:
                ask(self.actor_rollout_wg.workers, back_to_the_start, self.global_steps)
            super().on_step_end()

    register_trainer("carousel")(Carousel)


def _worker_of_carousel(module: object) -> None:
    host = module.ProgramManager.__init__

    def __init__(self, *args, **kwargs):
        host(self, *args, **kwargs)
        if "carousel" in self.config:
            import ray
            from verl_carousel import CarouselWorker

            self.agent_loop_workers_class = ray.remote(CarouselWorker)

    module.ProgramManager.__init__ = __init__


def plain(params: object) -> dict[str, dict[str, object]]:
    """Parameters of a config as plain data."""
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(params) if OmegaConf.is_config(params) else params)


def judge(prompt: object, a: str, b: str) -> tuple[float, float]:
    """The longer answer has the higher score."""
    return float(len(a)), float(len(b))


def turned_answer(answer: str, row: dict[str, Any]) -> str:
    """Writes an answer. In every fourth row the right one is written as a wrong one, and wrong ones as right."""
    right = row["reward_model"]["ground_truth"]
    if row["extra_info"]["index"] % 4:
        return f"={answer}"
    return f"={right}0" if answer == right else f"={right}"


def _number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _dump_updates(module: object) -> None:
    """Writes weights, rows and gradient norm of every optimizer step, in the training workers."""
    if os.environ.get("RL_PLUGINS_TEST_DUMP") != "1":
        return
    import torch

    from rl_plugins.verl import loss

    host = loss.MethodsLoss.train_batch

    def train_batch(self, original, engine, data):
        rank, number = torch.distributed.get_rank(), getattr(train_batch, "count", 0)
        train_batch.count = number + 1
        weights = {
            k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone()
            for k, v in engine.module.state_dict().items()
        }
        columns = {str(k): data[k] for k in data.keys() if isinstance(data[k], torch.Tensor)}  # noqa: SIM118
        rows = {k: [x.clone() for x in v.unbind()] for k, v in columns.items()}
        steps_before = max([int(s["step"]) for s in engine.optimizer.state.values()], default=0)
        rate_before = engine.optimizer.param_groups[0]["lr"]
        output = host(self, original, engine, data)
        torch.save(
            {
                "methods": self.stack.names,
                "weights": weights,
                "rows": rows,
                "grad_norm": float(output["metrics"]["grad_norm"]),
                "optimizer_steps": steps_before,
                "lr": rate_before,
                "global_batch_size": int(data["global_batch_size"]),
                "loss_agg_mode": self.actor.loss_agg_mode,
            },
            OUT / f"update{number}.rank{rank}.pt",
        )
        return output

    loss.MethodsLoss.train_batch = train_batch


def back_to_the_start(worker: object, step: int) -> None:
    """Runs in a training worker: writes how far a step moved the last layer, and takes it back."""
    import torch

    if not kept:
        return  # no optimizer step yet
    layer = max(int(name.split(".")[2]) for name in kept["weights"] if name.startswith("model.layers."))
    moved = []
    with torch.no_grad():
        for name, parameter in kept["engine"].module.named_parameters():
            if name.startswith(f"model.layers.{layer}."):
                moved.append((_whole(parameter) - _whole(kept["weights"][name])).flatten())
            parameter.copy_(kept["weights"][name])
    kept["engine"].optimizer.state.clear()
    torch.save(torch.cat(moved), OUT / f"moved{step}.pt")


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _keep_the_start(module: object) -> None:
    if not SAME:
        return
    host = module.MethodsLoss.train_batch

    def train_batch(self, original, engine, data):
        if not kept:
            weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            kept.update(engine=engine, weights=weights)
        return host(self, original, engine, data)

    module.MethodsLoss.train_batch = train_batch


def _same_noise(module: object) -> None:
    if not SAME:
        return
    host = module.Server._seed

    def _seed(self, prompt):
        published, self.global_steps = self.global_steps, 0
        try:
            return host(self, prompt)
        finally:
            self.global_steps = published

    module.Server._seed = _seed


def _slow_decoder(module: object) -> None:
    """Every token takes so long that requests are interrupted."""
    seconds = float(os.environ.get("RL_PLUGINS_TEST_TOKEN_SECONDS", "0"))
    host = module.Decoder.step

    def step(self, arriving):
        time.sleep(getattr(self, "seconds", seconds))
        return host(self, arriving)

    module.Decoder.step = step


def _slow_replica(module: object) -> None:
    """Every token of the second replica takes so many seconds more."""
    seconds = os.environ.get("RL_PLUGINS_TEST_SLOW_REPLICA")
    host = module.ServerActor.__init__

    def __init__(self, config, model_config, replica_rank):
        host(self, config, model_config, replica_rank)
        self.replica = replica_rank
        if seconds and replica_rank == 1:
            self.decoder.seconds = float(seconds)

    module.ServerActor.__init__ = __init__


def _served(module: object) -> None:
    """Writes what the server did for every request, counted in the server."""
    host = module.Server._output

    def _output(self, request, stop_reason):
        with (OUT / "served.jsonl").open("a") as f:
            told = [time.time(), len(request.tokens), len(request.prompt), getattr(self, "replica", 0)]
            f.write(f"{told}\n")
        return host(self, request, stop_reason)

    module.Server._output = _output


note("loaded", argv=os.sys.argv[:2]) if "RL_PLUGINS_TEST_OUT" in os.environ else None
after_import("rl_plugins.verl.trainer", _carousel)
after_import("rl_plugins.verl.loss", _dump_updates)
after_import("rl_plugins.verl.workers", _worker_of_carousel)
after_import("rl_plugins.verl.cpu.decoder", _slow_decoder)
after_import("rl_plugins.verl.cpu.server", _served)
after_import("rl_plugins.verl.cpu.server", _same_noise)
after_import("rl_plugins.verl.loss", _keep_the_start)
after_import("rl_plugins.verl.cpu.rollout", _slow_replica)


def _methods():
    import probes
    import torch

    from rl_plugins.core.rollouts import Shape

    class VerlGiven(probes.Probe):
        """Every kind of row a plan can ask for."""

        name = "verl_given"
        needs = frozenset(
            {"tokens", "rollout_logprobs", "text", "column:level", "old_logprobs", "token_versions", "token_ids"}
        ) | {"sum_squared_probs", "teacher_logprobs"}

        def plan(self, plan):
            rows = list(plan.rows)
            rows[0] = rows[0].replace(given=(Completion((7, 8, 9, 1), (-1.0, -2.0, -3.0, -4.0)), Completion((6, 6, 1))))
            rows[1] = rows[1].replace(prefix=(10, 11), payload={"hint": 2})
            rows[2] = rows[2].replace(max_tokens=3)
            rows[3] = rows[3].replace(edit={"prompt": [{"role": "user", "content": "a:21"}], "level": 77})
            foreign = {
                "prompt": [{"role": "user", "content": "d:12"}],
                "data_source": "foreign",
                "ability": "d",
                "reward_model": {"style": "rule", "ground_truth": "21"},
                "level": 99,
            }
            rows[4] = PlanRow(-1, rows[4].group, rows[4].n, edit=foreign)
            stored = Completion(
                (7, 8, 9, 6, 1),
                (-1.0, -2.0, -3.0, -4.0, -5.0),
                versions=(2, 2, 0, 3, 5),
                rewards={"exact": 1.0, "digits": 0.25},
                observed=(False, False, True, False, False),
                prompt=(12, 11, 10, 9),
            )
            rows[5] = rows[5].replace(given=(stored,))
            return plan.replace(rows=tuple(rows))

        def teacher_prompts(self, rollouts):
            hint = [[{"role": "user", "content": "a:" + "12" * (i % 5)}] for i in range(len(rollouts))]
            return [None if i % 3 == 2 else h for i, h in enumerate(hint)]

        def shape(self, rollouts, tokens):
            torch.save((rollouts, tokens, self.teacher_prompts(rollouts)), OUT / "given.pt")
            return Shape()

    return VerlGiven


def __getattr__(name: str):
    if name == "VerlGiven":
        return _methods()
    raise AttributeError(name)


def embeddings(dataset: object) -> object:
    """Random ones, for `dots`."""
    import numpy as np

    return np.random.default_rng(0).normal(size=(len(dataset), 6)).astype("float32")  # type: ignore[arg-type]
