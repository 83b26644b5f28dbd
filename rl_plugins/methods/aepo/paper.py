"""Where AEPO comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_plugins.method import Paper

PAPER = Paper(
    "2510.14545",
    "Agentic Entropy-Balanced Policy Optimization",
    "Guanting Dong and Licheng Bao and Zhongyuan Wang and Kangzhi Zhao and Xiaoxi Li and Jiajie Jin and Jinghan Yang "
    "and Hangyu Mao and Fuzheng Zhang and Kun Gai and Guorui Zhou and Yutao Zhu and Ji-Rong Wen and Zhicheng Dou",
    2025,
    code="dongguanting/ARPO",
)
PAPER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "trl": {
        "num_generations": 12,
        "generation_batch_size": 768,
        "gradient_accumulation_steps": 12,
        "num_train_epochs": 5,
        "max_completion_length": 6192,
        "epsilon": 0.2,
    },
    "verl": {
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.rollout.n": 12,
        "trainer.total_epochs": 5,
        "data.max_prompt_length": 2000,
        "data.max_response_length": 6192,
    },
}
CODE_READ = (
    "The authors' repository was read in a public copy of November 2025 (wangevan6/ARPO), folder AEPO; the stored "
    "snapshots of the original are older than AEPO."
)
