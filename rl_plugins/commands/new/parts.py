"""What each hook adds to the method that `rl-plugins new` writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """What a hook adds to the method that is written.

    Attributes:
        rule: its line in the update rule.
        symbols: what the rule's symbols are.
        params: lines of `Params`.
        code: the hook.
        test: body of a test of its effect; `METHOD` stands for the class.
        names, test_names: what the code and its test import from `rl_plugins`.
        needs: signals it needs.
    """

    rule: str
    symbols: str
    params: str
    code: str
    test: str
    names: tuple[str, ...] = ()
    test_names: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


PARTS: dict[str, Part] = {
    "select_prompts": Part(
        rule="the prompts visited least come next, ties by chance",
        symbols="State: `visits` (dataset size,), how often each prompt was chosen.",
        params="",
        code='''
    def start(self, run: Run) -> None:
        self.state["visits"] = torch.zeros(run.dataset_size or 0, dtype=torch.int64)

    def select_prompts(self, pool: PromptPool, n: int) -> list[int]:
        """`n` different prompts that are not taken."""
        visits = self.state["visits"]
        order = self.rng("prompts").permutation(pool.size).tolist()
        free = [i for i in order if i not in pool.taken]
        chosen = sorted(free, key=lambda i: int(visits[i]))[:n]
        self.state["visits"] = visits + torch.bincount(torch.tensor(chosen), minlength=pool.size)
        return chosen
''',
        test="""
    stack = testing.start_stack(METHOD(), run=testing.make_run(dataset_size=6))
    chosen = [stack.one("select_prompts", PromptPool(6, (0, 1, 2), (), None, step), 3) for step in range(2)]
    assert sorted(chosen[0] + chosen[1]) == [0, 1, 2, 3, 4, 5]  # nobody twice before everybody once
""",
        names=("PromptPool", "Run"),
        test_names=("PromptPool",),
        needs=("prompt_index",),
    ),
    "plan": Part(
        rule="completions end after max_tokens tokens",
        symbols="max_tokens: counted as the host counts the completion length.",
        params="""
        max_tokens: int = param(256, "longest completion, in tokens", ge=1)
""",
        code='''
    def plan(self, plan: Plan) -> Plan:
        """The same prompts and rollouts, with a limit."""
        limit = self.params.max_tokens
        rows = [row.replace(max_tokens=min(limit, row.max_tokens or limit)) for row in plan.rows]
        return plan.replace(rows=tuple(rows))
''',
        test="""
    plan = METHOD(METHOD.Params(max_tokens=9)).plan(testing.make_plan(prompts=2, group_size=4))
    assert [(row.prompt_index, row.n, row.max_tokens) for row in plan.rows] == [(0, 4, 9), (1, 4, 9)]
""",
        names=("Plan",),
    ),
    "admit": Part(
        rule="max(N, floor(over_sampling N)) groups are in the making, those that waited longest first",
        symbols="N: groups the batch trains; generation stops when N are complete, and the others wait.",
        params="""
        over_sampling: float = param(1.5, "groups in the making per group that is trained", ge=1, le=8)
""",
        code='''
    def admit(self, queue: Queue) -> Admission:
        """Called before a batch is generated. Waiting groups that are not named go on waiting."""
        total = max(queue.groups, int(self.params.over_sampling * queue.groups))
        longest = tuple(range(len(queue.carried)))[:total]
        return Admission(fresh=total - len(longest), resume=longest)
''',
        test="""
    group = Carried(prompt_index=0, size=8, drawn=0, tokens=(3,) * 8, finished=(False,) * 8, versions=(0,) * 8)
    assert METHOD().admit(Queue((), groups=4, group_size=8, batch=0)) == Admission(fresh=6)
    assert METHOD().admit(Queue((group, group), groups=4, group_size=8, batch=1)) == Admission(fresh=4, resume=(0, 1))
""",
        names=("Admission", "Queue"),
        test_names=("Admission", "Carried", "Queue"),
    ),
    "rollout": Part(
        rule="a rollout whose reward is below retry_below is made again, once",
        symbols="The second rollout is used whatever its reward is.",
        params="""
        retry_below: float = param(0.5, "rollouts with a lower reward are made again")
