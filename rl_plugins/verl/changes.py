"""Everything the adapter changes in objects that are not its own: what, why, what switches it on, and the patch of verl
that ends it. docs/verl_details.md shows this table; a test compares them.

Where a config names no methods, nothing of verl behaves differently: the two guards look at the config and hand on, and
what is registered stands under names of ours, which nobody asks for.
"""

from __future__ import annotations

from rl_plugins.runtime.host_names import Change

ALWAYS, METHODS, CPU = "the plugin is loaded", "methods are named", "VERL_PLATFORM=cpu"

CHANGES: tuple[Change, ...] = (
    Change(
        "`sys.meta_path`, and the loader of a module that is waited for: a finder that finds nothing itself; an "
        "action follows the import",
        "plugins are loaded before the modules they are about",
        ALWAYS,
        "none",
        "imports.after_import",
    ),
    Change(
        "`verl.utils.config.validate_config`: wrapped: the methods are checked first, then the same arguments go on",
        "methods that would be ignored end the run before Ray starts",
        ALWAYS,
        "none",
        "plugin._guard_config",
    ),
    Change(
        "`PPOTrainer.__init__`: wrapped in the same way",
        "the same for programs that build a trainer themselves",
        ALWAYS,
        "none",
        "plugin._guard_trainer",
    ),
    Change(
        "`TRAINER_REGISTRY`: three names more: `rl_plugins_sync`, `rl_plugins_colocate_async`, "
        "`rl_plugins_separate_async`",
        "trainers with methods",
        ALWAYS,
        "none",
        "trainer._register",
    ),
    Change(
        "verl's registry of agent loops: two names more: `rl_plugins_planned`, and with rollout programs "
        "`rl_plugins_program`",
        "completions that a plan gives; rollout programs",
        ALWAYS,
        "none",
        "agent_loop.register_loop",
    ),
    Change(
        "verl's client of the rollout servers, in the asynchronous modes: a subclass of it that notes every attempt",
        "versions of tokens",
        "a method needs `token_versions`",
        "none",
        "client.with_versions",
    ),
    Change(
        "agent-loop workers: the class of `llm_client`, a subclass of it; `_run_agent_loop` and "
        "`_agent_loop_postprocess` of the worker, wrapped",
        "tokens, requests and rows are counted",
        f"{METHODS}, or `count_costs`",
        "none",
        "costs.install",
    ),
    Change(
        "agent-loop workers: `_compute_score` of the worker, wrapped",
        "a reward of None is NaN, and one that raises ends the run or leaves the row without one",
        METHODS,
        "none",
        "scores.install",
    ),
    Change(
        "the config of the run: options that methods need are set, and `RL_PLUGINS_METHODS` in "
        "`ray_kwargs.ray_init.runtime_env.env_vars`",
        "signals; worker processes know that there are methods",
        METHODS,
        "none",
        "start.apply",
    ),
    Change(
        "`is_trl_available` in `verl.models.transformers.monkey_patch`: says that TRL is missing, if it has no "
        "value head",
        "verl 0.9.1 asks TRL for a class that TRL 1.16 has not, in every model build",
        f"{METHODS} (RL_PLUGINS_METHODS in the process), or {CPU}",
        "V3",
        "plugin.without_value_head",
    ),
    Change(
        "`ActorRolloutRefWorker.ref_worker_cls`: the same worker, made with the model of the teacher",
        "verl's one model beside the policy is the policy's first weights",
        "a method names a teacher (RL_PLUGINS_TEACHER in the process)",
        "none",
        "plugin.teacher_as_reference",
    ),
    Change(
        "the trainer's `replay_buffer`: `poll_interval` is 0.2 s; `sample` takes as many prompts as were "
        "planned, and rounds; `_wait_for_next_poll` looks for dead workers first",
        "plans of any size; short steps; no wait without an end",
        METHODS,
        "V11 (the interval)",
        "trainer.MethodsTrainer",
    ),
    Change(
        "the class of the trainer's `train_dataset`: a subclass of it that adds the row's number to what it yields",
        "verl's own `index` may be 0 everywhere",
        METHODS,
        "none",
        "prompts.number_rows",
    ),
    Change(
        "the trainer's `val_dataloader`: yields planned batches while verl validates",
        "methods that act in evaluation",
        "such a method is named",
        "none",
        "trainer.MethodsTrainer",
    ),
    Change(
        "`trainer_mode` of our trainers: a property that says the mode they follow",
        "verl 0.9.1 decides by the registered name",
        ALWAYS,
        "V9",
        "trainer._register",
    ),
    Change(
        "`agent_loop_workers_class` of our agent-loop manager: our worker",
        "rollout programs",
        "a method makes the rollouts",
        "none",
        "workers.ProgramManager",
    ),
    Change(
        "`BaseEngine.train_batch`, in training workers: wrapped: an optimizer step with our loss counts the "
        "trained rows, calls `before_update` and scales the learning rate of this step; other losses go on "
        "unchanged",
        "only there it is known which rows a step holds",
        "a loss with methods arrived",
        "none",
        "loss.wrap_train_batch",
    ),
    Change(
        "`POLICY_LOSS_REGISTRY`: one name more: `rl_plugins`",
        "the surrogate of a method in place of a run with advantages 0",
        "a method brings the surrogate, and verl has the patch",
        "V12 (uses it)",
        "loss.register_surrogate",
    ),
    Change(
        "hydra's global state: set aside while a config is composed, then as before",
        "verl's own main may be what calls the adapter",
        "the doctor, and methods that set or ignore options",
        "none",
        "config.compose",
    ),
    Change(
        "`PlatformRegistry`, `RolloutReplicaRegistry`, `_ROLLOUT_REGISTRY`, `CheckpointEngineRegistry`: a name "
        "more each: `cpu`, `hf_cpu`, `hf_cpu`, `cpu_file`",
        "verl without an accelerator",
        CPU,
        "none",
        "cpu/names.py, cpu/platform.py",
    ),
    Change(
        "`verl.trainer.sft_trainer.SFTTrainer`: ours, in the processes of one command",
        "`run_sft` takes its trainer from there",
        "`python -m rl_plugins.verl.otr`",
        "none",
        "otr.main",
    ),
    Change(
        "`TrainingWorker` of that trainer: the loss, and `train_batch`, which marks the batch first",
        "two flags make the engine hand its logits to the loss",
        "`python -m rl_plugins.verl.otr`",
        "none",
        "otr.OtrSFTTrainer",
    ),
    Change(
        "`initialize_global_process_group_ray`, and that of the SFT trainer without `_ray`: they ask for gloo once",
        "torch refuses to have it twice",
        CPU,
        "V13",
        "cpu/workarounds.one_backend",
    ),
    Change(
        "`CPUOffloadPolicy` in `verl.workers.engine.fsdp.transformer_impl`: without pinned memory",
        "pinning needs an accelerator",
        CPU,
        "V13",
        "cpu/workarounds.unpinned_offload",
    ),
    Change(
        "`EngineRegistry`: verl's FSDP engines also for the device cpu",
        "they are registered for accelerators only",
        CPU,
        "V13",
        "cpu/workarounds.engine_for_cpu",
    ),
    Change(
        "`fsdp2_sharded_save_to_cpu`: gives copies",
        "on a CPU the snapshot is the parameters themselves",
        CPU,
        "V2",
        "cpu/workarounds.copy_parameters",
    ),
    Change(
        "`load_valuehead_model`: takes the attention of the config",
        "the critic asks for flash attention whatever is configured",
        CPU,
        "V14",
        "cpu/workarounds.value_model_attention",
    ),
)
