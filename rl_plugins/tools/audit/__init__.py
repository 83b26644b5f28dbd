"""Audit of rewards: looks for rewards that are wrong or turned around, in functions, in a dataset, and in a run.

    from rl_plugins.tools.audit import Options, preflight
    found = preflight(run, Options())               # before training, no model; `run` as `Method.start` gets it
    for finding in found.report.findings:
        print(finding.severity, finding.shown)

The command `rl-plugins audit` and the method `reward_audit` share this code.
"""

from __future__ import annotations

from rl_plugins.tools.audit.findings import AuditReport, Finding
from rl_plugins.tools.audit.preflight import Options, Preflight, preflight

__all__ = ["Finding", "Options", "Preflight", "AuditReport", "preflight"]
