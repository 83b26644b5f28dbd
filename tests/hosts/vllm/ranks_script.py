"""Under torchrun: trainers on two ranks with a server, `ranks_script.py FOLDER URL`. Each rank prints what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trl")]

import cpu_adapter  # noqa: E402
import probes  # noqa: E402
from harness import make  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402
from watch import Watch  # noqa: E402

CASES = {
    "mc_grpo": ["vade", "mc_grpo"],  # 72 rows
    "small": ["small"],  # 60 rows and 4 fillers, all on the second rank
    "given": ["given"],  # special rows on the first rank only
    "probing": ["probing"],  # rounds
}


def main(folder: Path, url: str) -> None:
    probes.register()
    for name, method in cpu_adapter.file_client(folder / "server" / "weights.safetensors").items():
        setattr(VLLMClient, name, method)
    for case, methods in CASES.items():
        options = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url, max_steps=2, learning_rate=0.3)
        t = make(folder, methods, **options)
        watch = Watch(t)
        t.train()
        errors = [b.error[~b.error.isnan()].max().item() for b in watch.batches]
        rows = len(watch.batches[0].tensors["advantages"])
        rank = t.accelerator.process_index
        print("RESULT", json.dumps(dict(case=case, rank=rank, rows=rows, error=max(errors))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