""",
        code='''
    def rollout(self, prompt: Prompt) -> Program:
        """Makes the rollouts of one prompt: yields requests and gets their results. There is no `self.state` here."""
        start = prompt.start()
        made = yield Generate(start, n=prompt.n)
        rows = [start.add(generated) for generated in made]
        scores = yield [Score(row) for row in rows]
        rows = [row.scored(score) for row, score in zip(rows, scores, strict=True)]
        low = [i for i, score in enumerate(scores) if score.reward < self.params.retry_below]
        if low:
            again = yield Generate(start, n=len(low))
            for i, generated in zip(low, again, strict=True):
                rows[i] = start.add(generated)
        return rows
''',
        test="""
    engine = TableEngine({">": {"y": 0.5, "n": 0.5}}, reward=lambda text, columns: float(text == "y"))
    rollouts = run_program(METHOD(), make_prompt(engine.chat, "a question", n=64), engine)
    right = sum(engine.chat.decode(row.tokens) == "y" for rows in rollouts for row in rows)
    assert 40 <= right <= 56  # three quarters instead of half of 64
""",
        names=("Generate", "Program", "Prompt", "Score"),
        test_names=("TableEngine", "make_prompt", "run_program"),
    ),
    "rewards": Part(
        rule="r_i <- r_i - truncation_penalty where rollout i was cut off",
        symbols="r (rows,): rewards.",
        params="""
        truncation_penalty: float = param(0.5, "taken off the reward of a rollout that was cut off", ge=0)
""",
        code='''
    def rewards(self, rollouts: Rollouts) -> Tensor:
        """One number per row; NaN (no reward) stays NaN."""
        return rollouts.reward - self.params.truncation_penalty * rollouts.truncated.double()
''',
        test="""
    rollouts = testing.make_rollouts([1.0, 0, 0, 1], truncated=torch.tensor([True, False, False, False]))
    assert METHOD().rewards(rollouts).tolist() == [0.5, 0, 0, 1]
""",
        names=("Rollouts",),
    ),
    "select": Part(
        rule="a group whose rewards differ by no more than min_spread leaves",
        symbols="Rows of groups that leave are out of the batch and of every statistic.",
        params="""
        min_spread: float = param(0.0, "a group stays if largest - smallest reward is above this", ge=0)
""",
        code='''
    def select(self, rollouts: Rollouts) -> Tensor:
        """True for the rows that stay."""
        groups = rollouts.groups
        return groups.rows(groups.max(rollouts.reward) - groups.min(rollouts.reward) > self.params.min_spread)
''',
        test="""
    keep = METHOD().select(testing.make_rollouts([1.0, 1, 1, 1, 0, 0, 1, 0]))
    assert keep.tolist() == [False] * 4 + [True] * 4
""",
        names=("Rollouts",),
    ),
    "teacher_prompts": Part(
        rule="a teacher reads the answer of the dataset behind the prompt",
        symbols="The teacher is the policy at the start of the step: `tokens.teacher_logprobs` in `shape`.",
        params="",
        code='''
    def teacher_prompts(self, rollouts: Rollouts) -> list[str | None]:
        """A prompt per row, text or messages as in the dataset; None: the teacher does not read the row."""
        rows = zip(rollouts.meta["prompt"], rollouts.meta["answer"], strict=True)
        return [f"{prompt}\\nThe answer is {answer}." if answer else None for prompt, answer in rows]
''',
        test="""
    rollouts = testing.make_rollouts([1.0, 0], group_size=2, meta={"prompt": ["a", "b"], "answer": ["4", ""]})
    assert METHOD().teacher_prompts(rollouts) == ["a\\nThe answer is 4.", None]
""",
        names=("Rollouts",),
        needs=("tokens", "teacher_logprobs", "column:prompt", "column:answer"),
    ),
    "advantages": Part(
        rule="A_i = (r_i - mean(r)) / (std(r) + eps), per group",
        symbols="r (rows,): rewards of a group. A (rows,): advantages.",
        params="""
        eps: float = param(1e-4, "added to the group's standard deviation", gt=0)
""",
        code='''
    def advantages(self, rollouts: Rollouts) -> Tensor:
        """One number per row (per turn of an agent: `Method.advantages_per`). Rows without a reward (NaN) are out of
        statistics and get the advantage 0, whatever stands here."""
        groups, reward = rollouts.groups, rollouts.reward
        distance = reward - groups.rows(groups.mean(reward))
        return distance / (groups.rows(groups.std(reward)) + self.params.eps)
''',
        test="""
    advantages = METHOD(METHOD.Params(eps=0.5)).advantages(testing.make_rollouts([1.0, 0], group_size=2))
    assert advantages.tolist() == pytest.approx([0.5 / (0.5**0.5 + 0.5), -0.5 / (0.5**0.5 + 0.5)])
