"""Which methods act in which worlds, with the parameters of the comparison, and why the others act in none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.lab.quality.drive import QualityVariant
from rl_plugins.tools.gradient_quality import ExactWorld

TABLES = "rl_plugins.lab.quality.worlds.tables:"
BASELINE = "grpo"
MOST_PLAYED = 1024  # rollouts of a batch in which programs play: each takes milliseconds
EPOCHS = 2.0  # before the measurement, where prompts are remembered

HOST = [
    QualityVariant(BASELINE),
    *(QualityVariant(f"grpo, {g} rollouts", group=g) for g in (2, 4, 16, 32)),
    QualityVariant("dr_grpo", scale="none", loss="dr_grpo"),
    QualityVariant("reinforce, 1 rollout", group=1, scale="reinforce"),
]


def _one(name: str, label: str = "", group: int = 8, **options: Any) -> QualityVariant:
    """A method with these parameters; `scale`, `loss`, `warm` and `old` are the host's and ours."""
    own = {k: options.pop(k) for k in ("scale", "loss", "warm", "old") if k in options}
    return QualityVariant(name + (f", {label}" if label else ""), {name: options}, group, **own)


def _rows(low: float, high: float) -> list[QualityVariant]:
    """Decisions by rows: prompts, rollouts per prompt, baselines.

    Args:
        low, high: of the rewards.
    """
    never: dict[str, Any] = dict(reward_low=low, reward_high=high, cost=math.inf, group=4, scale="none")
    return [
        _one("mc_grpo", "3 rollouts", 3),
        _one("mc_grpo", "3 rollouts, clip 3", 3, advantage_clip=3.0),
        _one("mc_grpo", "7 rollouts", 7),
        _one("v0_5", "exact prior", prior="column", prior_column="prior", **never),
        _one("v0_5", "own history", prior="running_mean", warm=EPOCHS, **never),
        _one("mssr_baseline", "first visits", rho=0.9),
        _one("mssr_baseline", rho=0.9, warm=EPOCHS),
        _one("mssr_prompts", rho=0.9, warm=EPOCHS),
        _one("vade", warm=EPOCHS),
        _one("gdro_prompt", warm=EPOCHS),
        _one("gdro_rollout", warm=EPOCHS),
        _one("xrpo_allocate"),
        _one("pkpo", scale="none"),
        _one("pkpo", "8 of 16", 16, k=8, scale="none"),
        _one("max_rl"),
        _one("variance_filter"),
        _one("dars", "equal total", n_first=4, schedule="et"),
        _one("dars", "hardness-weighted", n_first=4, schedule="hw"),
        _one("difficulty_slices", "hardest slice", warm=EPOCHS),
        _one("linear_ts", column="domain", draws=4, warm=EPOCHS),
        _one("dots", embeddings=f"{TABLES}embeddings", references=64),
        _one("v0", "exact prior", prior="column", prior_column="prior"),
        _one("v0", "own history", prior="running_mean", warm=EPOCHS),
        _one("dart_rollouts", warm=EPOCHS),
        _one("dynamic_sampling"),
        _one("brorl"),
        _one("brorl", "32 rollouts", ramp=[[0, 32]]),
        QualityVariant("sol_rl", {"sol_rl_select": {}, "sol_rl_advantages": {}}),
    ]


