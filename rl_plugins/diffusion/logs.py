"""Where metrics go: a file of JSON lines, TensorBoard, the console; and sheets of samples from fixed seeds."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import json_lines, whole, write_text
from rl_plugins.diffusion.config import DiffusionConfig

METRICS = "metrics.jsonl"


class Logger:
    """Metrics of a run, in the main process; elsewhere it does nothing.

    Args:
        batch: generation batches that are done: later lines of an interrupted run are cut off.
        on_log: called with every line.
    """

    def __init__(
        self,
        config: DiffusionConfig,
        main: bool,
        batch: int,
        on_log: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.config, self.main, self.on_log = config, main, on_log
        self._window: dict[str, list[float]] = {}
        self._board: Any = None
        self._bar: Any = None
        self._task: Any = None
        if not main:
            return
        self.path = Path(config.output_dir) / METRICS
        kept = [line for line in json_lines(self.path) if line["batch"] <= batch] if batch else []
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        if config.report_to == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as e:
                raise ConfigError(f"report_to=tensorboard needs the package tensorboard ({e}). Install it.") from e
            self._board = SummaryWriter(config.output_dir)
        if config.progress:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

            from rl_plugins.runtime.bars import Bars

            shown = TextColumn("{task.fields[shown]}")
            columns = (TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), shown)
            self._bar = Bars(*columns, console=Console())
            self._task = self._bar.add_task("train", total=config.batches, completed=batch, shown="")
            self._bar.start()

    def add(self, batch: int, step: int, values: Mapping[str, float], totals: Mapping[str, float]) -> None:
        """Metrics of a batch; every `logging_steps` batches their means become a line, with the totals as they are."""
        if not self.main:
            return
        for name, value in values.items():
            self._window.setdefault(name, []).append(value)
        if self._bar is not None:
            shown = f"reward {values.get('reward', math.nan):.3f}  loss {values.get('loss', math.nan):.4f}"
            self._bar.update(self._task, completed=batch, shown=shown)
        if batch % self.config.logging_steps and batch != self.config.batches:
            return
        means = {name: _mean(given) for name, given in self._window.items()} | dict(totals)
        self._window = {}
        line = {"batch": batch, "step": step, **means}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.on_log is not None:
            self.on_log(line)
        for name, mean in means.items():
            if self._board is not None and mean is not None:
                self._board.add_scalar(name, mean, batch)

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._bar.stop()
        with contextlib.suppress(AttributeError):
            self._board.close()


def _mean(values: Sequence[float]) -> float | None:
    known = [v for v in values if not math.isnan(v)]
    return sum(known) / len(known) if known else None


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run."""
    return json_lines(Path(folder) / METRICS)


def write_sheet(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """One image of several: a row of images for each entry. Images below 64 pixels are enlarged.

    Args:
        rows: of tensors (channels, height, width) with values from -1 to 1, or of PIL images.
    """
    from PIL import Image

    images = [[_image(x).convert("RGB") for x in row] for row in rows]
    width, height = images[0][0].size
    scale = max(1, 64 // max(width, height))
    width, height, gap = width * scale, height * scale, 4
    columns = max(len(row) for row in images)
    sheet = Image.new("RGB", (columns * (width + gap) + gap, len(images) * (height + gap) + gap), "white")
    for y, row in enumerate(images):
        for x, image in enumerate(row):
            at = (gap + x * (width + gap), gap + y * (height + gap))
            sheet.paste(image.resize((width, height), Image.Resampling.NEAREST), at)
    with whole(path) as part:
        sheet.save(part)


def _image(x: Any) -> Any:
    from PIL import Image

    if not isinstance(x, Tensor):
        return x
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        raise ConfigError(
            f"A sample has the shape {tuple(x.shape)}, which is no image of 1 or 3 channels. Give `decode`, which "
            f"makes images of latents, or set sheet_every=0."
        )
    pixels = ((x.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
