"""What no run of this host serves, and why: hooks and signals about text and tokens."""

from __future__ import annotations

_TEXT = "samples are latents, not text"
_TURNS = "a sample is made in one go, without turns of an agent"

NO_HOOKS = {
    "teacher_prompts": f"{_TEXT}, and no text is another prompt for them. Remove the method.",
    "admit": "every sample takes the same number of steps, so no group is waited for. Remove the method.",
}
"""Hook -> why it is not served."""

NO_SIGNALS = {
    "token_ids": f"{_TEXT}. Remove the method.",
    "text": f"{_TEXT}. Remove the method.",
    "raw_text": f"{_TEXT}. Remove the method.",
    "messages": f"{_TEXT}. Remove the method.",
    "chat_template": f"{_TEXT}. Remove the method.",
    "step_rewards": "a sample has no steps that a reward function could tell apart. Remove the method.",
    "turns": f"{_TURNS}. Remove the method.",
    "turn_limits": f"{_TURNS}. Remove the method.",
    "entropies": "the noise of a transition is given, so its entropy is the same for every policy. Remove the method.",
    "current_entropies": "the noise of a transition is given, so its entropy has no gradient. Remove the method.",
    "sum_squared_probs": "a transition has a density and no probabilities of tokens. Remove the method.",
    "teacher_logprobs": f"{_TEXT}, and no text is another prompt for them. Remove the method.",
    "engine": "a transition has a density and no list of likely tokens. Remove the method.",
}
"""Signal, or its kind -> why no run has it."""
