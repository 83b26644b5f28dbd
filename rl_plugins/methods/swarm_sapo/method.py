"""SAPO, swarm sampling policy optimization (arXiv 2509.08721): nodes train on rollouts that others share as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins import ConfigError, Idle, Method, MethodParams, from_params, signals
from rl_plugins.core.requests import Chat
from rl_plugins.core.rollouts import Completion, Plan, PlanRow, Rollouts, Run, Shape, Tokens
from rl_plugins.kit.prompts import NO_CHARACTER
from rl_plugins.kit.services import media_of
from rl_plugins.kit.start_checks import refuse_one_prompt
from rl_plugins.methods.swarm_sapo.choice import chosen
from rl_plugins.methods.swarm_sapo.exchange import Exchange, open_exchange
from rl_plugins.methods.swarm_sapo.mailbox import Mailbox, within
from rl_plugins.methods.swarm_sapo.packages import (
    Package,
    PackageLimits,
    Refused,
    Schema,
    batch_of,
    plain,
    read_package,
    read_packages,
    schema_of,
    sender_of,
    tokenized,
    written_files,
)
from rl_plugins.methods.swarm_sapo.params import SwarmParams


class SwarmSapo(Method):
    """Swarm sampling policy optimization: a node trains on own groups and on groups that other nodes share as text.

    It is not the Soft Adaptive Policy Optimization that TRL and verl call `sapo`. In each generation batch:

        read      packages of others that are new in the exchange
        I         own groups: the first prompts of the plan, G rollouts each
        C         candidates: external_groups + spare_groups packages, drawn uniformly without replacement
        score     the completions of C with the rewards of this run; those of the sender are not even sent
        keep      the first J = external_groups candidates whose rewards differ      (`select_by: uniform`)
        train     I + J groups; A = (R - mean) / std per group, the host's
        publish   prompt, columns and completions of the own groups

    `select_by: sample` keeps the first J of any rewards (rl-swarm). `total_reward` is the released selection of genrl:
    f is the place of the first total that is not 0, the totals are sorted, the first f leave, the last J stay. With
    `external_weight` w the advantages of external groups are w A.

    A package is a prompt, its dataset columns and G completions as text. The text is tokenized again with the tokenizer
    of this run. Its tokens are forced: they are trained as if the policy had made them, with old log-probs of the own
    policy.

    The exchange is a directory, a URL that fsspec opens, or an HTTP endpoint; `transport` takes another one. No node
    waits for others. An exchange that fails or is empty leaves the own data only. A node tries it less often after each
    failure.

    Foreign data are not trusted. A file and its texts have limits of size, the id must be the hash of the question, and
    prompt and columns must have the kinds of values that the own dataset has. A completion whose tokens give another
    text (special tokens, unknown characters) is refused. Reward functions must bear any such values; `accept` may check
    more. Senders are not authenticated. Prompts and columns of your dataset leave this node.

    Symbols: G rollouts per group, I and J groups per batch; R, A (rows,) float64. The paper's round is a batch here.

    Special cases: with fewer than J packages all of them are taken, and own prompts fill the batch. If fewer than J
    candidates are kept, the batch is short of these groups. A candidate with a NaN reward is never kept. A package that
    was scored is not drawn again. A newer package of the same sender and question replaces the older one; the batch
    number of the sender says which one is newer. A node that starts from zero needs a new name. Packages of the own
    node name are not read. In verl's asynchronous modes there are exactly J candidates. Rollouts of several rows or
    turns are not published.

    State: the packages that wait, as text, and the names of files read and written. A resumed run goes on with them.

    Raises:
        ConfigError: no `exchange` or `node`; images; a column that is no plain data; too many external groups.

    Source: arXiv 2509.08721; `transplant_trees` in src/genrl/examples/rgym/data.py of gensyn-ai/genrl.
    """

    name = "swarm_sapo"
    fidelity = "abstract"
    does = "Trains on rollouts that other nodes share as text, next to its own"
    problems = ("too_hard", "no_signal", "exploration")
    needs = from_params(
        lambda p: signals(
            "text",
            "prompt_index",
            f"column:{p.prompt_column}",
            several_rollouts=p.external_groups,
        )
    )
    brings = from_params(lambda p: signals(forced_tokens=p.external_groups))
    idle = (Idle({"external": 0}, "no external group was trained. Look at `inbox`, `rejected`, `external_groups`."),)
    Params = SwarmParams

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        p = self.params
        if not p.exchange or not p.node:
            missing = "exchange" if not p.exchange else "node"
            raise ConfigError(
                f"Method `{self.name}` needs `{missing}`. Give the place where nodes exchange packages and the name of "
                f"this one: method_params.{self.name}: {{exchange: /shared/swarm, node: node_1}}."
            )
        self._spare = 0
        self._group_size = 0
        self._longest = 0
        self._dataset: Any = None
        self._chat: Chat | None = None
        self._schema: Schema | None = None
        self._mail: Mailbox | None = None
        self._told: set[str] = set()

    def check(self, run: Run) -> None:
        p = self.params
        if media := media_of(run):
            raise ConfigError(
                f"The prompts have {media}, and an exchange carries text alone. Remove `{self.name}`, or the column."
            )
        if run.buffered and p.spare_groups and p.external_groups:
            raise ConfigError(
                f"`spare_groups` is {p.spare_groups}, and this mode takes batches out of a buffer that counts groups, "
                f"so there are exactly `external_groups` candidates. Remove spare_groups, or use a synchronous mode."
            )
        if p.external_groups:
            refuse_one_prompt(run, "no group of another node has room beside it")
        if p.transport is None:
            open_exchange(p.exchange, p.key_env)
        schema_of(run, p.prompt_column)

    def start(self, run: Run) -> None:
        p = self.params
        self._group_size, self._longest = run.group_size, run.max_completion_length
        self._spare = p.external_groups if p.spare_groups is None else p.spare_groups
        if run.buffered or p.external_groups == 0:
            self._spare = 0
        self._dataset, self._chat = run.dataset, run.chat
        self._schema = schema_of(run, p.prompt_column)
        exchange: Exchange = p.transport(p.exchange) if p.transport else open_exchange(p.exchange, p.key_env)
        self._mail = Mailbox(exchange, p.node, p.timeout, p.max_file_bytes, p.sender_quota)
        self.state = {"inbox": [], "seen": [], "own": []}

    # ---- before generation

    def plan(self, plan: Plan) -> Plan | None:
        """Puts packages in the place of the last prompts."""
        j = self.params.external_groups
        if j == 0 or not plan.first or self._chat is None:
            return None
        self._receive(plan.batch)
        own = [i for i, row in enumerate(plan.rows) if row.n and row.prompt_index >= 0 and not row.given]
        most = min(j, len({plan.rows[i].group for i in own}) - 1)
        candidates = self._candidates(plan.batch, most + self._spare) if most > 0 else []
        if not candidates:
            return None
        rows, taken = list(plan.rows), min(most, len(candidates))
        room, gone = plan.trained - taken * plan.group_size, list[int]()
        while own and sum(row.n for row in rows) > room:
            gone.append(rows.pop(own.pop()).group)
        left, free = {row.group for row in rows}, max(row.group for row in plan.rows) + 1
        numbers = [g for g in dict.fromkeys(reversed(gone)) if g not in left]
        numbers += range(free, free + len(candidates))
        mark = int(self.rng("mark").integers(2**53))  # tells this plan from others
        for place, (package, given) in enumerate(candidates):
            kept = place < taken
            columns = {**package.columns, self.params.prompt_column: package.prompt}
            n, spare = (plan.group_size, 0) if kept else (0, plan.group_size)
            row = PlanRow(-1, numbers[place], n, spare, edit=columns, given=given)
            rows.append(row.marked(self.name, [mark, place, taken]))
        return plan.replace(rows=tuple(rows))

    def _receive(self, batch: int) -> None:
        """Reads what is new into the inbox, as far as limits and quotas allow."""
        assert self._mail is not None and self._schema is not None  # since `start`
        if self._mail.resting(batch):
            return
        p, state = self.params, self.state
        found = self._mail.look(batch, state["seen"])
        self._note(found.error, "read")
        inbox = {(entry["sender"], entry["id"]): entry for entry in state["inbox"]}
        refused, arrived = Counter[str](), 0
        for name, data in found.files.items():
            packages, bad = read_packages(data, self._schema, PackageLimits(p.max_characters, self._group_size))
            refused += bad
            for package in packages:
                if not self._accepted(package):
                    refused["`accept` says no"] += 1
                    continue
                arrived += 1
                sender, sent = sender_of(name), batch_of(name)
                waiting = inbox.get((sender, package.id))
                if waiting is None or waiting["sent"] <= sent:  # a file can be whole later than a newer one
                    entry = {"sender": sender, "id": package.id, "line": package.line(), "arrived": batch}
                    inbox[sender, package.id] = {**entry, "sent": sent}
        refused["a file is too long or not whole"] += len(found.refused)
        refused = +refused
        if refused:
            self.warn(f"packages of others are refused: {', '.join(sorted(refused))}.")
        state["inbox"] = within(inbox.values(), p.sender_quota, p.inbox_groups)
        if found.listed is not None:
            listed = set(found.listed)
            state["seen"] = sorted({*state["seen"], *found.files, *found.refused, *found.passed} & listed)
        self.log("arrived", arrived, "sum")
        self.log("rejected", refused.total(), "sum")

    def _accepted(self, package: Package) -> bool:
        accept = self.params.accept
        if accept is None:
            return True
        fields = {"prompt": package.prompt, "columns": dict(package.columns), "completions": list(package.completions)}
        try:
            return bool(accept(fields))
        except Exception as e:
            self.warn(f"`accept` failed with {type(e).__name__}, so the package is refused.")
            return False

    def _candidates(self, batch: int, most: int) -> list[tuple[Package, tuple[Completion, ...]]]:
        """Packages and their completions as tokens, at most so many, which leave the inbox: in the order drawn, or as
        they are listed (`total_reward`)."""
        p, state = self.params, self.state
        inbox = [e for e in state["inbox"] if p.max_age is None or batch - e["arrived"] <= p.max_age]
        found: dict[int, tuple[Package, tuple[Completion, ...]]] = {}
        gone, refused = set(), set()
        for i in self.rng("draw").permutation(len(inbox)).tolist():
            if len(found) == most:
                break
            gone.add(i)
            try:
                found[i] = self._tokenized(inbox[i]["line"])
            except Refused as e:
                refused.add(str(e))
        if refused:
            self.warn(f"packages of others are refused: {', '.join(sorted(refused))}.")
        state["inbox"] = [e for i, e in enumerate(inbox) if i not in gone]
        self.log("rejected", len(gone) - len(found), "sum")
        return [found[i] for i in (sorted(found) if p.select_by == "total_reward" else found)]

    def _tokenized(self, line: str) -> tuple[Package, tuple[Completion, ...]]:
        """A package of the inbox as this run reads it.

        Raises:
            Refused: it does not fit, or its tokens would give another text.
        """
        p = self.params
        assert self._chat is not None and self._schema is not None
        package = read_package(line, self._schema, PackageLimits(p.max_characters, self._group_size))
        return package, tokenized(package, self._chat, p.max_prompt_tokens, self._longest)

    # ---- after it

    def select(self, rollouts: Rollouts) -> Tensor:
        """Keeps the candidates that are chosen by their rewards here."""
        keep = torch.ones(len(rollouts), dtype=torch.bool)
        plans: dict[int, dict[int, list[int]]] = {}
        most: dict[int, int] = {}
        for row, mark in _marks(rollouts):
            plans.setdefault(mark[0], {}).setdefault(mark[1], []).append(row)
            most[mark[0]] = mark[2]
            keep[row] = False
        rewards: list[list[float]] = []
        stays = rollouts.kept.tolist()
        for number, places in plans.items():
            groups = [places[place] for place in sorted(places)]
            scored = [[float(rollouts.reward[row]) for row in rows if stays[row]] for rows in groups]
            rewards += scored
            for i in chosen(scored, most[number], self.params.select_by):
                keep[groups[i]] = True
        self.note(~keep, "candidate of another node that was not chosen by its rewards here")
        if rewards:
            self._report(rewards)
        return keep

    def _report(self, rewards: Sequence[Sequence[float]]) -> None:
        self.log("candidates", len(rewards), "sum")
        constant = sum(len(set(group)) < 2 for group in rewards)
        self.log("constant", constant / len(rewards), weight=len(rewards))
        known = [r for group in rewards for r in group if not math.isnan(r)]
        if known:
            self.log("external_reward", sum(known) / len(known), weight=len(known))

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        """Weighs external groups."""
        weight = self.params.external_weight
        if weight == 1:
            return None
        factor = torch.ones(len(rollouts), dtype=torch.float64)
        for row, _ in _marks(rollouts):
            factor[row] = weight
        return Shape(row_factor=factor)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """Publishes the own groups."""
        p, foreign = self.params, torch.zeros(len(rollouts), dtype=torch.bool)
        for row, _ in _marks(rollouts):
            foreign[row] = True
        if p.external_groups:
            if bool(rollouts.kept.any()):
                self.log("external", foreign[rollouts.kept].double().mean())
            self.log("inbox", len(self.state["inbox"]))
        if p.publish_groups == 0:
            return
        packages = list(self._own(rollouts, foreign))
        if p.publish_groups is not None and len(packages) > p.publish_groups:
            few = self.rng("publish").choice(len(packages), p.publish_groups, replace=False)
            packages = [packages[i] for i in sorted(few.tolist())]
        self._publish(rollouts.batch, packages)

    def _own(self, rollouts: Rollouts, foreign: Tensor) -> Iterator[Package]:
        """A package of every group that the policy answered in one row each."""
        assert rollouts.text is not None and self._schema is not None  # in `needs`, since `start`
        one = rollouts.groups.max(rollouts.index.double()) == 0
        if rollouts.turns is not None:
            one = torch.zeros_like(one)
        if not bool(one.all()):
            self.warn("rollouts of several rows or turns are not published, because they are more than one completion.")
        prompts = rollouts.meta[self.params.prompt_column]
        known = (rollouts.prompt_index >= 0) & ~foreign
        for group in one.nonzero()[:, 0].tolist():
            rows = (known & (rollouts.groups.index == group)).nonzero()[:, 0].tolist()
            if not rows:
                continue
            columns = self._dataset[int(rollouts.prompt_index[rows[0]])]
            finished = tuple(not bool(rollouts.truncated[row]) for row in rows)
            texts = [rollouts.text[row] for row in rows]
            yield Package(
                plain(prompts[rows[0]]),
                {name: plain(columns[name]) for name in self._schema.columns},
                # a completion may be cut inside a character of several tokens; others would train what stands for it
                tuple(t if done else t.rstrip(NO_CHARACTER) for t, done in zip(texts, finished, strict=True)),
                finished,
            )

    def _publish(self, batch: int, packages: Sequence[Package]) -> None:
        assert self._mail is not None
        p, state = self.params, self.state
        if not packages or self._mail.resting(batch):
            return
        files = written_files(p.node, batch, packages, p.max_file_bytes)
        own = [*(n for n in state["own"] if n not in files), *files]
        error = self._mail.deliver(batch, files, own[: -p.keep_files])
        self._note(error, "written")
        if not error:
            state["own"] = own[-p.keep_files :]
            self.log("published", len(packages), "sum")

    def _note(self, error: str, what: str) -> None:
        self.log("failed", int(bool(error)), "sum")
        if error and what not in self._told:  # the text of an error may be another one each time
            self._told.add(what)
            self.warn(f"the exchange cannot be {what}, so training goes on with own data: {error}")


def _marks(rollouts: Rollouts) -> Iterator[tuple[int, Sequence[int]]]:
    """Rows of candidates, each with the number of its plan, its place there, and how many of it may stay."""
    return ((row, mark) for row, mark in enumerate(rollouts.marks(SwarmSapo.name)) if mark is not None)
