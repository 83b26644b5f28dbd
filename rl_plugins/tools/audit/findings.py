"""What an audit found: `Finding`, and `AuditReport`, which holds all of them and what could not be looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["critical", "warn", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warn", "info")
SHOWN_ROWS = 8


@dataclass(frozen=True)
class Finding:
    """One thing that an audit found.

    Args:
        severity: "critical" (a reward is wrong), "warn" (look at it) or "info".
        part: of the audit: "gold contrast", "metamorphic", and so on.
        kind: a short name, for programs: "inverted".
        text: what was found, for people.
        rows: dataset rows.
        details: further numbers and texts, plain data.
    """

    severity: Severity
    part: str
    kind: str
    text: str
    rows: tuple[int, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The text with the first rows."""
        if not self.rows:
            return self.text
        first = ", ".join(map(str, self.rows[:SHOWN_ROWS]))
        more = f" and {len(self.rows) - SHOWN_ROWS} more" if len(self.rows) > SHOWN_ROWS else ""
        return f"{self.text} Dataset row{'s' if len(self.rows) > 1 else ''} {first}{more}."

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "severity": self.severity,
            "part": self.part,
            "kind": self.kind,
            "text": self.text,
            "rows": list(self.rows),
            "details": dict(self.details),
        }


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Args:
        findings: the severest first.
        not_served: part of the audit -> why it could not be done.
        facts: what was looked at: numbers and short texts.
        looked: whether a reward function was asked about right answers at all.
    """

    findings: tuple[Finding, ...] = ()
    not_served: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    looked: bool = False

    @classmethod
    def of(
        cls, findings: Iterable[Finding], not_served: Mapping[str, str], facts: Mapping[str, Any], looked: bool
    ) -> AuditReport:
        """A report with its findings sorted by severity."""
        order = sorted(findings, key=lambda f: SEVERITIES.index(f.severity))
        return cls(tuple(order), dict(not_served), dict(facts), looked)

    def at(self, severity: Severity) -> Sequence[Finding]:
        """The findings of a severity."""
        return [f for f in self.findings if f.severity == severity]

    @property
    def critical(self) -> Sequence[Finding]:
        return self.at("critical")

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "findings": [f.plain() for f in self.findings],
            "not_served": dict(self.not_served),
            "facts": dict(self.facts),
        }
