"""LATR (arXiv 2510.24302): are groups from a lookahead tree more diverse than sampled ones, and what do they cost?

Two policies, n = 8 rollouts per prompt, the real method against plain sampling at temperature 1:

Stories, a policy whose ways are known: 15 chapters of 10 words and an answer (one of 6). Each chapter begins with a
fork of two words, p_1 uniform in 0.5..0.55 (even) or 0.5..0.75 (uneven), p_2 the rest but 0.03: a share of the forks
(real ones) decides between different stories with different answers, of the others only that one word differs
(wording). Other words are written with 0.97, the answer with 0.9. LATR has the defaults, and a tree of at most half the
completion as in the authors' runs; further arms are without pruning and with the other direction of tau_rel, which the
authors' code had before January 2026.

Digits, the embedded policy of `rl_plugins.lab.demo` (a transformer; completions of at most 14 characters): thresholds
for mathematics (0.15, 0.25) and lookahead 2, 4, 6, because completions are shorter than 20. It is sure of most digits.

Measured per group: mean edit distance of two rollouts / length (every other pair), distinct stories or texts, distinct
answers, share of groups without variance of the reward, mean reward; and the cost: tokens decoded relative to plain
sampling (those decoded for nothing are among them), batches of requests one after the other, and tokens of context read
per rollout (without a prefix cache), also for other lengths of decoding ahead. Intervals are 95 % Student intervals
over seeds; differences from sampling are paired by seed, on the same prompts.

Found (8 seeds): where forks are even and few are real, a tree finds more stories than sampling (3.54 : 3.27 and 6.84 :
6.45 of 8; differences 0.28 +- 0.23, 0.39 +- 0.17), and pruning is what does it (without: 2.48, 5.48). Edit distance and
groups without variance do not differ beyond the noise. Where forks are uneven most do not pass tau_rel, the tree stays
small (2.7 branches), two thirds of the group are copies of the argmax that part only in the tail, and the group is less
diverse than a sampled one (4.3 : 6.2 stories, edit distance 0.33 : 0.61). A policy that is sure of its tokens (the
digits) gives 1.3 branches: 85 % of the groups have no variance (sampling: 25 %), at a mean reward of 0.85 (0.32), near
that of greedy decoding. So on these policies LATR needs forks within its thresholds, many of them, and a tail long
enough for copies to part; `branches` in the log tells. Tokens decoded: 0.84 and 0.88 of sampling's with even forks,
though 60 and 39 % of those for the tree are for nothing; but 14 batches instead of 1, 223 and 246 passes of the engine
instead of 152, and 240 to 270 tokens of context read again per rollout of 150 tokens, unless they are cached. Decoding
ahead by 1, 8, 16, 32 and 64 tokens takes 77, 19, 14, 12 and 11 batches and 153, 203, 246, 301 and 398 passes, and loses
30, 34, 39, 42 and 51 % of the tree's tokens: those of pruned branches, and what lies ahead of them.

    python examples/evidence/latr.py --seeds 8 --out evidence-results
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from common import arguments, grouped, interval, named, record, save
from matplotlib.figure import Figure

from rl_plugins.core.method import Method
from rl_plugins.core.requests import Generate, Generated, Prompt, Trajectory
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.latr import Latr
from rl_plugins.methods.latr.similarity import edit_distance
from rl_plugins.testing.engine import run_program

N, PROMPTS = 8, 20
CHAPTERS, WORDS, ANSWERS, VOCABULARY = 15, 10, 6, 30  # word 0 ends, 1..6 are answers
STORIES = {  # share of real forks, largest p_1
    "even forks\n10 % real": (0.1, 0.55),
    "even forks\n30 % real": (0.3, 0.55),
    "uneven forks\n30 % real": (0.3, 0.75),
}
EVEN, AHEAD = "even forks\n30 % real", (1, 4, 8, 16, 32, 64)  # what decoding ahead costs is measured there
SAMPLING, LATR = "sampling", "LATR"
ONE = {"eta": (1.0,), "eta_steps": (0,)}
ARMS: dict[str, dict[str, Any] | None] = {
    SAMPLING: None,
    LATR: {},
    "LATR, no pruning": {"tau_ed": None},
    "LATR, tau_rel far": {"rel_test": "far"},
}
DIGITS = {"tau_abs": 0.15, "tau_rel": 0.25, "lookahead": (2, 4, 6)}
MEASURES = {
    "edit distance": "mean edit distance of two rollouts / length",
    "distinct ways": f"distinct stories (digits: texts) of {N}",
    "distinct answers": f"distinct answers of {N}",
    "no variance": "share of groups without variance of the reward",
    "reward": "mean reward",
}


class Sampling(Method):
    """Plain sampling."""

    name = "sampling"

    def rollout(self, prompt: Prompt) -> Any:
        made = yield Generate(prompt.start(), n=prompt.n)
        return [prompt.start().add(g) for g in made]


class Engine:
    """Decodes all requests of a batch together from `logprobs(contexts, prompts) -> (rows, vocabulary)`."""

    def __init__(self, logprobs: Callable[[list[list[int]], list[Prompt]], np.ndarray], eos: int, seed: int) -> None:
        self.logprobs, self.eos, self.rng = logprobs, eos, np.random.default_rng(seed)
        self.decoded = self.batches = self.passes = self.read = 0

    def anybody(self, wants: bool) -> bool:
        return wants

    def score(self, requests: Any) -> Any:
        raise RuntimeError("nobody asks for rewards here")

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        self.batches += 1
        of = [(p, r) for p, r in requests for _ in range(r.n)]
        contexts = [list(r.trajectory.context) for _, r in of]
        self.read += sum(len(r.trajectory.context) for _, r in requests)
        made: list[dict[str, Any]] = [{"tokens": [], "logprobs": [], "top": [], "finish": "length"} for _ in of]
        going = list(range(len(of)))
        while going:
            table = self.logprobs([contexts[i] for i in going], [of[i][0] for i in going])
            best = np.argsort(-table, axis=1, kind="stable")[:, :2]
            drawn = (np.cumsum(np.exp(table), axis=1) > self.rng.random((len(going), 1))).argmax(1)
            self.decoded += len(going)
            self.passes += 1
            still = []
            for j, i in enumerate(going):
                request = of[i][1]
                token = int(best[j, 0] if request.temperature == 0 else drawn[j])
                contexts[i].append(token)
                made[i]["tokens"].append(token)
                made[i]["logprobs"].append(float(table[j, token]))
                made[i]["top"].append(tuple((int(t), float(table[j, t])) for t in best[j, : request.top]))
                if token == self.eos:
                    made[i]["finish"] = "eos"
                elif len(made[i]["tokens"]) < (request.max_tokens or 1):
                    still.append(i)
            going = still
        rows = iter(zip(of, made, strict=True))
        return [[self._result(*next(rows)) for _ in range(r.n)] for _, r in requests]

    @staticmethod
    def _result(asked: tuple[Prompt, Generate], made: dict[str, Any]) -> Generated:
        top = tuple(made["top"]) if asked[1].top else ()
        sampled = asked[1].temperature != 0
        return Generated(tuple(made["tokens"]), tuple(made["logprobs"]), made["finish"], 0, top, sampled)


class Ends:
    """A `Chat` that knows the end of a sequence and nothing else: the method needs no more."""

    def __init__(self, eos: int) -> None:
        self.eos = (eos,)


# ---- stories


@cache
def chapter(story: tuple[int, ...], real: float, high: float) -> tuple[np.ndarray, bool, float, np.ndarray]:
    """Of a story so far (its prompt and the real forks taken): the words of the next chapter, whether its fork is real,
    p_1, and the two words of the fork."""
    rng = np.random.default_rng(story)
    words = rng.integers(1 + ANSWERS, VOCABULARY, WORDS)
    return words, bool(rng.random() < real), rng.uniform(0.5, high), rng.permutation(np.arange(7, VOCABULARY))[:2]


def told(written: Sequence[int], prompt: Prompt, real: float, high: float) -> tuple[int, ...]:
    """The story that the finished chapters of a text tell: the sides of its real forks."""
    story = prompt.tokens
    for start in range(0, min(len(written), CHAPTERS * WORDS) - WORDS + 1, WORDS):
        _, is_real, _, fork = chapter(story, real, high)
        story = (*story, int(written[start] != fork[0]) if is_real else 2)
    return story


def story_logprobs(real: float, high: float) -> Callable[[list[list[int]], list[Prompt]], np.ndarray]:
    def row(context: list[int], prompt: Prompt) -> np.ndarray:
        written = context[1:]
        story, place = told(written, prompt, real, high), len(written) % WORDS
        if len(written) > CHAPTERS * WORDS:
            return likely({0: 1.0})
        if len(written) == CHAPTERS * WORDS:
            return likely({1 + int(np.random.default_rng((*story, 99)).integers(ANSWERS)): 0.9}, 1, 1 + ANSWERS)
        words, is_real, p, fork = chapter(story, real, high)
        if place == 0:
            return likely({int(fork[0]): p, int(fork[1]): 0.97 - p})
        if is_real:
            words, *_ = chapter((*story, int(written[-place] != fork[0])), real, high)
        return likely({int(words[place]): 0.97})

    return lambda contexts, prompts: np.stack([row(c, p) for c, p in zip(contexts, prompts, strict=True)])


def likely(of: dict[int, float], low: int = 7, high: int = VOCABULARY) -> np.ndarray:
    """Log-probs: these, and the rest evenly on the words low..high-1."""
    p = np.full(VOCABULARY, 1e-30)
    p[low:high] += (1 - sum(of.values())) / (high - low)
    for token, q in of.items():
        p[token] += q
    return np.log(p / p.sum())


def story_answer(row: Trajectory) -> int:
    return row.tokens[-2] if row.finish == "eos" and len(row) > 1 else -1


def stories(arm: str, real: float, high: float, seed: int, **changes: Any) -> dict[str, float]:
    settings, length = ARMS[arm], CHAPTERS * WORDS + 2
    method = (
        Sampling() if settings is None else Latr(Latr.Params(**ONE, max_tree_tokens=length // 2, **settings, **changes))
    )
    prompts = [
        Prompt((1000 * seed + i,), "", {}, N, length, 10_000, Ends(0), seed=f"{seed}|{i}") for i in range(PROMPTS)
    ]
    right = [1 + int(np.random.default_rng((p.tokens[0], 7)).integers(ANSWERS)) for p in prompts]
    engine = Engine(story_logprobs(real, high), 0, seed)

    def way(row: Trajectory, i: int) -> Any:
        return told(row.tokens, prompts[i], real, high)

    return measure(method, prompts, engine, story_answer, way, lambda row, i: float(story_answer(row) == right[i]))


# ---- digits


def digits(arm: str, seed: int, policy: Any) -> dict[str, float]:
    from rl_plugins.lab.demo import tasks

    model, tokenizer = policy
    rng = random.Random(seed)
    texts = [tasks.random_prompt(rng, 1 + i % 5, "held_out") for i in range(2 * PROMPTS)]
    settings = ARMS[arm]
    method = Sampling() if settings is None else Latr(Latr.Params(**ONE, **DIGITS | settings))
    eos = tokenizer.eos_token_id
    prompts = [
        Prompt(tuple(tokenizer.encode(f"<user>{t}<asst>")), "", {}, N, 14, 256, Ends(eos), seed=f"{seed}|{t}")
        for t in texts
    ]

    def logprobs(contexts: list[list[int]], prompts: list[Prompt]) -> np.ndarray:
        length = max(map(len, contexts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (length - len(c)) + c for c in contexts])
        mask = torch.tensor([[0] * (length - len(c)) + [1] * len(c) for c in contexts])
        with torch.no_grad():
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), logits_to_keep=1
            ).logits
        return torch.log_softmax(logits[:, -1].double(), -1).numpy()

    def answer(row: Trajectory) -> str:
        return tokenizer.decode(list(row.tokens), skip_special_tokens=True)[1:]

    return measure(
        method,
        prompts,
        Engine(logprobs, eos, seed),
        answer,
        lambda row, i: row.tokens,
        lambda row, i: float(answer(row) == tasks.solve(texts[i])),
    )


# ---- measuring


def measure(
    method: Method,
    prompts: list[Prompt],
    engine: Engine,
    answer: Callable[[Trajectory], Any],
    way: Callable[[Trajectory, int], Any],
    reward: Callable[[Trajectory, int], float],
) -> dict[str, float]:
    logged: dict[str, float] = {}
    groups = [[row for (row,) in rows] for rows in run_program(method, prompts, engine, logged)]
    rewards = np.array([[reward(row, i) for row in rows] for i, rows in enumerate(groups)])
    distances = [
        edit_distance(a.tokens, b.tokens) / max(len(a), len(b))
        for rows in groups
        for a, b in [*combinations(rows, 2)][::2]
    ]
    return {
        "edit distance": float(np.mean(distances)),
        "distinct ways": float(np.mean([len({way(row, i) for row in rows}) for i, rows in enumerate(groups)])),
        "distinct answers": float(np.mean([len({answer(row) for row in rows}) for rows in groups])),
        "no variance": float((rewards.std(1) == 0).mean()),
        "reward": float(rewards.mean()),
        "decoded": float(engine.decoded),
        "batches": float(engine.batches),
        "passes": float(engine.passes),
        "read per rollout": engine.read / rewards.size,
        "decoded for nothing": logged.get("latr/unused", 0.0),
        "branches": logged.get("latr/branches", float("nan")),
        "pruning ratio": logged.get("latr/pruning_ratio", float("nan")),
    }


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """arm -> measure -> interval; costs relative to sampling of the same seed."""
    out: dict[str, dict[str, Any]] = {}
    for arm, of_seeds in runs.items():
        out[arm] = {}
        for name in of_seeds[0]:
            values = [r[name] for r in of_seeds]
            if name == "decoded":
                values = [v / base[name] for v, base in zip(values, runs[SAMPLING], strict=True)]
                name = f"{name} / sampling"
            out[arm][name] = interval(values)
            if name in MEASURES:
                differences = [r[name] - base[name] for r, base in zip(of_seeds, runs[SAMPLING], strict=True)]
                out[arm][f"{name} - sampling"] = interval(differences)
    return out


UNEVEN = "uneven forks\n30 % real"


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "latr",
        "distinct ways among 8 rollouts, even forks, 30 % of them real",
        "higher",
        r[EVEN][LATR]["distinct ways"],
        r[EVEN][SAMPLING]["distinct ways"],
        difference=r[EVEN][LATR]["distinct ways - sampling"],
        baseline="plain sampling",
    )
    yield record(
        "latr",
        "share of groups without variance, even forks",
        "lower",
        r[EVEN][LATR]["no variance"],
        r[EVEN][SAMPLING]["no variance"],
        difference=r[EVEN][LATR]["no variance - sampling"],
        baseline="plain sampling",
    )
    yield record(
        "latr",
        "distinct ways among 8 rollouts, uneven forks",
        "higher",
        r[UNEVEN][LATR]["distinct ways"],
        r[UNEVEN][SAMPLING]["distinct ways"],
        difference=r[UNEVEN][LATR]["distinct ways - sampling"],
        baseline="plain sampling",
    )
    yield record(
        "latr",
        "distinct answers of 8 in the demo",
        "higher",
        r["digits"][LATR]["distinct answers"],
        r["digits"][SAMPLING]["distinct answers"],
        difference=r["digits"][LATR]["distinct answers - sampling"],
        baseline="plain sampling",
    )


def main() -> None:
    args = arguments(__doc__, seeds=5)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rl_plugins.lab.demo.policy import load_policy

    path = load_policy()  # the first time it is built, which takes most of a minute
    policy = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    seeds = range(args.seeds)
    results = {
        name: summary({arm: [stories(arm, real, high, s) for s in seeds] for arm in ARMS})
        for name, (real, high) in STORIES.items()
    }
    real, high = STORIES[EVEN]
    ahead = {f"{tokens} ahead": [stories(LATR, real, high, s, decode_ahead=tokens) for s in seeds] for tokens in AHEAD}
    cost = summary({SAMPLING: [stories(SAMPLING, real, high, s) for s in seeds], **ahead})
    results["digits"] = summary({arm: [digits(arm, s, policy) for s in seeds] for arm in ARMS})

    content = {
        "method": "latr",
        "settings": {"n": N, "prompts": PROMPTS, "seeds": args.seeds},
        "results": results,
        "decode_ahead": cost,
    }
    save(
        args.out,
        "latr",
        content,
        lambda: plot(results),
        records=records(results),
        where="latr-8-seeds-arrol-scope-fission_grpo-3-seeds",
    )
    for policy_name, arms in results.items():
        print(policy_name.replace("\n", ", "))
        for name in arms[SAMPLING]:
            print(f"  {name:27s}" + "".join(f"{r[name]['mean']:9.3f} +-{r[name]['ci95']:6.3f}" for r in arms.values()))
    print(" " * 29 + "".join(f"{arm:>18s}" for arm in ARMS))
    print(f"decode_ahead, {EVEN.replace(chr(10), ', ')}")
    for arm in list(cost)[1:]:
        shown = ("decoded / sampling", "batches", "passes", "read per rollout", "decoded for nothing")
        print(
            f"  {arm:10s}" + ", ".join(f"{n} {cost[arm][n]['mean']:.3f} +- {cost[arm][n]['ci95']:.3f}" for n in shown)
        )


def plot(results: dict[str, dict[str, dict[str, Any]]]) -> Figure:
    shown = {**MEASURES, "decoded / sampling": "tokens decoded / those of sampling"}
    figure, axes = panels(len(shown), 2.4)
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        policies = [textwrap.fill(policy, 14) for policy in results]
        grouped(axis, policies, {arm: [results[policy][arm][key] for policy in results] for arm in ARMS})
        axis.tick_params(axis="x", labelsize=7.5)
        named(axis, "", label)
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
