"""Holds the adapter against a source tree of a host: python tests/versions/canary.py trl ~/trl [TESTS ...]

The report says which names the adapter relies on moved, which bodies of methods it was written against changed, which
of our patches no longer apply or were merged, and which tests of the adapter fail. It is also written to
build/versions/canary-HOST.md. Status 1 if a name moved, a patch no longer applies, or a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import run

PINS = {"trl": "trl-newest", "verl": "verl-0.9.1"}
"""The environment whose other packages are taken."""

NAMES = """
import importlib.metadata, json, sys
host = sys.argv[1]
from importlib import import_module
compat = import_module(f"rl_plugins.{host}.compat")
closed = getattr(compat, "closed_parts", dict)()
told = {"version": importlib.metadata.version(host), "moved": compat.moved_symbols(), "closed": closed, "bodies": []}
if host == "trl":
    sys.path[:0] = ["tests", "tests/hosts/trl"]
    import test_refusals
    told["bodies"] = [name for name, known in test_refusals.BODIES.items() if test_refusals.digest(name) != known]
print(json.dumps(told))
"""


def names(folder: Path, host: str) -> dict[str, object]:
    """What an environment says of the names of the host in it."""
    done = subprocess.run(
        [folder / "bin" / "python", "-c", NAMES, host], cwd=run.ROOT, capture_output=True, text=True, env=_variables()
    )
    if done.returncode:
        cause = done.stderr.strip().splitlines()[-1]
        return {"version": run.installed(folder)[host], "moved": [f"the adapter cannot be imported: {cause}"]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def patches(host: str, tree: Path) -> dict[str, str]:
    """Patch -> "applies", "merged" or why it does not apply."""
    found = {}
    for patch in sorted((run.ROOT / "patches" / host).glob("*.patch")):

        def apply(*options: str, patch: Path = patch) -> subprocess.CompletedProcess[str]:
            command = ["git", "apply", "--check", "--include", f"{host}/*", *options, str(patch)]
            # a tree inside another checkout is not that one
            return subprocess.run(
                command,
                cwd=tree,
                capture_output=True,
                text=True,
                env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)},
            )

        forward = apply()
        if forward.returncode == 0:
            found[patch.stem] = "applies"
        else:
            merged = apply("--reverse").returncode == 0
            found[patch.stem] = "merged" if merged else forward.stderr.strip().splitlines()[0]
    return found


def _variables() -> dict[str, str]:
    return {**os.environ, "RL_PLUGINS_ALLOW_UNTESTED": "1"}


def report(host: str, told: dict[str, object], patched: dict[str, str], tests: dict[str, object]) -> str:
    lines = [f"# {host} {told['version']}", "", "## Names"]
    for what, title in (("moved", "moved"), ("closed", "closed"), ("bodies", "another body")):
        entries = told.get(what) or []
        lines += [f"- {title}: {e}: {entries[e]}" if isinstance(entries, dict) else f"- {title}: {e}" for e in entries]
    lines += ["- as expected"] * (len(lines) == 3) + ["", "## Patches"]
    lines += [f"- {name}: {state}" for name, state in patched.items()]
    failed = list(tests["failed"])  # type: ignore[call-overload]
    lines += ["", "## Tests", f"{tests['passed']} passed, {len(failed)} failed"]
    return "\n".join([*lines, *(f"- {name}" for name in failed)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", choices=PINS)
    parser.add_argument("tree", type=Path, help="a checkout of the host")
    parser.add_argument("tests", nargs="*", help="instead of those of the environment")
    options = parser.parse_args()
    known = run.environments()[PINS[options.host]]
    folder = run.build(f"canary-{options.host}", known, PINS[options.host])
    run.uv("pip", "install", "--python", folder, "--reinstall-package", options.host, options.tree.resolve())
    told = names(folder, options.host)
    patched = patches(options.host, options.tree)
    result = run.BUILT / f"canary-{options.host}.xml"
    result.unlink(missing_ok=True)
    allowed = {**known, "variables": {**known["variables"], "RL_PLUGINS_ALLOW_UNTESTED": "1"}}
    run.run(folder, allowed, options.tests or known["tests"], result)
    tests = run.outcome(result) if result.exists() else {"passed": 0, "failed": ["no test could be collected"]}
    text = report(options.host, told, patched, tests)
    (run.BUILT / f"canary-{options.host}.md").write_text(text, encoding="utf-8")
    print(text)
    applying = all(state in ("applies", "merged") for state in patched.values())
    return int(bool(told["moved"] or tests["failed"] or not applying))


if __name__ == "__main__":
    sys.exit(main())
