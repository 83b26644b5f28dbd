"""The command `rl-plugins`. What a command does is in `rl_plugins/commands/`, which is loaded when it is called."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rl_plugins.commands.heads import app as heads_app
from rl_plugins.core.errors import ConfigError, RLPluginsError


class _Commands(TyperGroup):
    """Turns errors of rl-plugins into one paragraph on stderr and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RLPluginsError as e:
            typer.echo(f"rl-plugins: {e}", err=True)
            raise typer.Exit(2) from None


_LOOK = {"rich_markup_mode": None, "no_args_is_help": True, "add_completion": False}
app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, **_LOOK)  # type: ignore[arg-type]
trl_app = typer.Typer(help="Run TRL with methods, or with a loss for supervised training.", **_LOOK)  # type: ignore[arg-type]
app.add_typer(trl_app, name="trl")
app.add_typer(heads_app, name="heads")


@app.callback()
def main() -> None:
    """Run methods of RL post-training papers as plugins of TRL and verl."""


class _Host(enum.StrEnum):
    trl = "trl"
    verl = "verl"


@app.command("list")
def list_methods(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hooks: Annotated[bool, typer.Option("--hooks", help="Show the hooks, papers and hosts instead.")] = False,
) -> None:
    """List all methods and bundles by the problem they answer."""
    from rl_plugins.cards.listing import print_list

    print_list(json, hooks)


@app.command()
def info(method: Annotated[str, typer.Argument(help="Name of a method or bundle.")]) -> None:
    """Show everything about one method: update rule, parameters, costs, measurements, how to use it."""
    from rl_plugins.cards.info import print_info

    print_info(method)


