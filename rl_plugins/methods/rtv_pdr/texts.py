"""What summarizer, judge and second wave are told. Our own words: the paper publishes no prompts (2026-11-26)."""

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

# Fields of the two example summaries in the paper's appendix, the only ones it shows; it has no schema.
SHAPES = {
    "swe_bench": {
        "issue_requirements": "objective, expected and current behavior, constraints, criteria of success",
        "agent_actions": "exploration, solution_approach, implementation",
        "code_changes": "per change: description, file_path, function_method, before_code, after_code",
        "command_execution": "commands_with_response, commands_without_response, error_responses",
        "error_analysis": "intermediate_errors and whether they were resolved, final_state",
        "evidence_inventory": "confirmed_outcomes, error_outcomes, unconfirmed_actions",
        "final_state": "agent_claims, expected_artifacts, unresolved_issues",
        "patch_status": "status, success_patterns_found, failure_patterns_found",
        "requirement_coverage": "per requirement: evidence, actions, code changes",
        "verification_record": "verification_commands, verification_coverage",
    },
    "terminal_bench": {
        "task_requirements": "objective, output_specifications, constraints, success_criteria",
        "agent_actions": "exploration, solution_approach, implementation_structure",
        "command_execution_record": "commands_with_response, commands_without_response, error_responses",
        "evidence_inventory": "confirmed_outcomes, error_outcomes, unconfirmed_actions, unverified_aspects",
        "final_state": "agent_assessment, expected_artifacts, unresolved_issues",
        "resource_access": "resources_accessed, access_timing, runtime_dependencies",
        "solution_characteristics": "code_script_generation, debugging_fix, data_processing",
        "verification_record": "verification_commands, verification_coverage",
    },
}


def summary_prompt(shape: str) -> str:
    """The summarizer's prompt: with headings, or with the fields of one of the paper's examples."""
    if shape == "headings":
        return SUMMARY
    fields = "\n".join(f'"{name}": {content}' for name, content in SHAPES[shape].items())
    start, end = SUMMARY.index("Use these headings"), SUMMARY.index("Report what is there")
    asked = f"Answer with one JSON object with these fields, in at most {{chars}} characters in all:\n{fields}\n\n"
    return SUMMARY[:start] + asked + SUMMARY[end:]


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
