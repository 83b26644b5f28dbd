"""`rl-plugins trl`: TRL's own commands, with methods or a loss of ours."""

from __future__ import annotations

import contextlib
import io

import typer

from rl_plugins.commands.shared.options import LOOK
from rl_plugins.core.errors import ConfigError

app = typer.Typer(help="Run TRL with methods, or with a loss for supervised training.", **LOOK)

_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_ANYTHING)
def grpo(ctx: typer.Context) -> None:
    """Run `trl grpo`; adds --methods, --method_params and --dry-run."""
    _run(ctx.args, masked=False)


@app.command("masked_grpo", context_settings=_ANYTHING)
def masked_grpo(ctx: typer.Context) -> None:
    """Run `trl grpo` on a masked diffusion language model; adds its options, --methods and --dry-run."""
    _run(ctx.args, masked=True)


@app.command(context_settings=_ANYTHING)
def sft(ctx: typer.Context) -> None:
    """Run `trl sft`; adds --loss_type otr and its --otr_* options."""
    from rl_plugins.trl.commands.script import SFT, launch

    raise typer.Exit(launch(ctx.args, SFT))


def _run(words: list[str], masked: bool) -> None:
    argv = [word for word in words if word not in ("--dry-run", "--dry_run")]
    if argv != words:
        from rl_plugins.commands.doctor import dry_run

        raise typer.Exit(dry_run(argv, masked))
    from rl_plugins.trl.commands.script import GRPO, MASKED_GRPO, launch

    try:
        raise typer.Exit(launch(argv, MASKED_GRPO if masked else GRPO))
    except ConfigError as e:  # all problems are told at once
        from rl_plugins.trl.commands.doctor import print_run

        with contextlib.redirect_stdout(io.StringIO()):
            problems = print_run(argv, None, masked)
        raise ConfigError("\n".join(problems or [str(e)])) from None
