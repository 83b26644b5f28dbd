"""`rl-plugins inspect` in the terminal: numbers of a known batch, what is not there, and texts that are hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trace import Drops, Halves, Ranks, Shapes, batch_of, started
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from traces import a_row, write_batch, write_updates
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.rollouts import TokenIds
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import group_data
from rl_plugins.lab.viewer.terminal import completion_of, visible
from rl_plugins.lab.viewer.trees import SharedPiece, tree_of
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.runtime.decide import decide
from rl_plugins.testing.data import make_run

HOSTILE = (
    "\x1b[2J\x1b]0;title\x07",
    "<script>alert(1)</script>",
    "[bold]markup[/bold] [/nothing]",
    "left\u202eright",
    "\ud800 alone",
    "a" * 5000,
    "\x00\x08\x7f\x9b31m",
)


class Hostile:
    """`Chat` whose tokens are hostile texts."""

    eos = (0,)

    def decode(self, tokens: Any, special: bool = False) -> str:
        return "".join(HOSTILE[t % len(HOSTILE)] for t in tokens)

    def piece(self, token: int) -> str:
        return self.decode((token,))


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["inspect", *words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    stack = started(folder, Halves(), Drops(), Ranks(), Shapes(), every=2, run=make_run(total_batches=1))
    stack.watchers[0]._writer._chat = Hostile()
    for number in range(3):
        rollouts, tokens = batch_of(number)
        ids = rollouts.token_ids
        assert ids is not None
        longer = tuple(torch.cat([c, torch.tensor([4, 5, 6])]) for c in ids.completion)
        observed = tuple(torch.cat([o, torch.tensor([True] * 3)]) for o in ids.observed)
        rollouts = rollouts.replace(token_ids=TokenIds.cat(ids.prompt, longer, observed))
        decide(stack, rollouts, tokens, None, grpo_advantages, 10**6)
    assert not stack.watchers[0]._writer.wait()
    return folder


def test_batches_groups_and_rollouts(run: Path) -> None:
    whole = invoke(str(run)).output
    assert "2 batches" in whole and "halves, drops, ranks, shapes" in whole and "0 of 2" in whole
    batch = invoke(str(run), "--batch", "2").output
    assert "ranks.advantages -> shapes.shape" in batch
    group = invoke(str(run), "--batch", "2", "--group", "0").output
    assert "3 tokens left: drops in select" in group and "drops: too long" in group
    assert "reward 2.5 (reward_0 2, reward_1 0.5, halves: 1.25)" in group
    assert "Completions: sampled, <<read>>, {{forced}}" in group and "<<\\ud800 alone" in group
    assert "advantage: plain GRPO" in group and "halves: was 2.5" in group and "ranks.advantages 1" in group


def test_every_method_has_a_line_of_what_it_did(run: Path) -> None:
    """Also one that notes nothing, from the record alone."""
    shown = " ".join(invoke(str(run), "--batch", "2").output.split())
    assert "halves: changed the reward of 5 rows, by up to 1.25" in shown
    assert "drops: took 3 tokens of 1 row out" in shown
    assert "ranks: changed the advantage of" in shown and "shapes: changed the advantage of" in shown


def test_a_change_is_counted_from_the_method_before(tmp_path: Path) -> None:
    """Two methods that change rewards, then two that change advantages, one after the other."""
    rewarded = [{"method": "one", "reward": 2.0}, {"method": "two", "reward": 2.5}]
    stages = [("host", 1.0), ("one.advantages", 5.0), ("two.shape", 4.75)]
    advantages = [{"stage": stage, "advantage": a, "tokens": None} for stage, a in stages]
    row = a_row(0, 0, [1], raw_reward=1.0, rewarded=rewarded, reward=2.5, grpo=1.0, advantages=advantages)
    write_batch(tmp_path, 0, [row])
    shown = " ".join(invoke(str(tmp_path), "--batch", "0").output.split())
    assert "one: changed the reward of 1 row, by up to 1; changed the advantage of 1 row, by up to 4" in shown
    assert "two: changed the reward of 1 row, by up to 0.5; changed the advantage of 1 row, by up to 0.25" in shown


def test_chosen_prompts_and_losses_say_why(tmp_path: Path) -> None:
    """The choice of an earlier batch, of a method without a note, of a plan; weights in the loss of the batch's own
    updates; the host's step beside the batch."""
    rows = [a_row(k, k, [1], current_version=6) for k in range(4)]  # dataset rows 100 to 103
    note = {"method": "one", "hook": "select_prompts", "prompt_index": 100, "group": None, "values": []}
    plan = {"method": "two", "hook": "plan", "prompt_index": 103, "group": 3, "values": [], "text": "gets more"}
    for number, chosen in ((5, [100, 102]), (6, [100, 101])):
        said = [{**note, "text": f"posterior 0.{number}"}, plan]
        write_batch(tmp_path, number, rows, selected_by="one", selected=chosen, prompts=said)
    write_updates(tmp_path, 6, [[], []])
    why = TraceFolder(tmp_path).why_chosen(6)
    assert why == {0: ["one: posterior 0.6"], 1: ["one"], 2: ["one (batch 5)"], 3: ["two: gets more"]}
    assert TraceFolder(tmp_path).why_chosen(5)[1] == [], "what a later batch chose"
    assert '"chosen":["one: posterior 0.6"]' in group_data(TraceFolder(tmp_path), 6, 0), "the page says it, too"
    batch = " ".join(invoke(str(tmp_path), "--batch", "6").output.split())
    assert "posterior 0.6" in batch and "posterior 0.5" not in batch and "gets more" in batch
    assert "one: chose 2 prompts" in batch and "two: in the loss: weight 1.5" in batch and "step 7" in batch
    assert "posterior 0.6" in invoke(str(tmp_path), "--batch", "6", "--group", "0").output
    whole = invoke(str(tmp_path)).output
    assert "one chose the prompts of 2 of 2 batches" in whole, "which changes no advantage"
    assert [line.split("│")[2].strip() for line in whole.splitlines() if "│ 5" in line] == ["7"]


