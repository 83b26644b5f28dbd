"""A class that does not fit the contract: a hook with a typing error in its name."""

from __future__ import annotations

from rl_plugins import Method, Rollouts


class DummyMisfit(Method):
    """Source: none, this is for tests."""

    name = "dummy_misfit"
    fidelity = "paper"

    def advantage(self, rollouts: Rollouts) -> None:
        """Never called: the hook is `advantages`."""
