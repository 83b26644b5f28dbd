"""The batch sizes at which one gradient estimate overtakes another."""

from __future__ import annotations

import math


def break_even(
    direction: float, noise: float, than_direction: float, than_noise: float, rollouts: float
) -> tuple[float, float]:
    """Batches, from and up to so many rollouts, in which the first estimate makes more progress than the second.

        progress(n) = d |d| / (1 + c / n),   c = noise times rollouts

    Args:
        direction, noise: of the first estimate; noise as measured at `rollouts`.
        than_direction, than_noise: of the second.

    Returns:
        (0, inf): at any size; (inf, inf): at none.
    """
    a, b = direction * abs(direction), than_direction * abs(than_direction)
    c, e = noise * rollouts, than_noise * rollouts
    slope, offset = a - b, b * c - a * e  # ahead where slope n > offset
    if slope == 0:
        return (0.0, math.inf) if offset < 0 else (math.inf, math.inf)
    edge = offset / slope
    if slope > 0:
        return max(edge, 0.0), math.inf
    return (0.0, edge) if edge > 0 else (math.inf, math.inf)
