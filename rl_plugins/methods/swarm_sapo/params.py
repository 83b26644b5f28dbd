"""Parameters of `swarm_sapo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import ConfigError, MethodParams, param
from rl_plugins.core.errors import shown
from rl_plugins.core.params import GIVEN, Is, above
from rl_plugins.methods.swarm_sapo.packages import NODE

TAKES = {"external_groups": above(0)}
OVER_HTTP = Is("an HTTP URL", lambda value: str(value).startswith(("http://", "https://")))
_HTTP, _PLACE = {"exchange": OVER_HTTP}, {"exchange": GIVEN}
Function = Callable[..., Any] | None


@dataclass(frozen=True)
class SwarmParams(MethodParams):
    exchange: str = param("", "directory, URL of fsspec (s3://bucket/swarm) or HTTP URL of the exchange; required")
    node: str = param("", "name of this node, another one than those of all others; required")
    external_groups: int = param(4, "J, groups of others per batch, of 8 in the paper; 0: only publish", ge=0)
    spare_groups: int | None = param(
        None, "candidates beyond J; none: J (0 in asynchronous modes) (ours)", ge=0, only_if=TAKES
    )
    select_by: Literal["uniform", "sample", "total_reward"] = param(
        "uniform", "rule: unequal rewards (paper), any (rl-swarm) or largest total (genrl)", only_if=TAKES
    )
    external_weight: float = param(1.0, "factor on the advantages of external groups (ours)", ge=0, only_if=TAKES)
    max_age: int | None = param(4, "batches that a package waits at most; none: no limit (ours)", ge=0, only_if=TAKES)
    publish_groups: int | None = param(None, "most own groups that are published per batch; none: all", ge=0)
    sender_quota: int = param(64, "most packages of a sender that wait (ours)", ge=1, only_if=TAKES)
    inbox_groups: int = param(512, "most packages that wait; the oldest leave (ours)", ge=1, only_if=TAKES)
    max_characters: int = param(20_000, "most characters of a completion or prompt (ours)", ge=1, only_if=TAKES)
    max_prompt_tokens: int = param(2048, "most tokens of a foreign prompt (ours)", ge=1, only_if=TAKES)
    max_file_bytes: int = param(4_000_000, "most bytes of a file that is read or written (ours)", ge=1000)
    keep_files: int = param(64, "number of own files that stay in the exchange (ours)", ge=1)
    accept: Function = param(
        None, "function accept(package): whether the question is usable; none: all that fit", only_if=TAKES
    )
    timeout: float = param(10.0, "time limit of one reading or writing of the exchange, in seconds (ours)", gt=0)
    prompt_column: str = param("prompt", "dataset column with the prompt")
    key_env: str = param("", "environment variable with the key of an HTTP endpoint; empty: no key", only_if=_HTTP)
    transport: Function = param(
        None, "function transport(exchange): an object with put, names, get, remove", only_if=_PLACE
    )

    def check(self) -> None:
        if self.node and not NODE.fullmatch(self.node):
            raise ConfigError(
                f"`node` is {shown(self.node)}; it must be 1 to 64 letters, digits, `_` or `-`, and not begin with `-`."
            )
