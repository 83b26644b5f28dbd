"""`rl-plugins fuse`: real model folders, what it refuses before it writes, memory, and bytes that stay the same."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rl_plugins.commands.cli import app
from rl_plugins.commands.fuse.folder import StoredTensor
from rl_plugins.commands.fuse.plan import FusionPlan
from rl_plugins.commands.fuse.write import write
from rl_plugins.core.errors import ConfigError
from rl_plugins.tools import fusion
from rl_plugins.tools.fusion import FusionRule, fuse

MEAN = ("--no-normalize", "--keep", "1", "--no-erase")


ROOT = Path(__file__).parents[1]


def run(*words: object, status: int = 0) -> str:
    """What the command prints; on an error its message."""
    result = CliRunner().invoke(app, ["fuse", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    return result.stderr if status == 2 else result.stdout


def saved(path: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1, **config: Any) -> Path:
    """A model folder, with an index if there are several files."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "test", **config}))
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", {"format": "pt"})
        return path
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: tensors[n] for n in names[i::shards]}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[i::shards], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def model(seed: int, dtype: torch.dtype = torch.bfloat16, base: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Weights of a small model, or those of an expert near `base`; integers and one norm are as in the base."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (11, 5), "layer.0.weight": (5, 7), "layer.1.bias": (7,), "scale": ()}
    found = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    if base is not None:
        found = {n: base[n].float() + 0.1 * t for n, t in found.items()}
    found = {n: t.to(dtype) for n, t in found.items()} | {"norm.weight": torch.ones(5, dtype=dtype)}
    return found | {"position_ids": torch.arange(6), "mask": torch.tensor([True, False]), "none": torch.zeros(0)}


@pytest.fixture
def three(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base in three files, and two experts in one and two files."""
    base = model(0)
    return (
        saved(tmp_path / "base", base, 3),
        saved(tmp_path / "math", model(1, base=base)),
        saved(tmp_path / "code", model(2, base=base), 2),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


@pytest.mark.parametrize(
    "options", [(), MEAN, ("--select-topk", "0.5", "--weights", "sce", "--keep", "0.6", "--seed", "3")]
)
def test_fuses_as_the_function_does(three: tuple[Path, Path, Path], tmp_path: Path, options: tuple[str, ...]) -> None:
    base, math, code = three
    out = tmp_path / "made" / "fused"
    text = run(base, math, code, "--out", out, *options)
    assert "Written:" in text and "share of the numbers it changes" in text and "Warning" not in text
    rule = {
        (): FusionRule(),
        MEAN: FusionRule(False, 1.0, 1.0, False),
    }.get(options, FusionRule(True, 0.6, 0.5, True, "sce", 3))
    found, parts = all_tensors(out), {n: all_tensors(p) for n, p in zip("bmc", three, strict=True)}
    assert set(found) == set(parts["b"])
    for name, tensor in parts["b"].items():
        if tensor.is_floating_point():
            experts = {"math": parts["m"][name].float().numpy(), "code": parts["c"][name].float().numpy()}
            expected = torch.from_numpy(fuse(tensor.float().numpy(), experts, rule, name)).to(tensor.dtype)
        else:
            expected = tensor
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], expected), name
    assert not torch.equal(found["embed.weight"], parts["b"]["embed.weight"])
    kept = contents(base)
    for name, data in contents(out).items():
        if name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            assert data == kept[name]
    assert set(contents(out)) == {*kept, "fusion.json"}
    assert [p.name for p in out.parent.iterdir()] == ["fused"]
    assert json.loads((out / "fusion.json").read_text())["experts"] == ["code", "math"]
    with safe_open(out / "model-00001-of-00003.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_same_seed_same_bytes_whatever_the_order_and_the_shards(three: Any, tmp_path: Path) -> None:
    base, math, code = three
    run(base, math, code, "--out", tmp_path / "1")
    run(base, code, math, "--out", tmp_path / "2")
    again = saved(tmp_path / "x" / "math", all_tensors(math), 3)
    run(base, f"code={code}", again, "--out", tmp_path / "3")
    run(base, math, code, "--out", tmp_path / "4", "--seed", 1)
    run(base, f"m={math}", code, "--out", tmp_path / "5")
    one, *same, other_seed, other_name = (contents(tmp_path / str(i)) for i in range(1, 6))
    assert one == same[0] == same[1]
    del one["fusion.json"]
    for other in (other_seed, other_name):
        assert any(other[name] != data for name, data in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_that_learned_nothing_give_the_files_of_the_base(tmp_path: Path, dtype: torch.dtype) -> None:
    base = saved(tmp_path / "base", model(0, dtype), 2)
    copies = [Path(shutil.copytree(base, tmp_path / f"e{i}")) for i in range(2)]
    run(base, *copies, "--out", tmp_path / "out")
    found = contents(tmp_path / "out")
    assert found.pop("fusion.json") and found == contents(base)


def test_arithmetic_is_float32_for_weights_in_bf16(tmp_path: Path) -> None:
    """Deltas of 1, 2 and 3 units in the last place: in bf16 their mean and their sum would be rounded at each step."""
    ulp = 2.0**-7  # of bf16 numbers in [1, 2)
    base = {"w": torch.full((3, 4), 1.0, dtype=torch.bfloat16)}
    experts = [saved(tmp_path / f"e{i}", {"w": base["w"] + i * ulp}) for i in (1, 2, 4)]
    run(saved(tmp_path / "base", base), *experts, "--out", tmp_path / "out", *MEAN)
    expected = torch.full((3, 4), 1 + (1 + 2 + 4) / 3 * ulp).to(torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], expected)


def test_experts_may_have_another_float_dtype(tmp_path: Path) -> None:
    base = {"w": torch.zeros(2, 2, dtype=torch.bfloat16)}
    expert = saved(tmp_path / "e", {"w": torch.full((2, 2), 0.75)})
    run(saved(tmp_path / "base", base), expert, "--out", tmp_path / "out", "--keep", 1)
    found = load_file(tmp_path / "out/model.safetensors")["w"]
    assert found.dtype == torch.bfloat16 and (found == 0.75).all()


def test_integers_that_differ_are_told(tmp_path: Path) -> None:
    base = {"w": torch.zeros(2, 2), "steps": torch.tensor([1])}
    expert = saved(tmp_path / "e", {"w": torch.ones(2, 2), "steps": torch.tensor([9])})
    text = run(saved(tmp_path / "base", base), expert, "--out", tmp_path / "out")
    assert "Warning: 1 tensors of integers differ between the folders, for example steps" in text
    assert load_file(tmp_path / "out/model.safetensors")["steps"].item() == 1


# ---- tied weights


def tied(path: Path, shift: float, apart: bool = False, once: bool = False, **config: Any) -> Path:
    table = torch.linspace(-1, 1, 40).reshape(8, 5) + shift * torch.randn(8, 5, generator=torch.manual_seed(1))
    tensors = {"model.embed_tokens.weight": table}
    if not once:
        tensors["lm_head.weight"] = table.clone() + apart * 0.5
    return saved(path, tensors, **config)


def test_tied_weights_that_are_stored_twice_stay_equal(tmp_path: Path) -> None:
    folders = [tied(tmp_path / n, s) for n, s in (("base", 0), ("a", 0.1), ("b", 0.2))]
    text = run(*folders, "--out", tmp_path / "out", "--keep", 0.5)
    assert "model.embed_tokens.weight = lm_head.weight" in text
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    base = load_file(folders[0] / "model.safetensors")["lm_head.weight"]
    assert 0 < (found["lm_head.weight"] == base).float().mean() < 0.8  # the dropout was at work


def test_matrices_that_are_equal_by_chance_are_not_tied(tmp_path: Path) -> None:
    """Zeros and ones, and models whose config says that nothing is tied, have a dropout for each tensor."""
    flat = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}
    moved = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    run(saved(tmp_path / "base", flat), saved(tmp_path / "e", moved), "--out", tmp_path / "out")
    apart = [
        tied(tmp_path / n, s, apart=n == "z", tie_word_embeddings=False)
        for n, s in (("free", 0), ("y", 0.1), ("z", 0.1))
    ]
    run(*apart, "--out", tmp_path / "out2")


# ---- refusals, before anything is written


def _bin_only(p: Path) -> None:
    (p / "model.safetensors").unlink()
    torch.save({}, p / "pytorch_model.bin")


def _adapter(p: Path) -> None:
    (p / "adapter_config.json").write_text("{}")


def _damaged(p: Path) -> None:
    file = p / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def _no_index(p: Path) -> None:
    save_file({"x": torch.zeros(1)}, p / "second.safetensors")


def _quantized(p: Path) -> None:
    (p / "config.json").write_text('{"quantization_config": {"bits": 4}}')


def _tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    def change(p: Path) -> None:
        tensors = load_file(p / "model.safetensors")
        tensors.pop(name, None)
        save_file(tensors if value is None else {**tensors, name: value}, p / "model.safetensors")

    return change


def _index(text: str) -> Callable[[Path], None]:
    return lambda p: (p / "model.safetensors.index.json").write_text(text) and None


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "bin": (_bin_only, "has no safetensors file, but pytorch_model.bin. Only safetensors can be fused. Load the model"),
    "adapter": (_adapter, "is a LoRA adapter. Merge it first"),
    "damaged": (_damaged, "is no whole safetensors file"),
    "several files": (_no_index, "has 2 safetensors files and no *.safetensors.index.json"),
    "quantized": (_quantized, "is quantized"),
    "missing": (_tensor("scale", None), "the tensor scale is in `base` and not in `math`. Fuse models of one"),
    "further": (_tensor("extra", torch.zeros(2)), "the tensor extra is in `math` and not in `base`"),
    "head": (_tensor("lm_head.weight", torch.zeros(2)), "one model ties them to the embeddings and the other trained"),
    "shape": (_tensor("layer.0.weight", torch.zeros(7, 5)), "has the shape [5, 7] in the base and [7, 5] in `math`"),
    "kind": (_tensor("scale", torch.tensor(3)), "the tensor scale is BF16 in the base and I64 in `math`. Save both"),
    "float64": (_tensor("scale", torch.tensor(3.0, dtype=torch.float64)), "has dtype F64. Weights must be F32, F16"),
    "no index": (_index("{"), "cannot be read"),
    "file gone": (_index('{"weight_map": {"scale": "gone.safetensors"}}'), "names the file gone.safetensors, which"),
    "outside": (_index('{"weight_map": {"scale": "../base/model-00001-of-00003.safetensors"}}'), "which is not in"),
    "not there": (_index('{"weight_map": {"y": "model.safetensors"}}'), "has the tensor y; the file does not"),
    "not listed": (_index('{"weight_map": {"scale": "model.safetensors"}}'), "which the index does not list"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_folders_that_cannot_be_fused(three: Any, tmp_path: Path, what: str) -> None:
    base, math, code = three
    change, text = CHANGES[what]
    change(math)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert text in run(base, code, math, "--out", tmp_path / "out", status=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_tied_weights_that_differ_between_folders(tmp_path: Path) -> None:
    base, twice = tied(tmp_path / "base", 0), tied(tmp_path / "twice", 0.1)
    once, apart = tied(tmp_path / "once", 0.1, once=True), tied(tmp_path / "apart", 0.1, apart=True)
    out = ("--out", tmp_path / "out")
    assert "is in `base` and not in `once`. There it is tied to model.embed_tokens" in run(base, once, *out, status=2)
    assert "is in `twice` and not in `base`. There it is tied" in run(once, twice, *out, status=2)
    assert "are the same weights in `base` and differ in `apart`" in run(base, twice, apart, *out, status=2)
    assert "are the same weights in `twice` and differ in `base`" in run(apart, twice, *out, status=2)


def test_names_and_places_that_cannot_be_used(three: Any, tmp_path: Path) -> None:
    base, math, code = three
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    other = shutil.copytree(math, tmp_path / "other" / "math")
    out = tmp_path / "out"
    for words, text in [
        ((base, math, "--out", full), "exists and is not an empty folder. Nothing was written"),
        ((base, math, other, "--out", out), "two experts have the name math"),
        ((base, f"base={math}", "--out", out), "has the name `base`"),
        ((base, f"={math}", "--out", out), "has no name or no folder. Write FOLDER or NAME=FOLDER"),
        ((base, "Qwen/Qwen3-0.6B", "--out", out), "which is not a folder. Give a local model folder"),
        ((base, math, "--out", out, "--keep", 0), "--keep is 0.0. It must be in (0, 1]"),
    ]:
        assert text in run(*words, status=2)
    assert not out.exists() and contents(full) == {"file": b""}


def test_a_full_disk_is_told_before_writing(three: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    assert "GB are free. Give another --out" in run(*three, "--out", tmp_path / "out", status=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_leave_nothing_behind(three: Any, tmp_path: Path, value: float) -> None:
    base, math, code = three
    _tensor("scale", torch.tensor(value, dtype=torch.bfloat16))(math)
    before = sorted(p.name for p in tmp_path.iterdir())
    text = run(base, math, code, "--out", tmp_path / "out", status=2)
    assert "the tensor scale of `math` or of the base has numbers that are not finite" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_results_beyond_the_range_of_the_dtype(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", {"w": torch.zeros(64, dtype=torch.float16)})
    expert = saved(tmp_path / "e", {"w": torch.full((64,), 65000, dtype=torch.float16)})
    text = run(base, expert, "--out", tmp_path / "out", "--keep", 0.5, status=2)
    assert "the fused tensor w has numbers beyond the range of F16" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_an_end_in_the_middle_leaves_nothing(three: Any, tmp_path: Path, error: BaseException) -> None:
    def stop(_: int) -> None:
        raise error

    base, math, _ = three
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(type(error)):
        write(FusionPlan.of(base, [str(math)], tmp_path / "out", FusionRule()), stop)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_dry_run_prints_the_plan_and_writes_nothing(three: Any, tmp_path: Path) -> None:
    base, math, code = three
    (base / "pytorch_model.bin").touch()
    (base / "README.md").touch()
    (base / "original").mkdir()
    before = sorted(p.name for p in tmp_path.iterdir())
    text = run(base, math, code, "--out", tmp_path / "out", "--dry-run", "--select-topk", 0.5)
    for shown in [
        r"expert math +\S*math",
        r"dropout +keep 0.9, seed 0",
        r"select +0.5 of each",
        r"fused +6 tensors, 103 numbers",
        r"copied +2 tensors of integers",
        r"files +config.json, tokenizer.json",
        r"left out +README.md, original/, pytorch_model.bin",
        r"memory +0.0 MB for deltas",
        r"Nothing was written \(--dry-run\)",
    ]:
        assert re.search(shown, text), (shown, text)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


# ---- memory


@pytest.mark.parametrize("select", [1.0, 0.5])
def test_memory_holds_one_tensor_per_expert_and_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select: float
) -> None:
    """Peak of Python's and numpy's memory. torch, whose memory is not counted here, converts no more than a chunk."""
    chunk = 1 << 12
    monkeypatch.setattr(fusion, "CHUNK", chunk)
    size = 80 * chunk
    g = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(size, generator=g).to(torch.bfloat16) for n in "abc"}
    base = saved(tmp_path / "base", tensors)
    experts = [str(saved(tmp_path / f"e{i}", {n: t + i for n, t in tensors.items()})) for i in (1, 2, 3)]
    longest = 0
    floats = StoredTensor.floats

    def watched(self: StoredTensor, span: slice) -> np.ndarray:
        nonlocal longest
        longest = max(longest, span.stop - span.start)
        return floats(self, span)

    monkeypatch.setattr(StoredTensor, "floats", watched)
    tracemalloc.start()
    try:
        plan = FusionPlan.of(base, experts, tmp_path / "out", FusionRule(select_topk=select))
        write(plan)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    one = 4 * size
    assert plan.memory == (3 if select == 1 else 4) * one
    assert peak < plan.memory + 0.8 * one, (peak / one, plan.memory / one)
    assert longest == chunk


# ---- a real model


def test_a_fused_transformers_model_loads_and_generates(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    trained = AutoModelForCausalLM.from_config(config)
    trained.save_pretrained(tmp_path / "base", max_shard_size="6KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    for name in ("a", "b"):
        with torch.no_grad():
            for p in trained.parameters():
                p += 0.01 * torch.randn_like(p)
        trained.save_pretrained(tmp_path / name)
    run(*(tmp_path / n for n in ("base", "a", "b")), "--out", tmp_path / "fused", *MEAN)
    base, a, b, fused = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / n).named_parameters()) for n in ("base", "a", "b", "fused")
    )
    for name, p in fused.items():
        torch.testing.assert_close(p, (a[name] + b[name]) / 2, rtol=1e-5, atol=1e-6)
        assert not torch.equal(p, base[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_permissions_of_the_result_are_the_usual_ones(three: Any, tmp_path: Path) -> None:
    run(*three, "--out", tmp_path / "out")
    (tmp_path / "usual").mkdir()
    assert os.stat(tmp_path / "out").st_mode == os.stat(tmp_path / "usual").st_mode


def test_a_base_that_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`base` is .*which is not a folder"):
        FusionPlan.of(tmp_path / "no", ["x"], tmp_path / "out", FusionRule())


# ---- the page


def test_the_example_of_the_page_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "fusion.md").read_text()
    make, look = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(make, {})
    for line in commands.splitlines():
        program, command, *words = shlex.split(line)
        assert (program, command) == ("rl-plugins", "fuse")
        run(*words)
    capsys.readouterr()
    exec(look, {})
    assert capsys.readouterr().out == printed


def test_the_values_of_the_page_are_the_defaults() -> None:
    """Every option that changes the result is in the table, with its default."""
    table = {
        cells[3].strip(" `"): cells[4].strip()
        for line in (ROOT / "docs" / "fusion.md").read_text().splitlines()
        if len(cells := line.split("|")) == 7 and "`--" in cells[3]
    }
    rule = FusionRule()
    assert rule.normalize and rule.erase
    assert table == {
        "--no-normalize": "on",
        "--keep": f"{rule.keep:g}",
        "--select-topk": f"{rule.select_topk:g}: all stay",
        "--no-erase": "on",
        "--weights": rule.weights,
    }
