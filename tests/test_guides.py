"""The guides: their code is run, their pages show the files, and what they say of numbers holds."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import re
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import rl_plugins
from rl_plugins import testing
from rl_plugins.commands.cli import app
from rl_plugins.commands.new.text import files
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import HOOKS, Method
from rl_plugins.core.rollouts import PromptPool
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.lab.pages.guides import with_code
from rl_plugins.testing.engine import TableEngine, make_prompt, run_program

ROOT = Path(__file__).parents[1]
CODE, PAGES = ROOT / "examples" / "guides", sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(CODE))
    yield
    for name in {file.stem for file in CODE.glob("*.py")}:
        sys.modules.pop(name, None)


def load(name: str) -> Any:
    return importlib.import_module(name)


# ---- pages and files


def test_each_page_shows_a_file():
    assert [page.name for page in PAGES if "<!-- code:" not in page.read_text()] == ["README.md"]


def test_every_class_and_function_of_the_guides_is_on_a_page():
    pages = "".join(page.read_text() for page in PAGES)
    shown = {name for of in re.findall("<!-- code: [^ ]+ (.*) -->", pages) for name in of.split()}
    made = {name for file in CODE.glob("*.py") for name in re.findall(r"^(?:class|def) (\w+)", file.read_text(), re.M)}
    assert made <= shown, made - shown
    files = set(re.findall("<!-- code: ([^ ]+)", pages))
    assert files == {file.name for file in CODE.iterdir() if file.is_file()}


def test_code_of_a_page(tmp_path):
    (tmp_path / "a.py").write_text('"""Doc."""\n\nimport os\n\nX = 1\n\n\n@f\ndef g():\n    return 1\n')
    page = "x\n<!-- code: a.py g X -->\nold\n<!-- end of the code -->\ny\n"
    with pytest.raises(ConfigError, match="Add it"):
        with_code(page, tmp_path)
    page = page.replace("old\n", "")
    made = with_code(page, tmp_path)
    assert "```python\n@f\ndef g():\n    return 1\n\n\nX = 1\n```" in made and with_code(made, tmp_path) == made
    assert "import os\n\nX = 1" in with_code(page.replace(" g X", ""), tmp_path)
    with pytest.raises(ConfigError, match="no `gg` at its top. Did you mean `g`?"):
        with_code(page.replace(" g X", " gg"), tmp_path)


# ---- every method keeps the contract

CLASSES = {
    **{f"methods:{name}": {} for name in re.findall(r"^class (\w+)\(Method", (CODE / "methods.py").read_text(), re.M)},
    "rl_plugins_rambling:Rambling": {},
    "rollout:SecondThought": {},
    "sampler:Halfway": {},
    "service:Judged": {"judge": lambda text: 5},
    "service:Steps": {"score": "service:longer_is_better"},
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_method_of_the_guides_keeps_the_contract(name):
    module, _, cls = name.partition(":")
    report = testing.check_method(getattr(load(module), cls), **CLASSES[name])
    assert all("arXiv" not in w for w in report.warnings)


def test_there_is_a_method_for_every_hook_and_a_section():
    claimed = [c.claims() for c in vars(load("methods")).values() if isinstance(c, type) and issubclass(c, Method)]
    assert [hooks for hooks in claimed if hooks] == [(hook,) for hook in HOOKS]
    text = (ROOT / "docs" / "guides" / "hooks.md").read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert list(sections) == [*HOOKS, "needs"]
    for hook in HOOKS:
        given = inspect.signature(getattr(Method, hook)).parameters.values()
        types = {str(p.annotation) for p in given} & set(rl_plugins.__all__)
        assert types, hook
        assert [t for t in types if f"](../reference.md#{t.lower()})" not in sections[hook]] == [], hook
    table = (ROOT / "docs" / "guides" / "methods.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\]\(hooks.md#\1\)", table, re.M) == list(HOOKS)


def test_what_the_methods_of_the_hooks_do():
    m = load("methods")
    rollouts = testing.make_rollouts([1.0, 0, 0, math.nan, 1, 1, 1, 1], truncated=torch.arange(8) == 1)
    assert m.CutOff().rewards(rollouts).nan_to_num(nan=9).tolist() == [1, -0.5, 0, 9, 1, 1, 1, 1]
    assert m.Mixed().select(rollouts).tolist() == [True] * 4 + [False] * 4
    assert m.LeaveOneOut().advantages(rollouts).tolist() == [1, -0.5, -0.5, 0, 0, 0, 0, 0]
    tokens = testing.make_tokens(rollouts, advantages=torch.tensor([2.0, -2] * 4))
    assert set(m.Gentle().shape(rollouts, tokens).advantages.tolist()) == {2.0, -1.0}
    assert m.FewTokens().before_update(testing.make_rows(rollouts, tokens)).lr_scale == 20 / 1024
    plan = m.Shorter(m.Shorter.Params(max_tokens=7)).plan(testing.make_plan())
    assert {row.max_tokens for row in plan.rows} == {7}
    engine = TableEngine({">": {"y": 0.5, "n": 0.5}}, reward=lambda text, columns: float(text == "y"))
    made = run_program(m.Retry(), make_prompt(engine.chat, "q", n=64), engine)
    assert 40 <= sum(engine.chat.decode(row.tokens) == "y" for (row,) in made) <= 56


def test_the_test_of_the_guide_passes_and_sees_a_reward_that_was_lost():
    module = load("rambling_test")
    module.test_contract()
    module.test_rewards()
    module.Rambling.rewards = lambda self, rollouts: rollouts.reward.nan_to_num(nan=0.0)
    with pytest.raises(AssertionError):
        module.test_rewards()


def test_the_method_of_the_guide_is_what_new_writes_with_another_rule():
    written = files("rambling", ["rewards"])["src/rl_plugins_rambling/__init__.py"].splitlines()
    mine = (CODE / "rl_plugins_rambling.py").read_text().splitlines()
    other = [line for line in written if line not in mine]
    assert len(other) < 10, other


# ---- rewards and environment, in TRL's own trainer


def trainer(tmp_path: Path, config: str, dataset: Any, **more: Any) -> Any:
    """TRL's trainer with the settings a page shows, on an untrained policy."""
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    build_model(0).save_pretrained(tmp_path / "policy")
    build_tokenizer().save_pretrained(tmp_path / "policy")
    values = yaml.safe_load((CODE / config).read_text())
    functions = [getattr(load(name.split(".")[0]), name.split(".")[1]) for name in values.pop("reward_funcs")]
    values |= dict(output_dir=str(tmp_path / "out"), per_device_train_batch_size=32, num_generations=8, max_steps=2)
    values |= dict(use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no", disable_tqdm=True)
    values |= dict(learning_rate=1e-2, temperature=1.0, seed=0, **more)
    torch.manual_seed(0)
    made = GRPOTrainer(
        model=str(tmp_path / "policy"), reward_funcs=functions, args=GRPOConfig(**values), train_dataset=dataset
    )
    before = torch.cat([p.detach().flatten().clone() for p in made.model.parameters()])
    made.train()
    after = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    assert (after - before).abs().max() > 1e-4
    return made.state.log_history[:2]


def test_reward_functions_in_trl(tmp_path):
    first, second = trainer(tmp_path, "rewards.yaml", build_dataset(64), max_completion_length=12)
    for logged in (first, second):
        total = logged["rewards/correct/mean"] + 0.1 * logged["rewards/brief/mean"]
        assert logged["reward"] == pytest.approx(total, abs=0.02)  # some completions are empty: not judged
        assert 0 < logged["rewards/brief/mean"] < 1


def test_the_environment_in_trl(tmp_path):
    from datasets import Dataset

    module = load("environment")
    logs = trainer(tmp_path, "environment.yaml", Dataset.from_list(module.Guess.rows(32)))
    for logged in logs:
        assert 1 < logged["turn_control/turns"] <= module.Guess.TURNS
        assert logged["turn_control/failed"] == 0
        assert logged["gigpo/states"] > 4  # ranges of digits
    assert 0 < max(logged["reward"] for logged in logs) < 1  # the policy is untrained: some guesses are right


def test_the_guide_on_flawed_answers():
    module, columns = load("rewards"), {"log_metric": lambda name, value: None}
    texts = ["I count\nI guess \\boxed{5}", "I count \\boxed{5}", "I guess \\boxed{6}"]
    assert asyncio.run(module.flaws(["q"] * 3, texts, ["5"] * 3, **columns)) == [0.0, 1.0, -1.0]
    assert module.first_wrong_step("q", "5", texts[0]) == 1


def test_rewards_in_verls_form():
    module = load("rewards")
    right = module.compute_score("s", "=123", "123", extra_info={}, anything=1)
    assert right == {"score": 1.1, "correct": 1.0, "brief": 1.0}
    empty = module.compute_score("s", "", "123")
    assert empty["score"] == 0 and math.isnan(empty["brief"])
    assert module.correct([[{"content": "=12"}], [{"content": "?5=7"}]], ["12", "7"], other=[1, 2]) == [1.0, 1.0]


# ---- the traps of the environment guide


def played(kind: type, text: Any = "3", **columns: Any) -> list[Any]:
    """Trajectories of `turn_control` in an environment, where the policy writes a fixed text."""
    from rl_plugins.core.params import build_params
    from rl_plugins.methods.turn_control import TurnControl

    engine = TableEngine(lambda so_far: {text: 1.0} if so_far.endswith(">") else {"<eos>": 1.0})
    params = build_params(TurnControl.Params, {"environment": kind, "strategy": "unlimited"}, "turn_control")
    rows = run_program(
        TurnControl(params), make_prompt(engine.chat, "x", n=2, columns={"secret": 5, **columns}), engine
    )
    return [row for (row,) in rows]


def test_an_episode_of_the_guides_environment():
    guess = load("environment").Guess
    row = played(guess)[0]
    assert [turn.reward for turn in row.turns] == [0.0] * 4 and [t.anchor for t in row.turns] == ["0-9"] + ["4-9"] * 3
    assert row.meta["score"] == 0.0 and row.meta["done"]
    assert played(guess, "5")[0].meta["score"] == 1.0 and len(played(guess, "5")[0].turns) == 1
    assert [turn.valid for turn in played(guess, "x")[0].turns] == [False] * 4
    assert load("environment").score([], [1.0, math.nan]) == [1.0, None]


def test_without_score_the_rewards_of_the_turns_count():
    guess = load("environment").Guess

    class NoScore(guess):
        score = None

    assert played(NoScore, "5")[0].meta["score"] == 1.0
    assert math.isnan(played(NoScore, "x")[0].meta["score"])


def test_an_environment_that_raises_has_no_score():
    guess = load("environment").Guess

    class Raises(guess):
        def act(self, action):
            super().act(action)
            return int("not a digit")

    row = played(Raises)[0]
    assert len(row.turns) == 1 and math.isnan(row.meta["score"]) and "not a digit" in row.meta["error"]


def test_modules_of_the_current_folder_are_found(tmp_path, monkeypatch):
    """TRL finds reward functions there; parameters of methods do, too."""
    from rl_plugins.core.params import build_params
    from rl_plugins.methods.turn_control import TurnControl

    (tmp_path / "of_this_folder.py").write_text((CODE / "environment.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    params = build_params(TurnControl.Params, {"environment": "of_this_folder:Guess"}, "turn_control")
    assert params.environment.TURNS == 4
    assert sys.modules.pop("of_this_folder")


def test_check_of_the_environment(monkeypatch):
    monkeypatch.setattr(
        "rl_plugins.testing.contract.effects.idle_parameters", lambda *args, **params: {}
    )  # test_effects
    result = CliRunner().invoke(
        app, ["check", "turn_control", "--params", '{"environment": "environment:Guess", "strategy": "unlimited"}']
    )
    assert result.exit_code == 0, result.output
    assert "tokens of programs" in result.output
    assert Grid.rows(1)  # the demo's environments offer rows as well


# ---- rollout, sampler, service


def test_the_rollout_of_the_guide(capsys):
    load("rollout").main()
    assert capsys.readouterr().out.splitlines() == ["nwait. y<eos> [1, 2, 2, 2, 2, 2, 2, 1, 1]"] * 2


def test_the_sampler_avoids_what_is_always_right(capsys):
    load("sampler").main()
    assert capsys.readouterr().out == "[1, 2, 3]\n"


def test_the_sampler_goes_to_where_half_is_right_and_resumes():
    cls = load("sampler").Halfway
    stacks = [testing.start_stack(cls(), run=testing.make_run(dataset_size=8)) for _ in range(2)]
    rates = torch.tensor([0.0, 1, 0.5, 0.5, 0, 1, 0, 1])
    for batch in range(4):
        stacks[0].batch = batch
        rewards = [float(j < 4 * rates[p]) for p in range(8) for j in range(4)]
        rollouts = testing.make_rollouts(rewards, batch=batch)
        stacks[0].methods[0].observe(rollouts, testing.make_tokens(rollouts), {})
    pool = PromptPool(8, (), (), None, 4)
    assert set(stacks[0].one("select_prompts", pool, 2)) == {2, 3}
    assert stacks[0].methods[0].state["tries"].tolist() == pytest.approx([4 * (1 + 0.9 + 0.81 + 0.729)] * 8)
    stacks[1].load_state_dict(stacks[0].state_dict("data"), "data")
    assert stacks[1].one("select_prompts", pool, 3) == stacks[0].one("select_prompts", pool, 3)


class Judge(BaseHTTPRequestHandler):
    """Answers 7 between the marks it is told; nothing usable for a text with "broken"."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][0]["content"]
        (mark,) = re.findall("<(verdict-[0-9a-f]+)>", content)
        reply = "I cannot say." if "broken" in content else f"<{mark}>7</{mark}>"
        answer = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


def test_the_judge_of_the_guide_as_function_and_as_endpoint():
    cls = load("service").Judged
    rollouts = testing.make_rollouts([1.0, 0, math.nan, 1]).replace(text=["a", "broken", "c", "d"])

    def judge(text):
        if text == "broken":
            raise RuntimeError("no")
        return 7

    server = HTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        for given in ({"judge": judge}, {"url": url}):
            method = cls(cls.Params(**given))
            method._judge.backoff = 0.01
            assert method.rewards(rollouts).nan_to_num(nan=9).tolist() == pytest.approx([1.7, 0, 9, 1.7]), given
    finally:
        server.shutdown()
    assert cls().rewards(rollouts) is None


def test_the_process_reward_model_of_the_guide():
    service = load("service")
    method = service.Steps(service.Steps.Params(score=service.longer_is_better))
    rollouts = testing.make_rollouts([1.0, 0]).replace(text=["x" * 20 + "\n" + "x" * 10, ""])
    assert method.rewards(rollouts).tolist() == [0.75, 0.0]


# ---- what the pages say to a shell


@pytest.mark.parametrize(("page", "methods"), [("rewards", ["gdpo"]), ("environment", ["turn_control", "gigpo"])])
def test_the_lines_for_verl_fit_a_run(page, methods, monkeypatch):
    """Behind the overrides of a run that is known to work. The doctor reads all of them and builds the methods."""
    from rl_plugins.lab.demo import verl_data

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    lines = [line.strip('"') for line in (CODE / f"{page}_verl.txt").read_text().splitlines()]
    lines = ["trainer.v1.trainer_mode=rl_plugins_sync", *lines]
    keys = {line.partition("=")[0] for line in lines}
    known = [line for line in verl_data.overrides(ROOT, ROOT, ROOT) if line.partition("=")[0] not in keys]
    result = CliRunner().invoke(app, ["doctor", "--host", "verl", "--", *known, *lines])
    assert result.exit_code == 0 and "No problem found." in result.output, result.output
    for method in methods:
        assert re.search(rf"^  {method} ", result.output, re.M), result.output
    if page == "rewards":
        assert "several_rewards" not in result.output


def test_what_the_page_says_of_methods_that_are_not_installed():
    from rl_plugins.runtime.stack import build_stack

    for given in (load("methods").LeaveOneOut, load("methods").LeaveOneOut()):
        with pytest.raises(ConfigError, match="it must be a list of method names"):
            build_stack([given])


@pytest.mark.parametrize("command", ["check rollout:SecondThought", "check sampler:Halfway"])
def test_commands_of_the_pages(command, monkeypatch):
    monkeypatch.chdir(CODE)
    told = [page.name for page in PAGES if f"    rl-plugins {command}\n" in page.read_text()]
    assert told
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0 and "keeps the contract" in result.output, result.output
