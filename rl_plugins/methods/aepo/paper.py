"""Where AEPO comes from."""

from __future__ import annotations

from rl_plugins.method import Paper

PAPER = Paper(
    "2510.14545",
    "Agentic Entropy-Balanced Policy Optimization",
    "Guanting Dong and Licheng Bao and Zhongyuan Wang and Kangzhi Zhao and Xiaoxi Li and Jiajie Jin and Jinghan Yang "
    "and Hangyu Mao and Fuzheng Zhang and Kun Gai and Guorui Zhou and Yutao Zhu and Ji-Rong Wen and Zhicheng Dou",
    2025,
    code="dongguanting/ARPO",
)
CODE_READ = (
    "The authors' repository was read in a public copy of November 2025 (wangevan6/ARPO), folder AEPO; the stored "
    "snapshots of the original are older than AEPO."
)
