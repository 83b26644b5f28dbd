"""The page of `rl-plugins inspect`: its data, its server, and what it may load."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_inspect import invoke, run  # noqa: F401

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.viewer import page as viewer_page
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import FILES, SCRIPTS, STATIC, VENDORED, page_size, write_page
from rl_plugins.lab.viewer.serve import PageServer


@pytest.fixture(scope="module")
def page(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("page")
    assert list(write_page(TraceFolder(run), out)) == [0, 2]
    return out


def cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}[{len(text) - 200} further]"


def value(file: Path) -> Any:
    text = file.read_bytes().decode("ascii")
    found = re.fullmatch(r'rlTrace\.put\("([^"]+)",(.*)\);\n', text.replace('", ', '",', 1), re.DOTALL)
    assert found is not None
    return json.loads(found[2])


def test_the_data_of_the_page_is_that_of_the_trace(page: Path, run: Path) -> None:  # noqa: F811
    trace = TraceFolder(run)
    data = value(page / "data" / "run.js")
    assert [b["batch"] for b in data["batches"]] == trace.numbers and data["methods"][0] == "halves"
    group = value(page / "data" / "b2" / "g0.js")
    rows = trace.rollouts(2, 0)
    assert [r["completion"] for r in group["rows"]] == [r["completion"] for r in rows]
    for shown, row in zip(group["rows"], rows, strict=True):
        assert shown["advantage"] == pytest.approx(row["advantage"], rel=1e-5)
        assert shown["entropies"] is None or len(shown["entropies"]) == len(row["completion_ids"])
        assert {int(k) for k in group["texts"]} >= set(row["completion_ids"])
        assert "".join(group["texts"][str(i)] for i in row["completion_ids"][:2]) == "".join(
            cut(trace.texts[i]) for i in row["completion_ids"][:2]
        )
    assert group["rows"][3]["raw_reward"] is None, "NaN is no JSON"


def test_the_size_of_a_page_is_told_before_it_is_written(
    run: Path,  # noqa: F811
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = sum(file.stat().st_size for file in (page / "data").glob("b*/*.js"))
    size, seconds = page_size(TraceFolder(run))
    assert 0.5 * written < size < 2 * written and seconds > 0
    monkeypatch.setattr(viewer_page, "LARGEST", size / 2)
    found = invoke(str(run), "--html", str(tmp_path / "all"))
    assert found.exit_code == 2 and "--last 1," in found.output and not (tmp_path / "all").exists()
    found = invoke(str(run), "--html", str(tmp_path / "last"), "--last", "1")
    assert found.exit_code == 0 and "1 batches, about " in found.output
    assert [folder.name for folder in (tmp_path / "last" / "data").glob("b*")] == ["b2"]
    assert [b["batch"] for b in value(tmp_path / "last" / "data" / "run.js")["batches"]] == TraceFolder(run).numbers


def test_no_text_can_leave_its_string(page: Path) -> None:
    """Files are ASCII on one line, and no text stands in the page's own HTML."""
    for file in (page / "data").rglob("*.js"):
        text = file.read_bytes()
        assert text.isascii() and text.count(b"\n") == 1
    assert all((page / name).read_bytes() == (STATIC / name).read_bytes() for name in FILES)


def test_the_page_allows_its_own_files_alone() -> None:
    text = (STATIC / "index.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not re.search(r"<script(?! src)|<style|\son\w+=|style=|https?:", text)
    for name in SCRIPTS:
        code = (STATIC / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|https?:", code), (
            name
        )


def test_what_is_vendored_has_its_licence_and_a_script() -> None:
    here = {p.name for p in (STATIC / "vendor").iterdir()}
    scripts = {n for n in here if n.endswith((".js", ".css"))}
    renew = (STATIC / "vendor" / "renew.sh").read_text()
    assert scripts == set(VENDORED) and all(name in renew for name in scripts)
    licences = {f"{name}-LICENSE.txt" for names in VENDORED.values() for name in names}
    assert licences <= here & {Path(f).name for f in FILES}


# ---- the server


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:  # noqa: F811
    made = PageServer(TraceFolder(run))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def get(server: PageServer, path: str, host: str | None = None, **headers: str) -> tuple[int, bytes]:
    link = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    link.putrequest("GET", path, skip_host=host is not None)
    if host is not None:
        link.putheader("Host", host)
    for name, text in headers.items():
        link.putheader(name.replace("_", "-"), text)
    link.endheaders()
    answer = link.getresponse()
    assert answer.status != 200 or answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    return answer.status, answer.read()


def test_the_server_serves_the_page_and_its_groups(server: PageServer, page: Path) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/")[1] == (STATIC / "index.html").read_bytes()
    for name in ("data/run.js", "data/b2/g0.js", "vendor/uplot.js"):
        assert get(server, f"/{name}") == (200, (page / name).read_bytes())


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/x",
        "/data/b2/../../x",
        "//etc/passwd",
        "/data/b9/g0.js",
        "/data/b2/g99.js",
        "/page.py",
    ],
)
def test_the_server_reads_nothing_else(server: PageServer, path: str) -> None:
    assert get(server, path)[0] == 404


def test_a_page_elsewhere_cannot_ask_the_server(server: PageServer) -> None:
    assert get(server, "/data/run.js", host="evil.example:80")[0] == 403
    assert get(server, "/data/run.js", Sec_Fetch_Site="cross-site")[0] == 403
    assert get(server, "/data/run.js", Sec_Fetch_Site="same-origin")[0] == 200


def test_a_folder_of_somebody_else_is_not_touched(run: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.csv").write_text("1")
    (tmp_path / "index.html").write_text("mine")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    done = invoke(str(run), "--html", str(tmp_path))
    assert done.exit_code == 2 and str(tmp_path) in done.output
    with pytest.raises(ConfigError):
        list(write_page(TraceFolder(run), tmp_path / "index.html"))
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    out = tmp_path / "page"
    assert [list(write_page(TraceFolder(run), out)) for _ in range(2)] == [[0, 2]] * 2


def test_a_port_that_is_taken_is_named(server: PageServer, run: Path) -> None:  # noqa: F811
    port = str(server.server_address[1])
    done = invoke(str(run), "--serve", "--port", port)
    assert done.exit_code == 2 and f"Port {port} cannot be used" in done.output
    assert invoke(str(run), "--serve", "--batch", "1").exit_code == 2
