"""OTR against the cross-entropy of TRL's SFTTrainer: time and peak memory of the head, forward and backward.

Hidden states (tokens, 256) in float32 and a head of 32,000 ids, one thread: TRL's chunked function (`SFT`), OTR's with
256 draws, OTR's exact mean. Arms take turns in processes of their own, because the peak of a process never falls.
Reported: CPU seconds (minimum, median), the median ratio to SFT of the same repetition, and by how much the peak of
resident memory grew over what the tensors took before.

    python benchmarks/otr.py --repeat 5
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOKENS, HIDDEN, VOCABULARY = 1024, 256, 32_000
ARMS = ("SFT", "OTR", "OTR, expected")


def measure(arm: str) -> dict[str, float]:
    import torch
    from trl.kernels import ChunkedLogProbFunction

    from rl_plugins.tools.supervised.otr import Drawing, OtrParams, generator, head_loss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN) / 16).requires_grad_()
    target = torch.randint(VOCABULARY, (TOKENS,))
    params = OtrParams(expected=arm.endswith("expected"))
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if arm == "SFT":
        outputs = ("log_probs", "entropy", "is_top1")
        loss = -ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, 32768, None, 1.0, outputs)[0]
    else:
        drawing = Drawing(params, generator(params, 0, 0, 0, 0, "cpu"))
        loss = head_loss(hidden, weight, None, target, drawing).loss
    loss.mean().backward()
    seconds = time.process_time() - begin
    return {"seconds": seconds, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--arm", choices=ARMS, help="measure one arm in this process")
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(measure(arguments.arm)))
        return
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(arguments.repeat):
        for arm in ARMS:
            line = subprocess.run([sys.executable, __file__, "--arm", arm], capture_output=True, text=True, check=True)
            found[arm].append(json.loads(line.stdout.splitlines()[-1]))
    cases: dict[str, Any] = {}
    for arm, runs in found.items():
        seconds = [r["seconds"] for r in runs]
        ratios = [r["seconds"] / s["seconds"] for r, s in zip(runs, found["SFT"], strict=True)]
        cases[arm] = {
            "seconds_min": min(seconds),
            "seconds_median": statistics.median(seconds),
            "ratio": statistics.median(ratios),
            "peak_mib": statistics.median(r["mib"] for r in runs),
        }
        print(arm, {k: round(v, 3) for k, v in cases[arm].items()})
    result = {"tokens": TOKENS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "repeat": arguments.repeat, "arms": cases}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
