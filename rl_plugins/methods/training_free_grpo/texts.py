"""What the policy and the language model are told. Our own words; the answers' formats are those of the authors."""

from __future__ import annotations

PROMPT = """Before you begin, read these experiences from earlier attempts at similar tasks. Decide which of them apply
here and act on those.

Experiences:
{experiences}

Task:
{problem}"""

SUMMARY = """An agent has attempted a task. Write down what it did, so that somebody who has not seen the attempt can
learn from it.

What the agent is for: {objective}
What we want to learn: {learning_objective}

[Task]
{question}

[Attempt]
{attempt}

[Reference answer]
{answer}

[Reward]
{reward}

Go through the attempt step by step. For every step say in a sentence or two what was done and why, and which of the
experiences it had been given it used. Point out where it went wrong or took a detour, and what led to the result.
Answer with the summary alone."""

CRITIQUE = """Several attempts were made at the same task; some did better than others. Find out why.

What the agent is for: {objective}
What we want to learn: {learning_objective}

[Task]
{question}

[Reference answer]
{answer}

[Attempts]
{attempts}

Compare the attempts: what did those with a high reward do that the others did not, and which mistakes would a general
rule have prevented? Then write at most {limit} such rules. Each is a single line of at most {words} words, begins with
a short title and a colon, holds for other tasks of this kind, too, and names nothing that only this task has. End with

<Experiences>
the rules
</Experiences>"""

GROUP = """You keep a list of experiences that helps an agent. Decide what new findings mean for it.

What the agent is for: {objective}

[Experiences so far]
{experiences}

[New findings]
{findings}

Choose one operation for each finding: ADD it as a new experience; UPDATE an existing one that it corrects or completes
(with its id); DELETE one that it shows to be wrong (with its id and its content); or NONE if the list says it already.
Experiences are general and have at most {words} words. Answer with a list

```json
[{"operation": "ADD | UPDATE | DELETE | NONE", "id": "id of an existing experience, or null", "content": "text"}]
```"""

REVISION = """You keep a list of experiences that helps an agent. Several people have proposed operations on it, each
without knowing of the others. Make one consistent plan of them.

What the agent is for: {objective}

[Experiences and the operations proposed for each]
{proposals}

Join proposals that say the same, resolve those that contradict each other, and leave out what is not worth a place in
a short list. Experiences are general and have at most {words} words; different ones say different things. Answer with
the operations to carry out, in order

```json
[{"operation": "ADD | UPDATE | DELETE", "id": "id of an existing experience, or null", "content": "text"}]
```"""

PAPER_CRITIQUE = """Several attempts were made at the same task; some succeeded. Improve the list of experiences the
agent is given.

What the agent is for: {objective}
What we want to learn: {learning_objective}

[Experiences so far]
{experiences}

[Task]
{question}

[Reference answer]
{answer}

[Attempts]
{attempts}

Compare the attempts, and say which experiences helped, misled or were missing. Then propose at most {limit} operations:
add a new experience, or modify an existing one. An experience is a general rule of at most {words} words that holds for
other tasks of this kind. Answer with

```json
[{"option": "add", "experience": "text"}, {"option": "modify", "experience": "text", "modified_from": "id"}]
```"""

PAPER_REVISION = """A list of experiences that helps an agent has grown: some entries are new, and modifications of
others are proposed. Make a short list without repetition of it.

What the agent is for: {objective}

[Experiences, the new ones included]
{experiences}

[Proposed modifications]
{proposals}

Carry out the modifications that are right, and merge experiences that say the same. Experiences are general and have at
most {words} words. Answer with the operations to carry out, in order; what you do not name stays as it is

```json
[{"option": "modify", "experience": "text", "modified_from": "id"},
 {"option": "merge", "experience": "text", "merged_from": ["id", "id"]}]
```"""
