"""`rl-plugins audit`: looks for wrong rewards in the functions and the dataset of a run, before a model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_plugins.commands.shared.options import HostName, OfRun
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim, write_text

if TYPE_CHECKING:
    from rl_plugins.core.rollouts import Run

CRITICAL, NOTHING_LOOKED_AT = 1, 3  # exit statuses; 2 is a run that is refused


def audit(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG | -- OVERRIDES...", help="Your run.", show_default=False),
    ] = None,
    host: OfRun = HostName.trl,
    out: Annotated[Path | None, typer.Option(help="Folder for report.html and report.json.")] = None,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Dataset rows that are looked at; of a larger dataset a random sample.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of samples and of wrong answers.")] = 0,
    answer_column: Annotated[
        str,
        typer.Option(
            help="Column of the right answer.", show_default="ground_truth, answer, solution, target, label or gold"
        ),
    ] = "",
    gold_renderer: Annotated[
        str | None,
        typer.Option(help="Function module:name(answer, row) that writes an answer as a completion."),
    ] = None,
    declared: Annotated[
        list[str] | None,
        typer.Option(help="Feature of the prompt that the reward may depend on, e.g. length; may be repeated."),
    ] = None,
    tol_stochastic: Annotated[
        float, typer.Option(min=0, help="Difference of two calls that is allowed, as a share of the reward's span.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: what --out writes into report.json.")] = False,
) -> None:
    """Find wrong rewards before training, in the reward functions and in the dataset.

    No model is loaded. The reward functions are called on answers that are known to be right or wrong.

    \b
    What is looked at:
      Gold contrast: the right answer must get more than wrong ones, in every row.
      Metamorphic: changes of the prompt that do not matter must leave the reward as it is.
      Determinism: the reward must be the same twice, in another order, and alone.
      Near-duplicates: nearly equal prompts should have equal answers and rewards.
      Source: the code should not negate a value where it looks at the prompt.

    \b
    What a finding means:
      critical   The reward is wrong, on some rows or on all.
      warn       This may be meant. Look at it.
      info       For your information.

    \b
    Exit status:
      0   No critical finding.
      1   A critical finding.
      2   The run is refused: something named does not exist, or does not fit.
      3   Nothing could be looked at: no reward function can be called here, or no right answers.

    An audit without findings is no proof: it looks where errors usually are. The method `reward_audit` goes on
    looking while the model trains. docs/audit.md explains each finding.

    \b
    A run of TRL, by its config; further options go to `trl grpo`:
      rl-plugins audit run.yaml --out audit

    \b
    A run of verl, by its overrides or by the whole command:
      rl-plugins audit --host verl --out audit -- data.train_files=train.parquet \\
        reward.custom_reward_function.path=reward.py ...
    """
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    from rl_plugins.commands.audit.report import as_html, plain, print_report
    from rl_plugins.core.params import resolve_callable
    from rl_plugins.runtime.bars import Bars
    from rl_plugins.tools.audit import Options, preflight
    from rl_plugins.tools.audit.metamorphic import FEATURES

    for name in declared or ():
        if name not in FEATURES:
            raise ConfigError(f"--declared {name} is given; allowed: {', '.join(FEATURES)}.")
    run = _run(host, words or [])
    if out is not None:
        claim(out, "audit")
    options = Options(
        answer_column=answer_column,
        max_rows=max_rows,
        seed=seed,
        declared_prompt_features=tuple(declared or ()),
        tol_stochastic=tol_stochastic,
        gold_renderer=resolve_callable(gold_renderer, "gold_renderer") if gold_renderer else None,
    )
    console = Console(stderr=as_json)
    bar = Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} completions scored"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        rows = min(run.dataset_size or 0, options.max_rows)
        task = bar.add_task("reading", total=rows * (1 + options.wrong_answers))
        report = preflight(run, options, lambda part, n: bar.update(task, advance=n, description=part)).report
    if as_json:
        typer.echo(json.dumps(plain(report, options), indent=2))
    else:
        print_report(console, report)
    if out is not None:
        write_text(out / "report.json", json.dumps(plain(report, options), indent=2) + "\n")
        write_text(out / "report.html", as_html(report, options))
        console.print(Text(f"Written: {out / 'report.html'} and {out / 'report.json'}"))
    raise typer.Exit(CRITICAL if report.critical else 0 if report.looked else NOTHING_LOOKED_AT)


def _run(host: HostName, words: Sequence[str]) -> Run:
    if host == HostName.verl:
        from rl_plugins.verl.offline import run_of_words

        if not words:
            raise ConfigError("No run is given. Write its overrides: rl-plugins audit --host verl -- OVERRIDES")
        return run_of_words(words)
    from rl_plugins.trl.commands.offline import run_of_config

    if not words or words[0].startswith("-"):
        raise ConfigError("No config is given. Write the YAML file of the run: rl-plugins audit run.yaml")
    return run_of_config(["--config", *words])
