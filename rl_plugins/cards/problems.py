"""The problems of a run that methods answer: what a user sees first, before any name of a method.

`Method.problems` names keys of `PROBLEMS`; the page docs/choose.md and `rl-plugins suggest` are made from both.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem of a run.

    Args:
        title: heading of the page, e.g. "Groups without signal".
        seen: how it shows in a run, in one or two sentences.
        words: what users call it; `suggest --for` looks for them.
    """

    title: str
    seen: str
    words: tuple[str, ...]


PROBLEMS: dict[str, Problem] = {
    "no_signal": Problem(
        "Groups without signal",
        "All rollouts of a prompt get the same reward, so their advantages are 0. The share of such groups is "
        "`frac_reward_zero_std` in TRL's logs.",
        (
            "equal rewards",
            "zero variance",
            "zero advantage",
            "no signal",
            "gradient zero",
            "too easy",
            "too hard",
            "all right",
            "all wrong",
        ),
    ),
    "long_tail": Problem(
        "Long-tailed generation",
        "A few long completions keep the batch waiting: the longest completion is several times the mean, and the "
        "engine idles at the end of each batch.",
        (
            "long tail",
            "stragglers",
            "slow generation",
            "idle gpu",
            "waiting",
            "longest completion",
            "long completion",
            "holds up",
            "slowest rollout",
        ),
    ),
    "several_rewards": Problem(
        "Several rewards",
        "The reward has several parts of different size or spread, and training improves only the largest.",
        (
            "several rewards",
            "multiple rewards",
            "reward scale",
            "reward weights",
            "format reward",
            "length reward",
            "dwarfs",
            "penalty accuracy",
            "drowns",
        ),
    ),
    "agents": Problem(
        "Agents and turns",
        "A rollout is several turns in an environment or with tools, and one reward at the end has to credit all of "
        "them.",
        ("agent", "turns", "tools", "tool calls", "environment", "credit assignment", "multi-turn", "sub-agents"),
    ),
    "stale": Problem(
        "Stale rollouts",
        "Rollouts are trained one or more updates after they were sampled: asynchronous training, replay, many updates "
        "per batch. Importance ratios spread and clipping drops tokens. Where only trainer and engine differ, masked "
        "importance sampling (IcePop) is an option of the host: `vllm_importance_sampling_mode: token_mask` in TRL, "
        "`algorithm.rollout_correction.rollout_rs=token_k1` in verl.",
        (
            "stale",
            "asynchronous",
            "off-policy",
            "replay",
            "importance ratio",
            "old rollouts",
            "lag",
            "icepop",
            "masked importance sampling",
            "engine mismatch",
        ),
    ),
    "length": Problem(
        "Length",
        "Completions get longer than the answer needs, or much of the update goes to tokens that teach nothing.",
        ("length", "too long", "overthinking", "verbose", "token cost", "truncated"),
    ),
    "no_verifier": Problem(
        "No verifiable reward",
        "No program can check the answer: writing, chat, unlabelled prompts, open-ended tasks.",
        ("no verifier", "no labels", "judge", "preference", "writing", "open-ended", "unlabelled", "unverifiable"),
    ),
    "weak_reward": Problem(
        "Rewards that miss something",
        "The reward checks the final answer only, so guesses and wrong steps that end in the right answer are rewarded "
        "like sound work.",
        (
            "flawed reasoning",
            "wrong steps",
            "wrong reasoning",
            "wrong reasons",
            "false positives",
            "lucky guess",
            "guessing",
            "reward hacking",
            "process errors",
        ),
    ),
    "few_prompts": Problem(
        "Few prompts",
        "The dataset is small, or of mixed difficulty or domains, and it matters which prompts get the rollouts.",
        (
            "few prompts",
            "small dataset",
            "data efficiency",
            "curriculum",
            "difficulty",
            "domains",
            "prompt selection",
            "only prompts",
        ),
    ),
    "few_rollouts": Problem(
        "Few rollouts per prompt",
        "Memory or time allow only one to eight rollouts per prompt, so the baseline of a group is noisy.",
        ("few rollouts", "small groups", "noisy baseline", "one rollout", "single rollout", "num_generations"),
    ),
    "exploration": Problem(
        "Entropy and exploration",
        "The policy's entropy falls early, rollouts of a prompt are near copies, or hard prompts are never solved.",
        ("entropy", "collapse", "exploration", "diversity", "pass@k", "plateau", "near copies", "never solved"),
    ),
    "forgetting": Problem(
        "Forgetting",
        "Training on one task costs abilities of the model that the reward does not measure.",
        ("forgetting", "alignment tax", "kl", "regression", "retention"),
    ),
    "masked_diffusion": Problem(
        "Masked diffusion language models",
        "The model fills in masks in any order instead of writing from left to right, so neither a host's engine nor "
        "its log-probs fit.",
        ("diffusion language model", "masked diffusion", "masks", "llada", "dream", "bidirectional", "unmasking"),
    ),
    "wrong_rewards": Problem(
        "Wrong rewards",
        "The reward may pay for wrong answers on some prompts: a bug, old labels, data from several hands. The mean "
        "reward does not show it; `rl-plugins audit` may.",
        (
            "wrong reward",
            "reward bug",
            "inverted",
            "wrong labels",
            "bad labels",
            "poisoned",
            "backdoor",
            "trust reward",
        ),
    ),
}
