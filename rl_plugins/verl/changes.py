"""Everything the adapter changes in objects that are not its own; docs/verl.md shows this table (a test compares them).

Where a config names no methods, nothing of verl behaves differently: the two guards look at the config and hand on, and
what is registered stands under names of ours, which nobody asks for.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """One change of a foreign object.

    Args:
        what: the object, as verl names it.
        how: what it is afterwards.
        why: what for.
        when: what switches it on.
        patch: of patches/verl that ends it; "-": none.
        by: module and name of the adapter.
    """

    what: str
    how: str
    why: str
    when: str
    patch: str
    by: str


_TABLE = """
`sys.meta_path`, and the loader of a module that is waited for | a finder that finds nothing itself; an action follows the import | plugins are loaded before the modules they are about | the plugin is loaded | - | imports.after_import
`verl.utils.config.validate_config` | wrapped: the methods are checked first, then the same arguments go on | methods that would be ignored end the run before Ray starts | the plugin is loaded | - | plugin._guard_config
`PPOTrainer.__init__` | wrapped in the same way | the same for programs that build a trainer themselves | the plugin is loaded | - | plugin._guard_trainer
`TRAINER_REGISTRY` | three names more: `rl_plugins_sync`, `rl_plugins_colocate_async`, `rl_plugins_separate_async` | trainers with methods | the plugin is loaded | - | trainer._register
verl's registry of agent loops | two names more: `rl_plugins_planned`, and with rollout programs `rl_plugins_program` | completions that a plan gives; rollout programs | the plugin is loaded | - | agent_loop.register_loop
the config of the run | options that methods need are set, and `RL_PLUGINS_METHODS` in `ray_kwargs.ray_init.runtime_env.env_vars` | signals; worker processes know that there are methods | methods are named | - | start.apply
`is_trl_available` in `verl.models.transformers.monkey_patch` | says that TRL is missing, if it has no value head | verl 0.9.1 asks TRL for a class that TRL 1.16 has not, in every model build | methods are named (RL_PLUGINS_METHODS in the process), or VERL_PLATFORM=cpu | V3 | plugin.without_value_head
the trainer's `replay_buffer` | `poll_interval` is 0.2 s; `sample` takes as many prompts as were planned, and rounds; `_wait_for_next_poll` looks for dead workers first | plans of any size; short steps; no wait without an end | methods are named | V11 (the interval) | trainer.MethodsTrainer
the class of the trainer's `train_dataset` | a subclass of it that adds the row's number to what it yields | verl's own `index` may be 0 everywhere | methods are named | - | prompts.number_rows
the trainer's `val_dataloader` | yields planned batches while verl validates | methods that act in evaluation | such a method is named | - | trainer.MethodsTrainer
`trainer_mode` of our trainers | a property that says the mode they follow | verl 0.9.1 decides by the registered name | the plugin is loaded | V9 | trainer._register
`agent_loop_workers_class` of our agent-loop manager | our worker | rollout programs | a method makes the rollouts | - | workers.ProgramManager
`BaseEngine.train_batch`, in training workers | wrapped: an optimizer step with our loss counts the trained rows, calls `before_update` and scales the learning rate of this step; other losses go on unchanged | only there it is known which rows a step holds | a loss with methods arrived | - | loss.wrap_train_batch
`POLICY_LOSS_REGISTRY` | one name more: `rl_plugins` | the surrogate of a method in place of a run with advantages 0 | a method brings the surrogate, and verl has the patch | V12 (uses it) | loss.register_surrogate
hydra's global state | set aside while a config is composed, then as before | verl's own main may be what calls the adapter | the doctor, and methods that set or ignore options | - | config.compose
`PlatformRegistry`, `RolloutReplicaRegistry`, `_ROLLOUT_REGISTRY`, `CheckpointEngineRegistry` | a name more each: `cpu`, `hf_cpu`, `hf_cpu`, `cpu_file` | verl without an accelerator | VERL_PLATFORM=cpu | - | cpu/names.py, cpu/platform.py
`initialize_global_process_group_ray` | asks for gloo once | torch refuses to have it twice | VERL_PLATFORM=cpu | V13 | cpu/workarounds.one_backend
`CPUOffloadPolicy` in `verl.workers.engine.fsdp.transformer_impl` | without pinned memory | pinning needs an accelerator | VERL_PLATFORM=cpu | V13 | cpu/workarounds.unpinned_offload
`EngineRegistry` | verl's FSDP engines also for the device cpu | they are registered for accelerators only | VERL_PLATFORM=cpu | V13 | cpu/workarounds.engine_for_cpu
`fsdp2_sharded_save_to_cpu` | gives copies | on a CPU the snapshot is the parameters themselves | VERL_PLATFORM=cpu | V2 | cpu/workarounds.copy_parameters
`load_valuehead_model` | takes the attention of the config | the critic asks for flash attention whatever is configured | VERL_PLATFORM=cpu | V14 | cpu/workarounds.value_model_attention
"""  # noqa: E501
CHANGES = tuple(Change(*line.split(" | ")) for line in _TABLE.strip().splitlines())


def table() -> str:
    """The changes as a table in Markdown."""
    lines = ["| what | how | why | when | patch |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(c[:5])} |" for c in CHANGES)])
