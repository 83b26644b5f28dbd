"""ECHO (arXiv 2602.02150): reinforcement learning at test time, without labels. The bundle and its parts."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.echo.clip import EchoClip
from rl_plugins.methods.echo.confidence import PAPER, PAPER_SETTINGS
from rl_plugins.methods.echo.labels import EchoLabels
from rl_plugins.methods.echo.shaping import EchoShaping
from rl_plugins.methods.echo.tree import EchoTree

ECHO = Bundle(
    name="echo",
    parts={"echo_labels": {}, "echo_tree": {}, "echo_shaping": {}, "echo_clip": {}},
    paper=PAPER,
    about=(
        "The majority answer of a prompt's rollouts is its label (`echo_labels`). A rollout "
        "branches where the policy is uncertain, and unpromising branches may be cut "
        "(`echo_tree`). Advantages are larger on uncertain tokens (`echo_shaping`), and a "
        "rollout with an uncertain end has a wider clip range (`echo_clip`). The last two also "
        "work on ordinary rewards. The authors' scripts do not use the tree, and their code of "
        "it cannot be started: they ran `methods: [echo, -echo_tree]`. Their runs have a KL loss "
        "to the reference policy, learning rate 5e-7, temperature 0.8, batches of 8 prompts with "
        "32 rollouts each and 80 epochs."
    ),
    does="Trains without labels on majority answers, with branching rollouts and entropy-shaped updates",
    problems=("no_verifier", "exploration"),
    measured=(*EchoTree.measured, *EchoLabels.measured, *EchoShaping.measured, *EchoClip.measured),
    paper_settings=PAPER_SETTINGS,
)

__all__ = ["ECHO", "EchoClip", "EchoLabels", "EchoShaping", "EchoTree"]
