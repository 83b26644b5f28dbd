"""What summarizer, judge and second wave are told. Our own words: the paper's prompts are not published."""

from __future__ import annotations

from collections.abc import Sequence

SUMMARY = """Below is an attempt at a task. Condense it for somebody who has to judge or to continue it.

[Task]
{problem}

[Attempt]
{attempt}

Use these headings, in at most {chars} characters in all:
Task: in your own words
Main idea: the hypothesis or approach
Key actions: what was done, with names, commands and edits
Progress: what is confirmed, what is solved in part
Failures: errors and dead ends
Outcome: the result, as far as the attempt itself could see it
Lessons: what to use again, what to avoid

Report what is there; do not solve the task yourself."""

JUDGE = """Below are summaries of several attempts at one task. Which attempt is most likely right?

[Task]
{problem}

{summaries}

Weigh the evidence that each attempt has for its result. The order in which they are shown means nothing. End with one
line: Best: <number>"""

REFINE = """{problem}

Summaries of earlier attempts at this task follow. None of them is known to be right. Start afresh: use what is
confirmed, avoid what failed, and check what they claim.

{summaries}"""


def numbered(summaries: Sequence[str]) -> str:
    """The summaries with their numbers from 1 on."""
    return "\n\n".join(f"[Attempt {i}]\n{summary}" for i, summary in enumerate(summaries, start=1))