""",
        names=("Rollouts",),
    ),
    "shape": Part(
        rule="A_t <- negative_weight * A_t where A_t < 0",
        symbols="A_t (tokens,): advantages of tokens.",
        params="""
        negative_weight: float = param(0.5, "factor on negative advantages", ge=0)
""",
        code='''
    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """Acts on the advantages of any estimator."""
        a = tokens.advantages
        return Shape(advantages=torch.where(a < 0, self.params.negative_weight * a, a))
''',
        test="""
    rollouts = testing.make_rollouts([1.0, 0], group_size=2, lengths=[1, 2])
    tokens = testing.make_tokens(rollouts, advantages=torch.tensor([1.0, -1.0]))
    assert METHOD().shape(rollouts, tokens).advantages.tolist() == [1.0, -0.5, -0.5]
""",
        needs=("tokens",),
        names=("Rollouts", "Shape", "Tokens"),
    ),
    "observe": Part(
        rule="m <- momentum * m + (1 - momentum) * mean(r), logged",
        symbols="State: `mean_reward` m, of the batches so far.",
        params="""
        momentum: float = param(0.9, "weight of the older batches", ge=0, lt=1)
""",
        code='''
    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        """Once per generation batch, with every row."""
        rewards = rollouts.reward[~torch.isnan(rollouts.reward)]
        if len(rewards):
            new, p = float(rewards.mean()), self.params.momentum
            self.state["mean_reward"] = p * self.state.get("mean_reward", new) + (1 - p) * new
            self.log("mean_reward", self.state["mean_reward"])
''',
        test="""
    method = METHOD()
    for rewards in ([1.0, 1.0], [0.0, 0.0]):
        rollouts = testing.make_rollouts(rewards, group_size=2)
        method.observe(rollouts, testing.make_tokens(rollouts), {})
    assert method.state["mean_reward"] == pytest.approx(0.9)
""",
        names=("Rollouts", "Tokens"),
    ),
    "before_update": Part(
        rule="learning rate of an optimizer step times min(1, tokens / full_tokens)",
        symbols="tokens: those trained in the step, of all processes.",
        params="""
        full_tokens: int = param(1024, "tokens of a step from which on the learning rate is the full one", ge=1)
""",
        code='''
    def before_update(self, rows: Rows) -> Update:
        """Called in every process with the same rows; there is no `self.state` here."""
        return Update(lr_scale=min(1.0, float(rows.length.sum()) / self.params.full_tokens))
''',
        test="""
    rollouts = testing.make_rollouts([1.0, 0], group_size=2, lengths=[2, 6])
    rows = testing.make_rows(rollouts, testing.make_tokens(rollouts))
    update = METHOD(METHOD.Params(full_tokens=16)).before_update(rows)
    assert update.lr_scale == 0.5
""",
        names=("Rows", "Update"),
    ),
    "policy_loss": Part(
        rule="L_t = -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)",
        symbols="w = exp(log pi - log pi_old): importance ratio of a token.",
        params="""
        clip_low: float = param(0.2, "how far the ratio may fall below 1", ge=0, lt=1)
        clip_high: float = param(0.28, "how far the ratio may rise above 1", ge=0)
""",
        code='''
    def policy_loss(self, terms: Terms) -> Tensor:
        """(rows, time), one value per token; masking and averaging are done outside."""
        p = self.params
        return ppo_clip(terms.logprobs, terms.old_logprobs, terms.advantages, p.clip_low, p.clip_high)
''',
        test="""
    one = torch.ones(1, 1)
    terms = testing.make_terms(rows=1, time=1, logprobs=one.log() + 1, old_logprobs=one.log(), advantages=one)
    assert METHOD().policy_loss(terms).item() == pytest.approx(-1.28)
""",
        names=("Terms", "ppo_clip"),
    ),
    "regularize": Part(
        rule="L_t <- L_t - entropy_weight * H_t",
        symbols="H_t: entropy of the policy at a token, in nats.",
        params="""
        entropy_weight: float = param(1e-3, "weight of the entropy", ge=0)
""",
        code='''
    def regularize(self, terms: Terms) -> Tensor:
        """(rows, time), added to the loss of each token."""
        return -self.params.entropy_weight * terms.entropies
''',
        test="""
    terms = testing.make_terms(rows=1, time=1, entropies=torch.full((1, 1), 2.0))
    assert METHOD().regularize(terms).item() == pytest.approx(-0.002)
""",
        names=("Terms",),
        needs=("current_entropies",),
    ),
}
