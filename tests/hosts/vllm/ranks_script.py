"""Under torchrun: trainers on two ranks with a server, `ranks_script.py FOLDER URL OUT`. Each rank writes what it
found: {case: {rows, tokens, error}} in OUT/rank0.json and OUT/rank1.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trl")]

import cpu_adapter
import probes
from harness import make
from trl.generation.vllm_client import VLLMClient
from watch import Watch

CASES = {
    "mc_grpo": ["vade", "mc_grpo"],  # 72 rows
    "small": ["small"],  # 60 rows and 4 fillers, all on the second rank
    "given": ["given"],  # special rows on the first rank only
    "probing": ["probing"],  # rounds
}


def main(folder: Path, url: str, out: Path) -> None:
    results = {}
    probes.register()
    for name, method in cpu_adapter.file_client(folder / "server" / "weights.safetensors").items():
        setattr(VLLMClient, name, method)
    for case, methods in CASES.items():
        options = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url, max_steps=2, learning_rate=0.3)
        t = make(folder, methods, **options)
        watch = Watch(t)
        t.train()
        rank = t.accelerator.process_index
        result: dict[str, float] = dict(rows=len(watch.batches[0].tensors["advantages"]), tokens=0, error=0.0)
        for batch in watch.batches:
            known = batch.mask & ~batch.tensors["sampling_per_token_logps"].isnan()
            if case == "given" and rank == 0:
                known[0] = False  # brings log-probs of its own
            error = (batch.tensors["sampling_per_token_logps"] - batch.policy)[known].abs()
            result["tokens"] += len(error)
            result["error"] = max(result["error"], error.max().item())
        results[case] = result
        (out / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
