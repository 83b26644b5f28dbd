"""One run of a comparison in a process of its own: `rl-plugins trl masked_grpo` that also writes its logs."""

from __future__ import annotations

from rl_plugins.lab.compare.trl_worker import main

if __name__ == "__main__":
    main("rl_plugins.trl.commands.masked_script")
