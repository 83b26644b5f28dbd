"""A language model that always gives the same advice, to try a run of `training_free_grpo` without one.

``methods: [training_free_grpo]`` with
``method_params: {training_free_grpo: {llm: "rl_plugins.lab.demo.advisor:canned"}}``.
"""

from __future__ import annotations

import json

ADVICE = "Digits: go through the task from left to right and write down one digit at a time."


def canned(question: str) -> str:
    """A reply that is a summary, an experience and a list of operations for either variant; the library has one entry
    after every step."""
    operation = {"operation": "UPDATE", "id": "G0", "content": ADVICE}
    paper = {"option": "modify", "experience": ADVICE, "modified_from": "G0"}
    return f"<Experiences>\n{ADVICE}\n</Experiences>\n```json\n{json.dumps([operation | paper])}\n```"