def _binary(prompts: int, rollouts: int) -> list[QualityVariant]:
    """Those that count successes or votes.

    Args:
        prompts: of the world. rollouts: of a batch.
    """
    begin = math.ceil(EPOCHS * prompts / (rollouts // 8))
    return [
        _one("mssr_baseline", "without normalization", rho=0.9, normalize=False, warm=EPOCHS),
        _one("echo_labels", extract=f"{TABLES}answer_of"),
        _one("drive", "second phase", sizes=[1.0, 0.25], batches=[begin], warm=EPOCHS),
    ]


REWARDS = [
    *HOST,
    _one("gdpo"),
    _one("fission_grpo_reward", "first batches", correctness="right", format="format", length="brevity"),
]
JUDGED = [
    *HOST,
    _one("brpo", judge=f"{TABLES}better_of"),
    _one("fapo", judge=f"{TABLES}first_flaw", answer_column=None),
]
TOKENS = [
    _one("aepo_advantages"),
    _one("echo_shaping"),
    _one("mssr_shaping"),
    _one("xrpo_novelty"),
    _one("d3s", "first batches"),
    _one("drpo"),
    _one("dora_data"),
    _one("dars_breadth"),
    _one("gfpo"),
    QualityVariant("dapo: unequal groups only", {"brorl": {"norm_over": "none"}}),
]
SEQUENCES = [
    *HOST,
    *TOKENS,
    *_rows(0.0, 1.0),
]
PROGRAMS = [
    QualityVariant("branch_text", {"branch_text_rollout": {"places": [0, 1, 2]}, "branch_advantages": {}}),
    QualityVariant("branch_text, GRPO's advantages", {"branch_text_rollout": {"places": [0, 1, 2]}}),
    _one("latr", lookahead=[1, 2]),
    _one("echo_tree", min_depth=1, entropy_low=0.3, entropy_high=0.6, entropy_delta_threshold=0.0),
    QualityVariant("adhint", {"adhint_rollouts": {}, "adhint_advantages": {}, "adhint_gradients": {}}),
]
UPDATES = [
    QualityVariant(BASELINE),
    QualityVariant("no ratio", old="trained"),
    QualityVariant("cispo", loss="cispo"),
    _one("aepo_clip"),
    _one("echo_clip"),
    _one("m_grpo_ratio", loss="grpo"),
    _one("drpo"),
    _one("clip_cov", ratio=0.02),
    _one("kl_cov", ratio=0.02),
]
DELAY = [
    QualityVariant(BASELINE),
    QualityVariant("no ratio", old="trained"),
    QualityVariant("cispo", loss="cispo"),
    QualityVariant("tis", old="trained", tis=True),
    _one("minpro"),
    _one("dppo"),
    _one("decoupled_ppo"),
    _one("decoupled_ppo", "clamped", action="clamp"),
    _one("dart_tis"),
    _one("dora_loss"),
    _one("vcpo"),
    _one("vcpo", "learning rate unchanged", lr_scale="none"),
]
AGENTS = [
    *HOST,
    *TOKENS,
    *_rows(0.0, 1.0),
    _one("gigpo"),
    _one("hgpo"),
    _one("dart_advantages"),
    _one("dart_entropy"),
]
TEAM = [
    *HOST,
    _one("m_grpo", loss="grpo", sub_per_rollout=4),
    _one("m_grpo", "as in the code", sub_reward="outcome", align=False, ddof=1, std_eps=1e-6),
]
MASKED = [
    QualityVariant(BASELINE),
    _one("cj_grpo", "tokens alike", step_weight="tokens"),
    _one("cj_grpo"),
    _one("ass"),
    QualityVariant("ass, cj_grpo", {"ass": {}, "cj_grpo": {}}),
    _one("eoser"),
    QualityVariant("ass, eoser, cj_grpo", {"ass": {}, "eoser": {}, "cj_grpo": {}}),
]
PLAIN_BONUS: dict[str, Any] = dict(smooth_coeff=0.0, average="host", entropy_coeff=0.03)
TRAINING: Mapping[str, list[QualityVariant]] = {  # of many steps
    "deceptive": [
        *(v for v in HOST if v.label in (BASELINE, "grpo, 16 rollouts", "dr_grpo")),
        _one("epo"),
        _one("epo", "coefficient 0.03", entropy_coeff=0.03),
        _one("epo", "plain bonus of 0.03", **PLAIN_BONUS),
        _one("pkpo", scale="none"),
        _one("max_rl"),
        _one("aepo_advantages"),
        _one("echo_shaping"),
        _one("mssr_shaping"),
        _one("dars", "hardness-weighted", n_first=4, schedule="hw"),
    ],
    "curriculum": [
        QualityVariant(BASELINE),
        QualityVariant("grpo, twice the prompts", times=2),
        QualityVariant("grpo, twice the steps", longer=2),
        _one("vade"),
        _one("difficulty_slices"),
        _one("linear_ts", column="domain", draws=4),
        _one("dots", embeddings=f"{TABLES}embeddings", references=64),
        _one("drive", sizes=[1.0, 0.5, 0.25], batches=[20, 20]),
        _one("gdro_prompt"),
        _one("mssr_prompts", rho=0.9),
        _one("dynamic_sampling"),
        _one("dars", "hardness-weighted", n_first=4, schedule="hw"),
        _one("max_rl"),
    ],
}
NAMED = {
    "sequences": SEQUENCES,
    "agents": AGENTS,
    "team": TEAM,
    "rewards": REWARDS,
    "judged": JUDGED,
    "masked": MASKED,
}

_PROGRAM = "its program plays tools, environments or turns, or reads hidden states; the trees of sequences have none"
_GIVEN = "plans completions of older batches; the policy of a world does not move"
_TEXT = "reads or edits texts, which no world has"
_QUEUE = "decides which groups wait; what becomes of stale ones is in delay=n"
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("aepo_rollout", "arrol", "cleaner", "m_grpo_rollout", "rtv_pdr", "scope"), _PROGRAM),
    **dict.fromkeys(("turn_control", "ui_s1_rollout"), _PROGRAM),
    **dict.fromkeys(("branch_pruning", "branch_rollout", "sol_rl_explore"), "acts in diffusion; no world has it yet"),
    **dict.fromkeys(("dart_pool", "dora_reuse", "rollout_replay"), _GIVEN),
    **dict.fromkeys(("best_perm", "fission_grpo", "ps_grpo", "rubric", "swarm_sapo", "xrpo_seeds"), _TEXT),
    **dict.fromkeys(("opd", "opsd", "sdpo"), "learns from a teacher, which no world has"),
    "grpo_roc": "chooses among right rollouts by the quality of their text, which no world has",
    "training_free_grpo": "makes no gradient",
    "process_supervision": "learns from rewards of steps, and worlds reward whole rollouts",
    "reward_audit": "withdraws rewards that an audit of several functions finds unsound; no world has such functions",
    "ui_s1": "learns from recorded trajectories, and no world has recorded ones",
    "ppo_million": "needs several optimizer steps on a batch and many batches; worlds make one",
    **dict.fromkeys(("april", "areal_admission"), _QUEUE),
    **dict.fromkeys(("dart_length", "dora_length", "overlong"), "sets limits of tokens or turns, which no world obeys"),
    "rollart_redundancy": "saves time, and changes no gradient",
}


def variants_of(name: str, world: ExactWorld, rollouts: int) -> Sequence[QualityVariant]:
    """The variants that act in a world, for batches of so many rollouts."""
    if name.startswith("delay"):
        return DELAY
    if name.startswith("updates"):
        return UPDATES
    if name in NAMED:
        found = NAMED[name] + (PROGRAMS if world.is_tree and rollouts <= MOST_PLAYED else [])
    else:
        rewards = world.rewards @ world.reward_weights  # type: ignore[attr-defined]  # the others are tables
        found = [*HOST, *_rows(float(rewards.min()), float(rewards.max()))]
        found += _binary(len(world.pass_rate), rollouts) if name in ("binary", "skills") else []
    return [v for v in found if _reads(v) <= set(world.columns)]


def _reads(variant: QualityVariant) -> set[str]:
    """Columns of the dataset, which a world may lack."""
    named = {p[k] for p in variant.methods.values() for k in ("prior_column", "column") if k in p}
    return named | ({"seems"} if "dots" in variant.methods else set())
