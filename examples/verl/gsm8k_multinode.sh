#!/usr/bin/env bash
# The run of gsm8k.sh on several nodes.
#
#   ray start --head --port 6379                                  on the first node
#   ray start --address FIRST_NODE:6379                           on every other node
#   NODES=2 bash examples/verl/gsm8k_multinode.sh --dry-run       on the first node: what would take effect
#   NODES=2 bash examples/verl/gsm8k_multinode.sh                 on the first node: the run
#   ray stop                                                      on every node, at the end
#
# Every node needs the same packages (rl-plugins and packages with further methods too: the workers are asked at start,
# and a difference ends the run) and sees MODEL, DATA, OUT and this folder under the same absolute paths.
#
# Environment: NODES (default 2), and everything of gsm8k.sh; GPUS counts those of one node. What the processes on the
# other nodes shall see of the environment is listed in `pass` below: a Ray that is running has its own.
# Further words are overrides of verl's config.
set -euo pipefail

case "${1:-}" in
  -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
esac
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nodes=${NODES:-2}
pass=(HF_HOME HF_HUB_OFFLINE NCCL_SOCKET_IFNAME RL_PLUGINS_VETO RL_PLUGINS_ALLOW_UNTESTED VERL_USE_EXTERNAL_PLUGINS)

variables=()
for name in "${pass[@]}"; do
  if [ -n "${!name:-}" ]; then
    variables+=("+ray_kwargs.ray_init.runtime_env.env_vars.$name='${!name}'")
  fi
done

exec bash "$here/gsm8k.sh" \
  trainer.nnodes="$nodes" \
  +ray_kwargs.ray_init.address=auto `# the Ray that was started; without one the run ends here` \
  data.train_batch_size=$((128 * nodes)) `# as many rows per GPU as on one node` \
  actor_rollout_ref.actor.ppo_mini_batch_size=$((128 * nodes)) \
  ${variables[@]+"${variables[@]}"} "$@"
