"""What 16 to 512 rollouts per prompt cost in TRL: memory and time of generation and of a step.

    python benchmarks/brorl.py

The embedded policy, completions of 64 tokens, micro-batches of 64 rows, 3 generation batches with one optimizer step
each. TRL's transformers engine generates a batch in one call of `generate`. "prompts": 4 prompts of N rollouts, so that
a batch grows with N. "ramp": `brorl` with a ramp to N in a batch of 2048 rows. Every run is a process of its own. Peaks
are of the resident memory above that before the first batch, looked at every 2 ms: inside of `generate`, and over the
whole step. Seconds are of the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

SIZES = (16, 64, 256, 512)
PROMPTS, ROWS, MICRO, TOKENS, BATCHES = 4, 2048, 64, 64, 3


class Peak:
    """The largest resident memory of this process since the last reading, in MB, as a thread sees it."""

    def __init__(self) -> None:
        self._page, self._most = os.sysconf("SC_PAGE_SIZE") / 2**20, 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * self._page

    def take(self) -> float:
        """The peak since the last call."""
        most, self._most = max(self._most, self.now()), 0.0
        return most

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, self.now())
            time.sleep(0.002)


def run(kind: str, n: int) -> dict[str, float]:
    """One run, in this process."""
    import torch
    from datasets import load_dataset
    from transformers.trainer_callback import PrinterCallback

    from rl_plugins.lab.demo import rewards
    from rl_plugins.lab.demo.policy import load_policy
    from rl_plugins.lab.demo.settings import ON_CPU, write_data
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rows = ROWS if kind == "ramp" else PROMPTS * n
    values: dict[str, Any] = {
        **{k: v for k, v in ON_CPU.items() if k != "dtype"},
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": rows // MICRO,
        "num_generations": 16 if kind == "ramp" else n,
        "max_completion_length": TOKENS,
        "generation_kwargs": {"min_new_tokens": TOKENS},
        "max_steps": BATCHES,
        "learning_rate": 1e-6,
    }
    params = {"ramp": [[0, n]]} if kind == "ramp" else {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder) / "data")
        trainer = GRPOTrainer(
            model=str(load_policy()),
            reward_funcs=[rewards.digits],
            args=GRPOConfig(output_dir=f"{folder}/out", methods=["brorl"], method_params={"brorl": params}, **values),
            train_dataset=load_dataset("json", data_files=str(data / "train.jsonl"), split="train"),
        )
        trainer.remove_callback(PrinterCallback)
        peak, generate, made = Peak(), trainer.model.generate, list[tuple[float, float]]()
        outside = 0.0

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal outside
            outside = max(outside, peak.take())
            start = time.process_time()
            out = generate(*args, **kwargs)
            made.append((time.process_time() - start, peak.take()))
            return out

        trainer.model.generate = timed
        before, start = peak.now(), time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        most = max(outside, peak.take(), *(m for _, m in made))
    assert len(made) == BATCHES
    return {
        "rows": rows,
        "generate_mb": round(max(m for _, m in made) - before),
        "step_mb": round(most - before),
        "generate_s": round(min(s for s, _ in made), 2),
        "step_s": round(seconds / BATCHES, 2),
    }


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
        return
    found: dict[str, Any] = {}
    for kind in ("prompts", "ramp"):
        for n in SIZES:
            done = subprocess.run([sys.executable, __file__, kind, str(n)], capture_output=True, text=True, check=True)
            found[f"{kind} {n}"] = json.loads(done.stdout.splitlines()[-1])
            print(kind, n, found[f"{kind} {n}"], flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