def test_no_text_of_a_completion_acts_on_the_terminal(run: Path) -> None:
    for group in ("0", "1"):
        shown = invoke(str(run), "--batch", "0", "--group", group).output
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\x00"} & set(shown)
        assert "\\x1b[2J" in shown and "[bold]markup[/bold]" in shown and "further characters]" in shown


def test_read_and_forced_tokens_are_told_from_sampled_ones() -> None:
    row = {"kinds": [1, 1, 2, 2, 0, 1], "completion_ids": [1, 2, 3, 1, 4, 2], "completion": "as sampled"}
    texts = {1: "a", 2: "b", 3: "\n", 4: "{x}"}
    assert completion_of(row, texts).plain == "ab{{\\na}}<<{x}>>b"
    assert completion_of({**row, "kinds": [1] * 6}, texts).plain == "as sampled"


def test_tokens_that_are_pieces_of_a_character_are_joined() -> None:
    """Of a byte-level vocabulary that has learned one pair of bytes."""
    alphabet = {c: i for i, c in enumerate(sorted(bytes_to_unicode().values()))}
    core = Tokenizer(models.BPE(alphabet | {"\u0120\u00e6": 256}, [("\u0120", "\u00e6")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    chat = TokenizerChat(PreTrainedTokenizerFast(tokenizer_object=core))
    ids = chat.encode("a 日\\xe6")
    texts = {i: chat.piece(i) for i in ids}
    assert [texts[i] for i in ids] == ["a", " \\xe6", "\\x97", "\\xa5", "\\", "x", "e", "6"]
    row = {"kinds": [0] * 4 + [1] * 4, "completion_ids": list(ids)}
    assert completion_of(row, texts).plain == "<<a 日>>\\xe6"
    assert completion_of({**row, "kinds": [0] * 3 + [1] * 5}, texts).plain == "<<a \\xe6\\x97>>\\xa5\\xe6"


@pytest.mark.parametrize("text", HOSTILE)
def test_every_character_can_be_seen(text: str) -> None:
    shown = visible(text, 10**6)
    assert shown.isprintable() and shown.encode("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "1"], "Batch 1 is not in the trace. Recorded are 0, 2."),
        (["--batch", "2", "--group", "9"], "Batch 2 has no recorded group 9. Recorded are 0 to 1."),
        (["--group", "1"], "--group 1 is given without a batch"),
    ],
)
def test_what_is_not_there_is_named(run: Path, words: list[str], said: str) -> None:
    done = invoke(str(run), *words)
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_where_a_trace_is_found(tmp_path: Path) -> None:
    """In a run, and in a folder above one, as verl has it; of several runs one must be named."""
    done = invoke(str(tmp_path))
    assert done.exit_code == 2 and "has no trace" in done.output and "trace: true" in done.output
    for name in ("one", "two"):
        write_batch(tmp_path / "checkpoints" / "project" / name / "trace", 0, [a_row(0, 0, [1])])
        found = invoke(str(tmp_path))
        assert found.exit_code == (0 if name == "one" else 2)
    assert "project/one" in found.output and "project/two" in found.output
    assert invoke(str(tmp_path / "checkpoints" / "project" / "two")).exit_code == 0


def test_what_rounding_left_of_0_is_0(tmp_path: Path) -> None:
    rows = [a_row(k, 0, [1], raw_reward=r, grpo=-1.793e-17, advantage=3e-8) for k, r in enumerate((-1e-17, 0.0))]
    write_batch(tmp_path, 0, rows)
    shown = [invoke(str(tmp_path)), invoke(str(tmp_path), "--batch", "0", "--group", "0")]
    assert not any("e-" in done.output for done in shown) and "plain GRPO 0," in shown[1].output


def test_completions_that_share_a_beginning_are_a_tree() -> None:
    tree = tree_of([(1, 2, 3), (1, 2, 4, 5), (1, 2), (9,)])
    assert tree == SharedPiece(
        (0, 1, 2, 3),
        0,
        0,
        (
            SharedPiece((0, 1, 2), 0, 2, (SharedPiece((0,), 2, 3), SharedPiece((1,), 2, 4), SharedPiece((2,), 2, 2))),
            SharedPiece((3,), 0, 1),
        ),
    )
    assert tree_of([(1, 2), (1, 2)]) == SharedPiece((0, 1), 0, 2) and tree_of([()]) == SharedPiece((0,), 0, 0)
