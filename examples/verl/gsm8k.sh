#!/usr/bin/env bash
# GRPO with methods on GSM8K: verl with FSDP2 and vLLM, one node with GPUs.
#
#   python examples/verl/gsm8k_data.py gsm8k            the data, once (needs the hub)
#   export MODEL=Qwen/Qwen2.5-1.5B-Instruct             a name on the hub or a folder
#   bash examples/verl/gsm8k.sh --dry-run               what would take effect; starts nothing, needs no GPU
#   bash examples/verl/gsm8k.sh                         the run
#   METHODS=vade,gdpo bash examples/verl/gsm8k.sh       other methods; METHODS= is verl alone
#
# Environment: MODEL, DATA (folder, default gsm8k), METHODS (default vade), GPUS (default 8), OUT (default
# gsm8k-run), PYTHON (default python). Further words are overrides of verl's config, the last one of a key counts:
#   bash examples/verl/gsm8k.sh data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64
#
# Needs: pip install -c constraints.txt ".[verl]" vllm flash-attn
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
: "${MODEL:?names the model to train, for example MODEL=Qwen/Qwen2.5-1.5B-Instruct}"
data=${DATA:-gsm8k}
out=${OUT:-gsm8k-run}
python=${PYTHON:-python}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

METHODS=${METHODS-vade} # the one line

if [ -n "$METHODS" ]; then
  methods=(
    # A trainer of verl that runs methods: rl_plugins_sync, rl_plugins_colocate_async or rl_plugins_separate_async.
    trainer.v1.trainer_mode=rl_plugins_sync
    "+rl_plugins.methods=[$METHODS]"
    # The reward function answers with a score and its parts. Methods that treat several rewards apart see these two,
    # with the weights they have in the score; everything else sees the score.
    +rl_plugins.rewards.accuracy=1
    +rl_plugins.rewards.format=0.2
  )
else
  methods=(trainer.v1.trainer_mode=sync)
fi

overrides=(
  algorithm.adv_estimator=grpo # methods that bring no advantages of their own use these
  "data.train_files='$data/train.parquet'"
  "data.val_files='$data/test.parquet'"
  data.train_batch_size=128 # prompts per step
  data.max_prompt_length=512
  data.max_response_length=512
  data.filter_overlong_prompts=True
  data.seed=0 # also the seed of the methods
  "actor_rollout_ref.model.path='$MODEL'"
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=128 # prompts per optimizer step: one step per batch
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
  actor_rollout_ref.rollout.name=vllm
  actor_rollout_ref.rollout.n=4 # rollouts per prompt
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
  "reward.custom_reward_function.path='$here/gsm8k_data.py'"
  reward.custom_reward_function.name=compute_score
  trainer.nnodes=1
  trainer.n_gpus_per_node="${GPUS:-8}"
  trainer.total_epochs=5
  trainer.test_freq=10
  trainer.save_freq=20 # the state of the methods is part of each checkpoint
  'trainer.logger=["console"]'
  trainer.project_name=rl-plugins
  trainer.experiment_name=gsm8k
  "trainer.default_local_dir='$out/checkpoints'"
  "hydra.run.dir='$out/hydra'"
)
run=("$python" -m verl.trainer.main_ppo "${overrides[@]}" "${methods[@]}" ${words[@]+"${words[@]}"})
if [ "$dry" = 1 ]; then
  exec "$python" -m rl_plugins.commands.cli doctor --host verl -- "${run[@]}"
fi
exec "${run[@]}"
