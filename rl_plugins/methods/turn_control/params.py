"""Parameters of `turn_control`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl_plugins import ConfigError, param
from rl_plugins.core.params import above, has_effect
from rl_plugins.kit.agents import AgentParams

REMINDER = "ENVIRONMENT REMINDER: You have {remaining} turns left to complete the task."
EXTENSION = (
    "ENVIRONMENT REMINDER: You have used up all turns but have not yet completed the task. You are granted an "
    "additional {extension} turns to continue and complete the task."
)
_LIMITED = {"strategy": ("fixed", "dynamic")}
_CALIBRATED = ({**_LIMITED, "calibration": ("freeze", "rolling")}, {**_LIMITED, "calibration": None, "limit": None})
_EXTENDED = {"strategy": "dynamic", "max_extensions": above(0)}
_AFTER = [{**how, "strategy": "dynamic", "extension": None} for how in _CALIBRATED]
_ROLLING, _REMINDED = {**_LIMITED, "calibration": "rolling"}, {**_LIMITED, "remind_from": (None, above(0))}


@dataclass(frozen=True)
class TurnControlParams(AgentParams):
    strategy: Literal["unlimited", "fixed", "dynamic"] = param(
        "fixed", "limit of turns: hard_cap only, a fixed limit, or a limit with extensions"
    )
    hard_cap: int = param(50, "most turns of an episode with any limit", ge=1)
    limit: int | None = param(
        None, "limit of turns before an extension; none: from the calibration", ge=1, only_if=_LIMITED
    )
    extension: int | None = param(
        None, "turns of an extension; none: up to T of `last_percentile`, in equal parts", ge=0, only_if=_EXTENDED
    )
    max_extensions: int = param(1, "most extensions of an episode", ge=0, only_if={"strategy": "dynamic"})
    should_extend: Callable[..., Any] | None = param(
        None, "function should_extend(environment), asked at the limit; a failed call means no", only_if=_EXTENDED
    )
    calibration: Literal["off", "freeze", "rolling"] | None = param(
        None, "rule that learns the limit; none: off with a `limit`, else freeze", only_if=_LIMITED
    )
    percentile: float | None = param(
        None, "percentile that is the limit; none: 75 (fixed), 50 (dynamic)", ge=0, le=100, only_if=_CALIBRATED
    )
    last_percentile: float = param(75.0, "percentile that is the limit after extensions", ge=0, le=100, only_if=_AFTER)
    calibration_episodes: int = param(64, "episodes before the first calibration", ge=1, only_if=_CALIBRATED)
    window: int = param(512, "number of latest episodes that count", ge=1, only_if=_CALIBRATED)
    update_every: int = param(10, "batches between two calibrations", ge=1, only_if=_ROLLING)
    min_turns: int = param(1, "smallest limit that the calibration sets", ge=1, only_if=_CALIBRATED)
    remind_from: int | None = param(
        None, "turns left at which reminders begin; none: all turns; 0: never", ge=0, only_if=_LIMITED
    )
    reminder: str = param(REMINDER, "text of the reminder; may hold {remaining}, {used}, {limit}", only_if=_REMINDED)
    extension_text: str = param(EXTENSION, "text about {extension} more turns; empty: none", only_if=_EXTENDED)
    unfinished: Literal["grade", "mask"] = param(
        "grade", "treatment of rows cut off: graded, or masked (out of the update)"
    )

    def check(self) -> None:
        super().check()
        if self.strategy != "unlimited" and self.how == "off" and self.limit is None:
            raise ConfigError(
                "`calibration` is off and `limit` is not given. Give `limit`, or set "
                "`calibration` to freeze or rolling."
            )
        if has_effect(self, "last_percentile") and self.first_percentile > self.last_percentile:
            raise ConfigError(
                f"`percentile` is {self.first_percentile:g}, above `last_percentile` = {self.last_percentile:g}; "
                f"the limit after an extension cannot be the lower one."
            )
        if has_effect(self, "window") and self.calibration_episodes > self.window:
            raise ConfigError(
                f"`calibration_episodes` is {self.calibration_episodes}, but only the last `window` = "
                f"{self.window} episodes are kept. Raise `window` or lower `calibration_episodes`."
            )
        most = (self.limit or 0) + (self.extension or 0)
        if most > self.hard_cap:
            raise ConfigError(
                f"`limit`{' and `extension` are' if self.extension else ' is'} {most} turns, above `hard_cap` = "
                f"{self.hard_cap}, which no episode exceeds. Raise `hard_cap`, or lower the "
                f"{'extension' if self.extension else 'limit'}."
            )
        if has_effect(self, "min_turns") and self.min_turns > self.hard_cap:
            raise ConfigError(f"`min_turns` is {self.min_turns}, above `hard_cap` = {self.hard_cap}.")
        for name, text, known in (
            ("reminder", self.reminder, {"remaining": 1, "used": 0, "limit": 1}),
            ("extension_text", self.extension_text, {"extension": 1}),
        ):
            try:
                text.format(**known)
            except (KeyError, IndexError, ValueError, AttributeError) as e:
                raise ConfigError(
                    f"`{name}` is {text!r} and cannot be filled in ({type(e).__name__}: {e}). It may hold "
                    f"{', '.join(f'{{{k}}}' for k in known)}; other braces are written twice."
                ) from None

    @property
    def how(self) -> str:
        """How limits are calibrated."""
        if self.strategy == "unlimited":
            return "off"
        return self.calibration or ("freeze" if self.limit is None else "off")

    @property
    def first_percentile(self) -> float:
        return (50.0 if self.strategy == "dynamic" else 75.0) if self.percentile is None else self.percentile
