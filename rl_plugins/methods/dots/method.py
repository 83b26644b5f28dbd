"""DOTS of DOTS + RR (arXiv 2506.05316): choose prompts whose predicted pass rate is near a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Method, MethodError, MethodParams, from_params, param
from rl_plugins.core.rollouts import Plan, PlanRow, PromptPool, Rollouts, Run, Tokens, weighted_reward
from rl_plugins.kit.row_sets import RowSet, shuffled
from rl_plugins.methods.dots.files import embeddings_of, load_adapter
from rl_plugins.methods.dots.predictor import Predictor, draw, selection_logits

REPLAYED = "rollout_replay"  # the method whose rows were made in an earlier batch


class Dots(Method):
    """Difficulty-targeted Online data Selection: trains on prompts that the policy solves about half of the time.

    A cycle is mu generation batches. At its start, for the D prompts of the dataset:

        roll out K reference prompts, drawn uniformly, G times; d_k = mean reward, in [0, 1]
        a_ik = softmax_k(z_i . r_k / sqrt(H) / tau_att),   base_i = sum_k a_ik d_k
        p_i  = sigmoid(logit(base_i) / clip(softplus(w), 0.01, 10) + tanh(b)),   (w, b) = MLP(mean_k d, std_k d)
        p_i <- s p_i + c, with s, c of the least squares of p_k on d_k
        P(i) ~ exp(-|p_i - alpha| / tau);   draw M prompts without replacement, shuffle, train them in mu batches

    with z and r the projections of the frozen embeddings by a trained `adapter`. The reference rollouts leave before
    the statistics. The draw takes the M largest logits plus Gumbel noise, so it is defined where P underflows to 0.

    `reference: now` makes the reference rollouts first, in a round of the cycle's first batch. `previous` makes them
    with the last batch of the previous cycle: it can be combined with rollout programs, and the first cycle takes the
    host's prompts.

    Symbols: mu = `cycle`, K = `references`, alpha = `target`, tau = `temperature`, tau_att = `attention_temperature`,
    G the group size. Embeddings (D, H) float; predicted rates (D,) float64. M is mu times the fresh prompts of a batch.

    Special cases: without an adapter embeddings are compared unchanged, and only s and c are calibrated. A reference
    prompt without a scored rollout is left out; one may also be trained. If a batch needs more prompts than the cycle
    has left, further ones are drawn among those that it has not used.

    State: predicted rates, the prompts left of the cycle and those it has had. All draws are from `self.rng`.

    Raises:
        ConfigError: embeddings missing or unfit for dataset or adapter; more references than prompts.
        MethodError: M > D; pass rates outside of [0, 1].

    Source: arXiv 2506.05316; adaptive_difficulty_prediction/model.py and verl/trainer/ppo/teacher_utils.py of the
    authors' code. Their adapter's weights are not shipped.
    """

    name = "dots"
    fidelity = "paper"
    does = "Trains the prompts whose predicted pass rate is closest to one half"
    problems = ("no_signal", "too_easy", "too_hard", "few_prompts")
    needs = frozenset({"prompt_index"})
    decides_rollouts = True
    rounds = from_params(lambda p: p.reference == "now")

    @dataclass(frozen=True)
    class Params(MethodParams):
        embeddings: Callable[..., Any] | str = param(
            "", "(D, H) embeddings: a file, or a function of the dataset; required"
        )
        adapter: str | None = param(None, "file made by `rl-plugins train-adapter`; none: unchanged embeddings")
        references: int = param(256, "K, number of reference prompts of a cycle", ge=2)
        reference: Literal["now", "previous"] = param(
            "now", "time of the reference rollouts: this cycle or the previous"
        )
        cycle: int = param(2, "mu, number of batches per cycle", ge=1)
        target: float = param(0.5, "alpha, target pass rate", ge=0, le=1)
        temperature: float = param(1e-3, "tau, temperature of the draw; a large value draws uniformly", gt=0)
        attention_temperature: float = param(1.0, "tau_att, temperature of the attention", gt=0)

        def check(self) -> None:
            if self.embeddings == "":
                raise ConfigError(
                    "parameter `embeddings` is missing: give a .safetensors or .npy file with a row per row of the "
                    'dataset, or a function of the dataset as "module:attribute".'
                )

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self._predictor: Predictor | None = None

    def check(self, run: Run) -> None:
        p = self.params
        if run.dataset_size is not None and p.references > run.dataset_size:
            raise ConfigError(
                f"`references` is {p.references}, and the dataset has {run.dataset_size} prompts. Lower it."
            )

    def start(self, run: Run) -> None:
        p = self.params
        assert run.dataset_size is not None  # `needs` has the prompt_index, which a stream lacks
        self.check(run)
        values, noted = embeddings_of(p.embeddings, run)
        if noted is None and isinstance(p.embeddings, str):
            self.warn(
                "the embeddings have no fingerprint of their dataset, so only their number was compared. Write them "
                "with `rl_plugins.methods.dots.save_embeddings`."
            )
        adapter = None if p.adapter is None else load_adapter(p.adapter, int(values.shape[1]))
        self._predictor = Predictor(values, adapter, p.attention_temperature)
        self.state = {"place": 0, "left": [], "had": []}

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        """The next prompts of the cycle. Before there is a prediction, and where this cycle's is still to be made, the
        host's own."""
        state = self.state
        if "predicted" not in state or (self.rounds and state["place"] == 0):
            return self._hosts(pool, n)
        if not self.rounds and state["place"] == 0 and not state["left"]:
            self._begin(self.params.cycle * state.get("fresh", n), pool.size)
        taken = set(pool.taken)
        chosen = [i for i in state["left"] if i not in taken][:n]
        if len(chosen) < n:
            chosen += self._further(n - len(chosen), {*taken, *chosen})
        if "predicted" in state:
            self.note(chosen, "predicted pass rate {predicted:.2f}", predicted=state["predicted"][chosen])
        return chosen

    def _hosts(self, pool: PromptPool, n: int) -> list[int]:
        """The prompts that the host proposes, and any others where they are too few."""
        chosen = [i for i in pool.proposal if i not in pool.taken][:n]
        if len(chosen) < n:
            free = RowSet.range(0, pool.size).toggled(torch.tensor(sorted({*pool.taken, *chosen}), dtype=torch.int64))
            order = shuffled(self.rng("host"), len(free))
            chosen += [int(free.at(order[i])) for i in range(min(n - len(chosen), len(free)))]
        return chosen

    def plan(self, plan: Plan) -> Plan | None:
        state, p = self.state, self.params
        last = state["place"] == p.cycle - 1
        if plan.first and (state["place"] == 0 if self.rounds else last):
            return self._with_references(plan)
        if plan.round == 1 and state["place"] == 0:
            return self._after_references(plan)
        return None

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        return min(1, plan.budget), plan.budget

    def select(self, rollouts: Rollouts) -> Tensor:
        reference = rollouts.has_mark(self.name)
        self.note(reference, "reference rollout: only pass rates are predicted from it")
        return ~reference

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        state, reference = self.state, rollouts.has_mark(self.name)
        trained = rollouts.kept & (rollouts.prompt_index >= 0)
        self.log("reference_rollouts", int(reference.sum()))
        self._report(rollouts, trained)
        fresh = trained & ~rollouts.has_mark(REPLAYED)  # the cycle deals these; a replayed prompt may still come
        had = set(rollouts.prompt_index[fresh].tolist())
        state["had"] = sorted({*state["had"], *had})
        state["left"] = [i for i in state["left"] if i not in had]
        state["place"] = (state["place"] + 1) % self.params.cycle
        state["fresh"] = Groups(rollouts.group[fresh]).count
        if not self.rounds and bool(reference.any()):
            reward = weighted_reward(rollouts.rewards, rollouts.reward_weights)[reference]
            groups = Groups(rollouts.prompt_index[reference])
            self._predict(groups.ids, groups.mean(reward))
        if state["place"] == 0:  # the next cycle draws anew
            state["left"], state["had"] = [], []

    def _with_references(self, plan: Plan) -> Plan:
        """The plan with the reference prompts; what is trained of the cycle's first batch is planned after them, but
        for completions that are given."""
        k, size = self.params.references, self._size()
        rows = list(plan.rows)
        if self.rounds:
            rows = [row for row in rows if row.given]
            fresh = (plan.budget - sum(row.n for row in rows)) // plan.group_size
            self._fits(self.params.cycle * fresh, size)
        chosen = self.rng("references").choice(size, k, replace=False).tolist()
        used = {row.group for row in rows}
        free = [g for g in range(len(used) + k) if g not in used]
        pairs = zip(chosen, free, strict=False)
        references = [PlanRow(i, g, 0, spare=plan.group_size).marked(self.name, True) for i, g in pairs]
        return plan.replace(rows=(*rows, *references))

    def _after_references(self, plan: Plan) -> Plan | None:
        """The first batch of a cycle, of prompts chosen by the rewards of the references."""
        groups = [g for g in plan.so_far if g.row.mark(self.name)]
        fresh = plan.budget // plan.group_size
        if not groups or fresh == 0:
            return None
        prompts = torch.tensor([g.row.prompt_index for g in groups])
        self._predict(prompts, torch.stack([g.rewards.nanmean() for g in groups]))
        self._begin(self.params.cycle * fresh, self._size())
        start = max(g.row.group for g in plan.so_far) + 1
        chosen = self.state["left"][:fresh]
        if "predicted" in self.state:
            groups_of, rates = range(start, start + len(chosen)), self.state["predicted"][chosen]
            self.note([*groups_of], "predicted pass rate {predicted:.2f}", predicted=rates)
        return plan.replace(rows=tuple(PlanRow(i, start + j, plan.group_size) for j, i in enumerate(chosen)))

    def _predict(self, prompts: Tensor, rates: Tensor) -> None:
        """Predicted pass rates of all prompts, from those of the references; as before if none was scored."""
        scored = ~torch.isnan(rates)
        prompts, rates = prompts[scored], rates[scored].double()
        if bool(((rates < 0) | (rates > 1)).any()):
            bad = float(rates[(rates < 0) | (rates > 1)][0])
            raise MethodError(
                f"the mean reward of a reference prompt is {bad:g}; pass rates must be in [0, 1]. Scale the rewards "
                f"and their weights so that they are."
            )
        if len(rates) < 2:
            self.warn(f"{len(rates)} reference prompts have a reward, so no pass rate is predicted in this cycle.")
            return
        assert self._predictor is not None  # since `start`
        predicted = self._predictor.predict(prompts, rates)
        if not bool(torch.isfinite(predicted).all()):
            raise MethodError("predicted pass rates are NaN or infinite; look for such numbers in the embeddings.")
        self.state["predicted"] = predicted
        self.log("reference_rate", rates.mean())

    def _begin(self, m: int, size: int) -> None:
        """Draws the prompts of a cycle."""
        self._fits(m, size)
        self.state["left"], self.state["had"] = [], []
        chosen = self._further(m, set())
        self.state["left"] = self.rng("shuffle").permutation(chosen).tolist()
        if "predicted" in self.state:
            self.log("predicted", self.state["predicted"][chosen].mean())

    def _further(self, n: int, without: set[int]) -> list[int]:
        """`n` more prompts by the predicted rates, of those the cycle has not had if they are enough."""
        p, size = self.params, self._size()
        predicted = self.state.get("predicted", torch.full((size,), p.target, dtype=torch.float64))
        logits = selection_logits(predicted, p.target, p.temperature)
        had = [i for i in self.state["had"] if i not in without]
        logits[had] = logits.min() - 1e6 / p.temperature  # behind all others
        logits[list(without)] = -torch.inf
        chosen: list[int] = draw(logits, n, self.rng(f"draw {len(without)}")).tolist()
        return chosen

    def _fits(self, m: int, size: int) -> None:
        if m > size:
            raise MethodError(
                f"a cycle of {self.params.cycle} batches takes {m} prompts, and the dataset has {size}. Lower `cycle`, "
                f"make the batch smaller, or the dataset larger."
            )

    def _report(self, rollouts: Rollouts, trained: Tensor) -> None:
        fresh = trained & ~rollouts.has_mark(REPLAYED)
        if not bool(fresh.any()):
            return
        groups, reward = Groups(rollouts.group[fresh]), rollouts.reward[fresh]
        self.log("useful", (groups.max(reward) > groups.min(reward)).double().mean())
        if "predicted" in self.state:
            prompt = groups.max(rollouts.prompt_index[fresh].double()).long()
            rate, told = groups.mean(reward), self.state["predicted"][prompt]
            pairs = torch.stack([rate, told])[:, ~torch.isnan(rate)]
            if pairs.shape[1] > 2:
                self.log("correlation", torch.corrcoef(pairs)[0, 1])

    def _size(self) -> int:
        assert self._predictor is not None  # since `start`
        return len(self._predictor)
