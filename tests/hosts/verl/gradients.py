"""Gradient norms of optimizer steps of real runs by plain torch, on the rows that were trained."""

from __future__ import annotations

import math
from typing import Any

import torch


def reference(parts: list[dict[str, Any]]) -> tuple[float, int]:
    """Gradient norm of one optimizer step by plain torch on the rows that are trained, and their number."""
    from rl_plugins.lab.demo.policy import build_model

    model = build_model(0).float()
    model.load_state_dict(parts[0]["weights"])
    rows = [
        {k: v[i] for k, v in p["rows"].items()}
        for p in parts
        for i in range(len(p["rows"]["responses"]))
        if float(p["rows"]["rl_plugins_real"][i].sum()) > 0
    ]
    terms = []
    for row in rows:
        prompt, response = row["prompts"], row["responses"]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logprobs = logits.gather(1, response[:, None])[:, 0]
        terms.append((row, logprobs, -(logits.exp() * logits).sum(-1), row["response_mask"].float()))
    methods, mode = parts[0]["methods"], parts[0]["loss_agg_mode"]
    tokens = sum(float(m.sum()) for *_, m in terms)

    def aggregate(values: list[torch.Tensor]) -> torch.Tensor:
        masked = [(v * m).sum() for v, (*_, m) in zip(values, terms, strict=True)]
        if mode == "token-mean":
            return torch.stack(masked).sum() / tokens
        return torch.stack([x / m.sum() for x, (*_, m) in zip(masked, terms, strict=True)]).mean()

    if "softmax" in methods:
        score = torch.stack([(lp.detach() * m).sum() / m.sum() for _, lp, _, m in terms])
        group = [int(row["rl_plugins_group"]) for row, *_ in terms]
        positive = [float(row["rl_plugins_row_column:positive"]) > 0 for row, *_ in terms]
        loss = 0.0 * terms[0][1].sum()  # no group may have both a right and a wrong rollout
        for g in set(group):
            inside = [i for i in range(len(group)) if group[i] == g]
            pos, neg = [i for i in inside if positive[i]], [i for i in inside if not positive[i]]
            if pos and neg:
                weight = score[neg].exp() / score[neg].exp().sum()
                objective = sum(terms[i][1] @ terms[i][3] / terms[i][3].sum() / len(pos) for i in pos)
                objective -= sum(
                    w * (terms[i][1] @ terms[i][3]) / terms[i][3].sum() for i, w in zip(neg, weight, strict=True)
                )
                loss = loss - objective / len(set(group))
    elif "minpro" in methods:
        losses = []
        for row, lp, *_ in terms:
            ratio = (lp - row["rollout_log_probs"]).detach().exp()
            prefix = torch.cat([torch.ones(1), torch.cummin(ratio, 0).values[:-1]])
            losses.append(-(ratio * prefix).clamp(max=4.0) * row["advantages"] * lp)
        loss = aggregate(losses)
    elif "vcpo" in methods:
        loss = vcpo_loss(terms)
    elif "decoupled_ppo" in methods:
        losses = []
        for row, lp, *_ in terms:
            a, ratio = row["advantages"], (lp - row["old_log_probs"]).exp()
            omega = (row["old_log_probs"] - row["rollout_log_probs"]).exp()
            omega = torch.where(omega > 5, 0.0, omega)
            losses.append(omega * torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)))
        loss = aggregate(losses)
    else:
        losses = []
        for row, lp, *_ in terms:
            a, ratio = row["advantages"], (lp - row["old_log_probs"]).exp()
            x = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            losses.append(torch.where(a < 0, torch.minimum(x, -a * 3.0), x))
        loss = aggregate(losses)
    if "corridor" in methods:
        loss = loss + aggregate([0.1 * (torch.relu(2.0 - h) + torch.relu(h - 2.5)) for _, _, h, _ in terms])
    if "epo" in methods:
        outside = []
        for row, _, h, _ in terms:
            low, high = (row[f"rl_plugins_token_column:epo_{name}"] for name in ("low", "high"))
            outside.append(torch.relu(low - h) + torch.relu(h - high))
        loss = loss - 0.1 * aggregate([h - 2.0 * x for (_, _, h, _), x in zip(terms, outside, strict=True)])
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    return norm, len(rows)


def vcpo_loss(terms: list[tuple[Any, ...]]) -> torch.Tensor:
    """A sum over rows with weights of their own; the baseline of a group at the weights of this step."""
    rows = [(row, lp, m) for row, lp, _, m in terms]
    log_w = [float(((lp.detach() - row["rollout_log_probs"]) * m).sum()) for row, lp, m in rows]
    length = [float(m.sum()) for *_, m in rows]
    reward = [float(row["rl_plugins_row_column:vcpo_reward"]) for row, *_ in rows]
    group = [int(row["rl_plugins_group"]) for row, *_ in rows]
    loss = torch.zeros(())
    for i, (_, lp, m) in enumerate(rows):
        peers = [j for j in range(len(rows)) if group[j] == group[i]]
        big = [math.exp(2 * log_w[j]) * length[j] for j in peers]
        baseline = sum(x * reward[j] for x, j in zip(big, peers, strict=True)) / sum(big)
        weight = min(math.exp(log_w[i]), 8.0)
        loss = loss - (reward[i] - baseline) * weight * (lp * m).sum() / length[i] / len(rows)
    return loss
