#!/usr/bin/env bash
# GRPO with a method on tasks of reasoning-gym: verl with FSDP2, LoRA and vLLM on one GPU, two rewards, a trace.
#
#   python examples/verl/reasoning_gym_data.py reasoning-gym    the data, once
#   bash examples/verl/reasoning_gym.sh --dry-run               what would take effect; starts nothing, needs no GPU
#   bash examples/verl/reasoning_gym.sh                         the run; held-out accuracy: val-core/... and val-aux/...
#   METHODS=vade,gdpo bash examples/verl/reasoning_gym.sh       other methods; METHODS= is verl alone
#   rl-plugins inspect reasoning-gym-run/checkpoints            what happened to each rollout, and why
#
# Environment: MODEL (a name on the hub or a folder, default Qwen/Qwen2.5-0.5B-Instruct), DATA (folder, default
# reasoning-gym), METHODS (default gdpo), STEPS (default 100), GPUS (default 1), OUT (default reasoning-gym-run), PYTHON
# (default python). Further words are overrides of verl's config, the last one of a key counts:
#   bash examples/verl/reasoning_gym.sh actor_rollout_ref.actor.optim.lr=1e-5
#
# Needs: pip install -c constraints.txt ".[verl]" vllm flash-attn reasoning-gym drawsvg
set -euo pipefail

dry=0
words=()
for word in "$@"; do
  case "$word" in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    --dry-run) dry=1 ;;
    *) words+=("$word") ;;
  esac
done
data=${DATA:-reasoning-gym}
out=${OUT:-reasoning-gym-run}
python=${PYTHON:-python}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

METHODS=${METHODS-gdpo} # the one line

methods=(trainer.v1.trainer_mode=sync)
if [ -n "$METHODS" ]; then
  methods=(
    trainer.v1.trainer_mode=rl_plugins_sync
    "+rl_plugins.methods=[$METHODS]"
    # The parts of the score, with their weights in it. Methods that treat several rewards apart see these two.
    +rl_plugins.rewards.solved=1
    +rl_plugins.rewards.brief=0.5
    +rl_plugins.trace=true
  )
fi

overrides=(
  algorithm.adv_estimator=grpo # methods that bring no advantages of their own use these
  "data.train_files='$data/train.parquet'"
  "data.val_files='$data/test.parquet'"
  data.train_batch_size=32 # prompts per step
  data.max_prompt_length=256
  data.max_response_length=64
  data.seed=0 # also the seed of the methods
  "actor_rollout_ref.model.path='${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}'"
  actor_rollout_ref.model.lora_rank=16
  actor_rollout_ref.model.lora_alpha=32
  actor_rollout_ref.model.target_modules=all-linear
  actor_rollout_ref.model.lora.merge=True # the engine gets whole weights, the adapter merged into them
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=5e-5
  actor_rollout_ref.actor.ppo_mini_batch_size=32 # prompts per optimizer step: one step per batch
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
  "reward.custom_reward_function.path='$here/reasoning_gym_data.py'"
  reward.custom_reward_function.name=compute_score
  trainer.nnodes=1
  trainer.n_gpus_per_node="${GPUS:-1}"
  trainer.total_training_steps="${STEPS:-100}"
  trainer.total_epochs=100
  trainer.test_freq=25
  trainer.val_before_train=True
  trainer.save_freq=50 # the state of the methods is part of each checkpoint
  'trainer.logger=["console"]'
  trainer.project_name=rl-plugins
  trainer.experiment_name=reasoning-gym
  "trainer.default_local_dir='$out/checkpoints'"
  "hydra.run.dir='$out/hydra'"
)
run=("$python" -m verl.trainer.main_ppo "${overrides[@]}" "${methods[@]}" ${words[@]+"${words[@]}"})
if [ "$dry" = 1 ]; then
  exec "$python" -m rl_plugins.commands.cli doctor --host verl -- "${run[@]}"
fi
exec "${run[@]}"