@app.command()
def suggest(
    text: Annotated[str | None, typer.Option("--for", help='Problem in your words: "groups of equal rewards".')] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Logs of a run: its folder, trainer_state.json, or a .jsonl file.")
    ] = None,
    host: Annotated[
        _Host | None, typer.Option(help="Host of the run.", show_default="that of the logs, or trl")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Suggest methods for the problem of a run.

    Without --for and --logs it asks, if it runs in a terminal.
    """
    from rl_plugins.commands.suggest import suggest as answer

    answer(text, logs, None if host is None else host.value, json)


@app.command()
def check(
    method: Annotated[
        str, typer.Argument(help='Name of a method, or "module:Class" of a class that is not installed yet.')
    ],
    params: Annotated[str | None, typer.Option(help="Parameters as JSON.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Dataset rows as .jsonl, for columns the method reads.")] = None,
) -> None:
    """Test a method against the contract that every method keeps."""
    from rl_plugins.commands.check import check_and_print

    raise typer.Exit(check_and_print(method, params, rows))


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the method, e.g. my_method.")],
    hook: Annotated[list[str] | None, typer.Option(help="Hook to start with; may be repeated.")] = None,
    into: Annotated[Path, typer.Option(help="Folder in which the package is made.")] = Path("."),
) -> None:
    """Start a package with a method of your own."""
    from rl_plugins.commands.scaffold import create

    create(name, hook or ["advantages"], into)


@app.command("train-adapter")
def train_adapter(
    embeddings: Annotated[
        Path, typer.Argument(help="File of embeddings (.safetensors or .npy) with a row per prompt.")
    ],
    rates: Annotated[
        Path,
        typer.Argument(help="File of pass rates (.csv or .jsonl): row, pass_rate, and model if there are several."),
    ],
    out: Annotated[Path, typer.Argument(help="File that is written (.safetensors).")],
    references: Annotated[int, typer.Option(min=2, help="Number of prompts that a prediction is made from.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the pass rates.")] = 20,
    hidden: Annotated[int, typer.Option(min=1, help="Size of the projections.")] = 896,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the order of the pass rates.")] = 0,
) -> None:
    """Train the adapter of `dots`, which predicts pass rates of prompts.

    A pass rate is a number from 0 to 1, of any model on any of the prompts; `row` is the prompt's row in the file of
    embeddings. The more models the pass rates come from, the better the adapter transfers to a policy in training. For
    some thousands of prompts training takes minutes on a CPU. Nothing is downloaded.

    \b
    Write the embeddings (row i belongs to dataset row i; for example a frozen model's mean over tokens):
      from rl_plugins.methods.dots import save_embeddings
      from rl_plugins.runtime.fingerprint import fingerprint
      save_embeddings("embeddings.safetensors", array, fingerprint(train_dataset))

    \b
    Then:
      rl-plugins train-adapter embeddings.safetensors rates.csv adapter.safetensors
      rl-plugins trl grpo --config run.yaml --methods dots --method_params
        '{"dots": {"embeddings": "embeddings.safetensors", "adapter": "adapter.safetensors"}}'
    """
    from rl_plugins.commands.train_adapter import train

    train(embeddings, rates, out, references, epochs, hidden, seed)


class _Weights(enum.StrEnum):
    equal = "equal"
    sce = "sce"


@app.command()
def fuse(
    base: Annotated[Path, typer.Argument(help="Model folder that all experts were trained from.")],
    experts: Annotated[
        list[str],
        typer.Argument(metavar="EXPERT...", help="Model folders, or NAME=FOLDER. The name is part of the seed."),
    ],
    out: Annotated[Path, typer.Option(help="Folder that is written. It must not exist, or be empty.")],
    normalize: Annotated[
        bool, typer.Option(help="Make the L2 norms of the experts' deltas equal, tensor by tensor [inferred].")
    ] = True,
    keep: Annotated[float, typer.Option(help="Probability that an element survives the dropout [inferred].")] = 0.9,
    select_topk: Annotated[
        float, typer.Option(help="Share of elements that stay, by variance over experts; 1 is all [inferred].")
    ] = 1.0,
    erase: Annotated[bool, typer.Option(help="Drop signs against the majority, element by element.")] = True,
    weights: Annotated[
        _Weights, typer.Option(help="Weights of the experts: equal, or SCE's, by mean square [inferred].")
    ] = _Weights.equal,
    seed: Annotated[int, typer.Option(help="Seed of the dropout.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
) -> None:
    """Fuse experts that were trained from one base into one model (DORA, arXiv 2509.18883).

    \b
    What an expert learned is its delta: expert - base. The steps for every tensor:
      1. Normalize: deltas of all experts get the same size.
      2. Dropout: each element survives with probability --keep and is divided by it (DARE).
      3. Select: elements on which the experts agree are dropped, with --select-topk below 1 (SCE).
      4. Erase: elements whose sign is not that of the sum over experts are dropped (SCE).
      5. Combine: base + weighted mean of the deltas that survived.

    The paper names steps 1, 2 and 4. It does not state what is marked [inferred]; these values are ours.

    Folders hold safetensors files as `save_pretrained` writes them, sharded or not. Memory holds one tensor per expert
    in float32, and one more with --select-topk below 1. The same seed and names give the same bytes. Dtype, files,
    config and tokenizer are those of the base. Tensors of integers are copied from the base.

    \b
    Look first, then fuse:
      rl-plugins fuse sft math=runs/math code=runs/code --out fused --dry-run
      rl-plugins fuse sft math=runs/math code=runs/code --out fused

    \b
    The plain mean of the experts:
      rl-plugins fuse sft math=runs/math code=runs/code --out mean --no-normalize --keep 1 --no-erase

    docs/fusion.md has an example by hand, memory and time, and our measurement: not clearly better than the mean.
    """
    from rl_plugins.commands.fuse import fuse_folders
    from rl_plugins.tools.fusion import FusionRule

    rule = FusionRule(normalize, keep, select_topk, erase, weights.value, seed)
    fuse_folders(base, experts, out, rule, dry_run)


@app.command("mode-pairs")
def mode_pairs(
    attempts: Annotated[Path, typer.Argument(help="Table of attempts (.parquet, .jsonl or .csv).")],
    out: Annotated[Path, typer.Argument(help="File of the pairs (.parquet or .jsonl).")],
    template: Annotated[
        str | None,
        typer.Option(help="The one prompt of all pairs; {prompt} stands for the problem.", show_default="see below"),
    ] = None,
    direct: Annotated[str, typer.Option(help="Name of the mode without reasoning.")] = "direct",
    reasoning: Annotated[str, typer.Option(help="Name of the mode with reasoning.")] = "cot",
    threshold: Annotated[float, typer.Option(help="Lowest number in `verified` that is a right attempt.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the choice among several attempts.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
) -> None:
    """Make preference pairs that teach a model when to reason, for TRL's DPOTrainer.

    A row of the table is one attempt: `prompt` (a text or messages), `mode` (direct or cot), `completion` and
    `verified` (true, false, a number, or empty). Make several attempts per problem in each mode with the base model; 32
    is our guess of the paper's number.

    \b
    The rules, a pair for each problem at most (EconProver, arXiv 2509.12603):
      A direct attempt is right:           it is preferred to an attempt with reasoning.
      Only attempts with reasoning are:    one is preferred to a wrong direct attempt.
      No attempt is right:                 no pair.

    What is preferred was always verified. The same attempts and seed give the same pairs. All pairs have one prompt
    that permits both modes; without --template it is the problem and "Answer directly if you can. Reason step by step
    first only if you need to."

    \b
    Then train (examples/trl/mode_switching.py is a whole run, docs/heads.md explains it):
      rl-plugins mode-pairs attempts.parquet pairs/train.parquet
      trl dpo --dataset_name pairs --model_name_or_path MODEL --beta 0.1
    """
    from rl_plugins.commands.mode_pairs import write_pairs
    from rl_plugins.tools.preferences import TEMPLATE, PairRule

    write_pairs(attempts, out, PairRule(template or TEMPLATE, direct, reasoning, threshold, seed), force)


@app.command()
def doctor(
    host: Annotated[_Host, typer.Option(help="Host of the run.")] = _Host.trl,
    config: Annotated[Path | None, typer.Option(help="YAML config of a run of `trl grpo`.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Names of the methods: a b, or a,b.")] = None,
    method_params: Annotated[
        str | None, typer.Option("--method-params", "--method_params", help="Parameters of the methods as JSON.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", "--world_size", min=1, help="Number of processes, if it is not that of this machine."
        ),
    ] = None,
    words: Annotated[  # also the rest of --methods a b
        list[str] | None,
        typer.Argument(metavar="[-- OVERRIDES...]", help="Overrides of verl's command line, with --host verl."),
    ] = None,
) -> None:
    """Show versions, plugins, and what a run would do.

    Nothing is started. The exit status is 1 if something cannot take effect, with a list of all problems.

    \b
    A run of TRL:
      rl-plugins doctor --config run.yaml --methods vade mc_grpo

    \b
    A run of verl, by its overrides or by the whole command:
      rl-plugins doctor --host verl -- trainer.v1.trainer_mode=rl_plugins_sync "+rl_plugins.methods=[vade]" ...
      rl-plugins doctor --host verl -- python -m verl.trainer.main_ppo data.train_batch_size=64 ...
    """
    if host == _Host.verl:
        if config or methods or method_params or world_size:
            raise ConfigError(
                "--config, --methods, --method-params and --world-size are for TRL. Give a run of verl by its "
                'overrides: rl-plugins doctor --host verl -- "+rl_plugins.methods=[vade]" trainer.nnodes=2 ...'
            )
        from rl_plugins.commands.doctor import print_found
        from rl_plugins.verl import doctor as verl_doctor

        raise typer.Exit(verl_doctor.examine(words or [], print_found))
    from rl_plugins.commands.doctor import examine

    raise typer.Exit(examine(config, [*(methods or []), *(words or [])], method_params, world_size))


@app.command(context_settings={"ignore_unknown_options": True})
def audit(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG | -- OVERRIDES...", help="Your run.", show_default=False),
    ] = None,
    host: Annotated[_Host, typer.Option(help="Host of the run.")] = _Host.trl,
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
      critical   The reward is wrong on some rows. The exit status is 1.
      warn       This may be meant. Look at it.
      info       For your information.

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
    from rl_plugins.commands.audit import audit as run_audit
    from rl_plugins.tools.audit import Options
    from rl_plugins.tools.audit.metamorphic import FEATURES

    for name in declared or ():
        if name not in FEATURES:
            raise ConfigError(f"--declared {name} is given; allowed: {', '.join(FEATURES)}.")
    options = Options(
        answer_column=answer_column,
        max_rows=max_rows,
        seed=seed,
        declared_prompt_features=tuple(declared or ()),
        tol_stochastic=tol_stochastic,
    )
    raise typer.Exit(run_audit(host.value, words or [], out, options, gold_renderer))


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was made with `trace: true`.")],
    batch: Annotated[int | None, typer.Option(help="Generation batch whose groups are listed.", min=0)] = None,
    group: Annotated[int | None, typer.Option(help="Group of the batch whose rollouts are shown.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Other run to compare with; the same one compares its batches.")
    ] = None,
    other_batch: Annotated[int | None, typer.Option(help="Batch of the other run.", min=0)] = None,
    prompt: Annotated[int | None, typer.Option(help="Dataset row whose rollouts are compared.", min=0)] = None,
    html: Annotated[Path | None, typer.Option(help="Folder for a page that opens without a server.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on this machine, for large traces.")] = False,
    port: Annotated[int, typer.Option(help="Port of --serve; 0: a free one.", min=0, max=65535)] = 0,
) -> None:
    """Look at the trace of a run: batches, the groups of one, and what became of each rollout and why.

    Without options it prints the batches. --html writes a page with curves, tables and texts, --serve shows it.

    --compare shows the same prompts under two policies, and where their texts differ.

    A run writes a trace if its config says `trace: true` (TRL) or `+rl_plugins.trace=true` (verl).
    """
    from rl_plugins.commands.inspect import Wanted, show

    show(run, Wanted(batch, group, compare, other_batch, prompt, html, serve, port))


_SEEDS = typer.Option(help="Number of seeds (3), or the seeds (4,7,11).", show_default="3; demo with --host verl: 2")
_VS = typer.Option(help="Baseline; grpo is the host without methods.")
_JOBS = typer.Option(min=1, help="Runs at a time; with --host verl always 1.", show_default=False)
_BUDGET = typer.Option(help="Currency in which all arms get the same budget.")
_DRY = typer.Option("--dry-run", help="Print the plan and stop.")
_HOST = typer.Option(help="Host whose trainer runs.")


class _Currency(enum.StrEnum):
    steps = "steps"
    rows_trained = "rows_trained"
    tokens_decoded = "tokens_decoded"
    engine_seconds = "engine_seconds"
    model_passes = "model_passes"


def _one_job(jobs: int | None) -> None:
    if jobs not in (None, 1):
        raise ConfigError(f"--jobs {jobs} is given; runs of verl go one at a time. Leave --jobs out.")


@app.command()
def demo(
    methods: Annotated[list[str] | None, typer.Argument(help="Methods; `vade+mc_grpo` is one arm with both.")] = None,
    host: Annotated[_Host, _HOST] = _Host.trl,
    vs: Annotated[str, _VS] = "grpo",
    seeds: Annotated[str | None, _SEEDS] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="demo-results, or demo-results/verl"),
    ] = None,
    jobs: Annotated[int | None, _JOBS] = None,
    long: Annotated[bool, typer.Option("--long", help="Run more steps.")] = False,
    budget: Annotated[_Currency, _BUDGET] = _Currency.steps,
    dry_run: Annotated[bool, _DRY] = False,
) -> None:
    """Train methods and plain GRPO side by side on a small policy built here.

    Without METHODS it trains on two rewards of different size: plain GRPO, GDPO, and a control. With --host verl it
    trains vade.
    """
    from rl_plugins.commands import demo

    if host == _Host.verl:
        _one_job(jobs)
        folder = out or Path("demo-results/verl")
        demo.demo_verl(methods or ["vade"], vs, seeds or "2", folder, long, budget.value, dry_run)
        return
    seeds, folder, jobs = seeds or "3", out or Path("demo-results"), jobs or 2
    if methods:
        demo.demo(methods, vs, seeds, folder, jobs, long, budget.value, dry_run)
        return
    if vs != "grpo":
        raise ConfigError(f"--vs {vs} is given without a method. Name one: rl-plugins demo gdpo --vs {vs}")
    demo.headline(seeds, folder, jobs, long, budget.value, dry_run)


@app.command(context_settings={"ignore_unknown_options": True})
def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG METHOD... | METHOD... -- OVERRIDES...",
            help="Methods (`vade+mc_grpo` is one arm with both) and your run.",
            show_default=False,
        ),
    ],
    host: Annotated[_Host, _HOST] = _Host.trl,
    vs: Annotated[str, _VS] = "grpo",
    seeds: Annotated[str, typer.Option(help="Number of seeds (3), or the seeds (4,7,11).")] = "3",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("compare-results"),
    jobs: Annotated[int | None, _JOBS] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Logged value to compare; may be repeated.")] = None,
    launcher: Annotated[str, typer.Option(help='Launcher of TRL, e.g. "accelerate launch --num_processes 4".')] = "",
    method_params: Annotated[
        str | None, typer.Option("--method-params", "--method_params", help="Parameters as JSON.")
    ] = None,
    budget: Annotated[_Currency, _BUDGET] = _Currency.steps,
    attribute: Annotated[
        bool, typer.Option("--attribute", help="Train every subset of the methods, and print what each one brought.")
    ] = False,
    attribute_pairs: Annotated[
        int | None,
        typer.Option("--attribute-pairs", help="Train only the subsets along this many pairs of random orders."),
    ] = None,
    dry_run: Annotated[bool, _DRY] = False,
) -> None:
    """Compare methods with a baseline on your own run, under one budget, with intervals.

    \b
    A run of TRL, by its config; further options go to `trl grpo`:
      rl-plugins compare run.yaml vade mc_grpo --learning_rate 1e-6

    \b
    A run of verl, by its overrides or by the whole command:
      rl-plugins compare --host verl vade mc_grpo -- data.train_batch_size=64 trainer.test_freq=20 ...
    """
    from rl_plugins.commands import compare

    if host == _Host.verl:
        _one_job(jobs)
        if launcher:
            raise ConfigError("--launcher is for TRL; verl starts its own processes. Leave it out.")
        budgeted = (method_params, budget.value, dry_run, attribute, attribute_pairs)
        compare.compare_verl(words, vs, seeds, out, metric or [], *budgeted)
    else:
        budgeted = (method_params, budget.value, dry_run, attribute, attribute_pairs)
        compare.compare(words, vs, seeds, out, jobs or 1, metric or [], launcher, *budgeted)


@app.command()
def bench(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD...]", help="Arms: `mc_grpo`, `vade+mc_grpo`.", show_default=False),
    ] = None,
    cell: Annotated[list[str] | None, typer.Option(help="Cell; may be repeated.")] = None,
    host: Annotated[_Host, _HOST] = _Host.trl,
    dial: Annotated[str, typer.Option(help="All cells of a dial, e.g. noise.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Run every method that has a claim.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every arm. A verdict takes at least 8.")] = 8,
    until_decided: Annotated[
        bool, typer.Option("--until-decided", help="Add seeds to undecided claims, at most 16 in all.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each with one core.")] = 2,
    search: Annotated[
        bool,
        typer.Option("--search", help="Search the learning rate of the arm that lost, and decide the claim again."),
    ] = False,
    attribute: Annotated[
        bool, typer.Option("--attribute", help="Run every subset of the methods, and print what each one brought.")
    ] = False,
    stack: Annotated[
        bool, typer.Option("--stack", help="Search for the best stack of the methods, and confirm it on other seeds.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the raw results.")] = Path("bench-results"),
    against: Annotated[Path | None, typer.Option(help="Folder of other raw results to compare with.")] = None,
    publish: Annotated[Path | None, typer.Option(help="Checkout that keeps the results.", hidden=True)] = None,
    dry_run: Annotated[bool, _DRY] = False,
) -> None:
    """Compare methods on generated tasks with dials, and decide the claims of their papers.

    Every arm of a cell has the same small policy, prompts, seeds and budget. A run takes about half a minute of a core.
    What was finished is kept: the same command goes on.

    \b
    What there is:
      rl-plugins bench

    \b
    The claims of a method, and its neutral cell; then more seeds where they are undecided, and a searched learning rate
    for the side that lost:
      rl-plugins bench mc_grpo
      rl-plugins bench mc_grpo --until-decided --search

    \b
    Two methods and both together over the values of a dial, with four seeds:
      rl-plugins bench mc_grpo gdpo mc_grpo+gdpo --dial noise --seeds 4

    \b
    What each of three methods brings, and the best stack of them:
      rl-plugins bench vade mc_grpo minpro --cell staleness=3 --attribute
      rl-plugins bench vade mc_grpo minpro --cell staleness=3 --stack

    \b
    Whether verl agrees, after the same arms were run in TRL (minutes per run):
      rl-plugins bench mc_grpo --cell neutral --host verl --seeds 3
    """
    from rl_plugins.commands.bench import bench as run

    run(
        methods or [],
        cell or [],
        dial,
        every,
        seeds,
        until_decided,
        jobs,
        out,
        attribute,
        stack,
        against,
        publish,
        dry_run,
        host.value,
        search,
    )


@app.command()
def scale(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG | -- OVERRIDES...",
            help="YAML config of `trl grpo`; with --host verl a YAML file, a file with the command, or overrides.",
            show_default=False,
        ),
    ] = None,
    by: Annotated[int, typer.Option("--by", min=1, help="Factor on the samples per batch.")] = 2,
    host: Annotated[_Host, _HOST] = _Host.trl,
    out: Annotated[Path | None, typer.Option(help="File of the new config.", show_default="stdout")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", "--world_size", min=1, help="Number of processes, if not those of this machine."),
    ] = None,
) -> None:
    """Write the config of a run with more samples per batch, and say what changed and why.

    Use it before a run whose reward would stop rising, or to go on from a checkpoint's weights with larger batches. The
    recipe is that of arXiv 2603.06009: the mini-batch, the learning rate, the epochs and the clip range stay, so the
    number of optimizer steps per batch grows. Do not raise the learning rate with the batch. What the host counts in
    batches (length of the run, intervals, verl's schedule) is divided, so that it still counts the same samples. A
    batch must be a whole number of mini-batches.

    \b
    A run of TRL; the table goes to stdout, or to stderr where the config goes to stdout:
      rl-plugins scale run.yaml --by 4 --out larger.yaml
      rl-plugins trl grpo --config larger.yaml --dry-run

    \b
    A run of verl, by its overrides or a file:
      rl-plugins scale --host verl --by 4 --out larger.txt -- data.train_batch_size=64 ...
      rl-plugins scale command.txt --host verl --by 4 --out larger.txt
      xargs -a larger.txt python -m verl.trainer.main_ppo

    The method `ppo_million` logs how many samples a run has per unit of KL: `rl-plugins info ppo_million`.
    """
    from rl_plugins.commands.scale import scale as scaled

    scaled(words or [], by, host.value, out, force, world_size)


@app.command()
def export(
    method: Annotated[str, typer.Argument(help="Method, e.g. mc_grpo.")],
    host: Annotated[_Host, typer.Option(help="Host that gets the contribution.")],
    into: Annotated[Path, typer.Option(help="Checkout of the host's repository, or an empty folder.")],
    force: Annotated[bool, typer.Option("--force", help="Write over files that have another text.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files and stop.")] = False,
) -> None:
    """Write a method as a contribution to a host, without this package.

    \b
    TRL: an experimental trainer with tests, docs page and paper-index entry:
      rl-plugins export mc_grpo --host trl --into ~/trl

    \b
    verl: a folder of verl-recipe with code, script, tests and README:
      rl-plugins export aepo_clip --host verl --into ~/verl-recipe
    """
    from rl_plugins.commands.export import export as write

    write(method, host.value, into, force, dry_run)


@app.command(hidden=True)
def docs(
    root: Annotated[Path, typer.Argument(help="Folder of a checkout.")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="Check the pages and change nothing; status 1 if one is old.")
    ] = False,
) -> None:
    """Write every page that is made from the code."""
    from rl_plugins.lab import pages

    stale = pages.write(root, dry=check)
    for page in stale:
        typer.echo(page)
    raise typer.Exit(int(check and bool(stale)))


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@trl_app.command(context_settings=_ANYTHING)
def grpo(ctx: typer.Context) -> None:
    """Run `trl grpo`; adds --methods, --method_params and --dry-run."""
    dry = {"--dry-run", "--dry_run"} & set(ctx.args)
    argv = [a for a in ctx.args if a not in dry]
    if dry:
        from rl_plugins.commands.doctor import dry_run

        raise typer.Exit(dry_run(argv))
    from rl_plugins.trl.commands.script import launch

    raise typer.Exit(launch(argv))


@trl_app.command("masked_grpo", context_settings=_ANYTHING)
def masked_grpo(ctx: typer.Context) -> None:
    """Run `trl grpo` on a masked diffusion language model; adds its options, --methods and --dry-run."""
    dry = {"--dry-run", "--dry_run"} & set(ctx.args)
    argv = [a for a in ctx.args if a not in dry]
    if dry:
        from rl_plugins.commands.doctor import dry_run

        raise typer.Exit(dry_run(argv, masked=True))
    from rl_plugins.trl.commands.script import MASKED_GRPO, launch

    raise typer.Exit(launch(argv, MASKED_GRPO))


@trl_app.command(context_settings=_ANYTHING)
def sft(ctx: typer.Context) -> None:
    """Run `trl sft`; adds --loss_type otr and its --otr_* options."""
    from rl_plugins.trl.commands.script import SFT, launch

    raise typer.Exit(launch(ctx.args, SFT))


if __name__ == "__main__":
    app()
