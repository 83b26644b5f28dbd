"""Under torchrun: trainers on two ranks with vLLM, `ranks_script.py FOLDER URL OUT`; URL of a server, or `colocate` for
an engine of each rank's own. Each rank writes what it found: {case: {rows, tokens, error}} in OUT/rank0.json and
OUT/rank1.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trl")]

import cpu_adapter
import probes
import torch
from harness import make
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from watch import Watch, policy_logprobs

from rl_plugins.core.requests import Generate
from rl_plugins.testing.engine import make_prompt

CASES = {
    "mc_grpo": ["vade", "mc_grpo"],  # 72 rows
    "small": ["small"],  # 60 rows and 4 fillers, all on the second rank
    "given": ["given"],  # special rows on the first rank only
    "probing": ["probing"],  # rounds
    "talk": ["talk"],  # programs of two turns
}


def main(folder: Path, url: str, out: Path) -> None:
    results = {}
    probes.register()
    options = colocate() if url == "colocate" else server(url, folder)
    cases = {"talk": CASES["talk"]} if url == "colocate" else CASES
    for case, methods in cases.items():
        t = make(folder, methods, **options, max_steps=2, learning_rate=0.3)
        watch = Watch(t)
        t.train()
        rank = t.accelerator.process_index
        result: dict[str, Any] = dict(rows=len(watch.batches[0].tensors["advantages"]), tokens=0, error=0.0)
        for batch in watch.batches:
            known = batch.mask & ~batch.tensors["sampling_per_token_logps"].isnan()
            if case == "given" and rank == 0:
                known[0] = False  # brings log-probs of its own
            error = (batch.tensors["sampling_per_token_logps"] - batch.policy)[known].abs()
            result["tokens"] += len(error)
            result["error"] = max(result["error"], error.max().item())
        results[case] = result
        if case == "talk":
            results["requests"] = requests(t, rank)
        (out / f"rank{rank}.json").write_text(json.dumps(results))


def requests(t: Any, rank: int) -> dict[str, Any]:
    """Ranks that ask for other numbers of other requests, and one of them at last for nothing."""
    engine = t.program_engine(lambda prompt: {})
    prompt = make_prompt(engine.chat, f"a:53{rank}", n=1, max_tokens=20)
    start = prompt.start()
    asked = [
        [Generate(start, n=3, max_tokens=4), Generate(start, n=2, max_tokens=6, temperature=0.0)],
        [
            *[Generate(start, n=k, max_tokens=k) for k in (1, 7, 5)],
            Generate(start, n=2, max_tokens=9, stop=("7",)),
            Generate(start, n=1, max_tokens=3, top=2),
        ],
    ]
    rounds = [asked[rank], asked[1 - rank], asked[1] if rank else []]
    found = dict(rows=[], tokens=0, error=0.0, limits=True)
    with torch.no_grad():
        for mine in rounds:
            made = engine.generate([(prompt, request) for request in mine])
            found["rows"].append(sum(len(many) for many in made))
            for request, many in zip(mine, made, strict=True):
                assert len(many) == request.n
                for g in many:
                    policy = policy_logprobs(t, list(start.context), list(g.tokens))
                    found["tokens"] += len(g.tokens)
                    found["error"] = max(found["error"], *(abs(a - b) for a, b in zip(policy, g.logprobs, strict=True)))
                    found["limits"] &= len(g.tokens) == request.max_tokens or g.finish in ("eos", "stop")
    return found


def server(url: str, folder: Path) -> dict[str, Any]:
    for name, method in cpu_adapter.file_client(folder / "server" / "weights.safetensors").items():
        setattr(VLLMClient, name, method)
    return dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)


def colocate() -> dict[str, Any]:
    cpu_adapter.keep_plain_weights()
    original = vllm_generation.LLM
    vllm_generation.LLM = lambda **kwargs: original(**kwargs, dtype="float32", enforce_eager=True)
    return dict(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
