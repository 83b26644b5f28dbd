"""Fixtures: one engine in this process for colocate mode, one server on loopback for server mode."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trl")]

from processes import started

_spec = importlib.util.find_spec("vllm")  # this folder's name alone may give a spec, without an origin
if _spec is not None and _spec.origin is not None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",  # GiB
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        TORCHDYNAMO_DISABLE="1",  # it would compile the sampler for 20 s, in every process
    )
START_SECONDS = 900
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True, scope="module")
def _probes() -> Iterator[None]:
    """The registry finds the probes of the TRL tests, and only here."""
    import probes

    from rl_plugins.runtime import registry

    entry_points = registry._entry_points
    probes.register()
    yield
    registry._entry_points = entry_points


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trainers are made; `policy/` is a briefly warm-started policy, whose answers depend on the prompt."""
    from rl_plugins.lab.demo.policy import WarmStart, build_model, build_tokenizer, warm_start

    path = tmp_path_factory.mktemp("vllm")
    model, tokenizer = build_model(0), build_tokenizer()
    warm_start(model, tokenizer, WarmStart(steps=100))
    model.save_pretrained(path / "policy")
    tokenizer.save_pretrained(path / "policy")
    return path


@pytest.fixture(scope="session")
def _engines() -> dict[str, Any]:
    return {}


@pytest.fixture
def colocate(_engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Options of a trainer in colocate mode, for weights of a dtype ("auto" is what TRL itself asks for: bfloat16).
    `model` names the policy, if it is not the folder's.

    TRL has no way to pass a dtype or `enforce_eager`, so its `LLM` is wrapped; and starting an engine takes long, so
    trainers share one per model and dtype. Each brings its own weights along before its first rollouts.
    """
    import cpu_adapter
    from trl.generation import vllm_generation

    cpu_adapter.keep_plain_weights()
    original = vllm_generation.LLM

    def options(dtype: str = "float32", model: str = "policy", length: int = 64) -> dict[str, Any]:
        def shared(**kwargs: Any) -> Any:
            if (engine := f"{model} {dtype}") not in _engines:
                _engines[engine] = original(**kwargs, dtype=dtype, enforce_eager=True)
            return _engines[engine]

        monkeypatch.setattr(vllm_generation, "LLM", shared)
        return dict(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=length)

    yield options
    for name in RENDEZVOUS:  # TRL leaves them behind, and the next trainer would take this for a run with ranks
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def server_url(folder: Path) -> Iterator[str]:
    """A vLLM server in processes of its own; stopped with all of them at the end."""
    plugin = folder / "server" / "cpu_adapter-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-adapter\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_adapter = cpu_adapter:register\n")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    python_path = os.pathsep.join([str(plugin.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k not in RENDEZVOUS}
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": python_path.rstrip(os.pathsep)}
    # The module instead of the command `vllm`, which asks for metadata that the package vllm-cpu does not have.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "policy")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "64", "--logprobs-mode", "processed_logprobs"]
    command += ["--max-logprobs", "-1", "--weight-transfer-config", '{"backend": "file"}']
    log = folder / "server" / "log.txt"
    url = f"http://127.0.0.1:{port}"
    with started(command, log, environment) as process:
        _wait_for(url, process, log)
        yield url


@pytest.fixture
def server(server_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a trainer in server mode."""
    import cpu_adapter
    from trl.generation.vllm_client import VLLMClient

    for name, method in cpu_adapter.file_client(folder / "server" / "weights.safetensors").items():
        monkeypatch.setattr(VLLMClient, name, method)
    return dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=server_url)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"The vLLM server did not start within {START_SECONDS} s:\n{log.read_text()[-4000:]}")
