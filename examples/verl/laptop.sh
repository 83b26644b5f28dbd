#!/usr/bin/env bash
# verl's real PPO trainer on a laptop: GRPO on the demo policy (78,272 parameters), a few minutes, no GPU.
#
#   bash examples/verl/laptop.sh                    verl's own trainer `sync`
#   bash examples/verl/laptop.sh vade minpro        the same run with methods of rl-plugins
#   bash examples/verl/laptop.sh vade --dry-run     what would take effect; starts nothing
#
# Environment: OUT (folder for results, default verl-laptop), STEPS (default 40), PYTHON (default python). Take 3 STEPS or
# more: the warm-up of the learning rate begins at 0, so the first batch changes nothing.
# What follows `--` goes to verl as it is: bash examples/verl/laptop.sh vade -- data.seed=2
#
# Set for you, printed at the start, and replaced by an override of yours after `--`:
#   trainer.resume_mode=disable                 every run begins at step 0, also when OUT holds checkpoints
#   +rl_plugins.rewards.exact, .digits, .careful  with methods: the parts of the score that they see, and their weights
#   +reward.custom_reward_function.reward_kwargs.binary  with methods: the score is graded, or right or wrong
#   +rl_plugins.method_params...                parameters of some methods, such as dars.n_first=3
#   actor_rollout_ref.actor.ppo_epochs=2        with methods that correct for off-policy updates
# So runs of this script have different rewards; `rl-plugins demo --host verl METHOD` compares under equal ones.
# OUT/overrides.txt has all overrides, also those that a CPU needs (docs/verl_cpu.md).
#
# To resume: save with `-- trainer.save_freq=10`, then start again for more steps:
#   STEPS=60 bash examples/verl/laptop.sh vade -- trainer.save_freq=10 trainer.resume_mode=auto
# OUT/metrics.jsonl (or VERL_FILE_LOGGER_PATH) is of the last start; those of the starts before are kept beside it as
# metrics-1.jsonl, metrics-2.jsonl.
set -euo pipefail

methods=()
dry=0
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    --dry-run) dry=1; shift ;;
    --) shift; break ;;
    *) methods+=("$1"); shift ;;
  esac
done
out=${OUT:-verl-laptop}
python=${PYTHON:-python}
if [ "$dry" = 1 ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
mkdir -p "$out" && out=$(cd "$out" && pwd)

# The one switch: rl-plugins registers a CPU platform and the rollout backend `hf_cpu` in every process of verl.
export VERL_PLATFORM=cpu
# Many small processes share the cores; more threads in each would only make them wait for each other.
# (TransferQueue's own 8 are more than a laptop has, which it reports a hundred times per step.)
export OMP_NUM_THREADS=1 TQ_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Ray would end the run where all programs of the machine together fill 95 % of its memory.
export RAY_memory_monitor_refresh_ms=0
# Nothing is downloaded or reported. verl's metrics go to a file, one JSON object per step.
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$out/metrics.jsonl}"

# Trains the policy on demonstrations (once, 20 seconds), writes the data, and prints the settings of the run.
"$python" -m rl_plugins.lab.demo.verl_data "$out" ${methods[@]+"${methods[@]}"} --steps "${STEPS:-40}" -- "$@" \
  > "$out/overrides.txt"
overrides=()
while IFS= read -r line; do overrides+=("$line"); done < "$out/overrides.txt"

if [ "$dry" = 1 ]; then
  "$python" -m rl_plugins.commands.cli doctor --host verl -- "${overrides[@]}"
  exit
fi

# verl's file logger begins its file again at every start, also at a resume.
metrics=$VERL_FILE_LOGGER_PATH
if [ -e "$metrics" ]; then
  n=1
  while [ -e "${metrics%.jsonl}-$n.jsonl" ]; do n=$((n + 1)); done
  mv "$metrics" "${metrics%.jsonl}-$n.jsonl"
fi

# verl itself. Start-up takes most of a minute: seven processes import it.
"$python" -m verl.trainer.main_ppo "${overrides[@]}"

[ -e "$metrics" ] || exit 0 # trainer.logger without `file`
echo "Metrics: $metrics"
"$python" - "$metrics" << 'PYTHON'
import json, sys

found = [
    f"  step {row['step']:3d}  {value:.3f}"
    for row in map(json.loads, open(sys.argv[1]))
    for name, value in row["data"].items()
    if name.endswith("exact/mean@1")
]
print("\n".join(["Held-out prompts answered exactly right, per evaluation:", *found] if found else ["No evaluation."]))
PYTHON
