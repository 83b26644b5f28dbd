"""The style of all figures: at most two columns, safe for the colour-blind, lines named where they end, light and dark.

A figure is 1,600 pixels wide, so that it is sharp and can be read at a page width of 800. Use:

    def draw():
        figure, (left, right) = panels(2)
        for i, (name, x, y) in enumerate(series):
            left.plot(x, y, label=name, **line(i))
        name_axes(left, "optimizer step", "right answers, held out (share)")
        ...
        name_lines(figure)
        return figure

    save(Path("curves.png"), draw)      # writes curves.png and curves-dark.png
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # figures are only written to files

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from rl_plugins.core.files import whole

WIDTH, DPI = 8.0, 200  # inches, pixels per inch
COLUMNS = 2
TINTS = 64  # colours of a file, shades of text and of bands included
PAGE = {"light": "#ffffff", "dark": "#0d1117"}
INK = {"light": "#24292f", "dark": "#d1d7e0"}
# Okabe and Ito's palette. Before it, a grey for the baseline; colours near the background come last or not at all.
COLORS = {
    "light": ("#6e6e6e", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    "dark": ("#a8b0ba", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#D55E00"),
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "ooo", "---")
SHORT, FEW = 18, 7  # characters of a name, and number of lines, that fit beside a panel
GAP = 11.0  # points from one name to the next


def style(mode: str) -> AbstractContextManager[None]:
    """The settings of matplotlib for "light" or "dark", as a context. `save` enters it.

    Raises:
        ValueError: another mode.
    """
    if mode not in PAGE:
        raise ValueError(f"mode is {mode!r}; give one of {', '.join(PAGE)}.")
    page, ink = PAGE[mode], INK[mode]
    settings = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        "axes.prop_cycle": plt.cycler(color=COLORS[mode]),
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": ink,
        "grid.alpha": 0.18,
        "grid.linewidth": 0.6,
        **{f"axes.spines.{side}": False for side in ("top", "right")},
        "font.size": 9,
        "axes.labelsize": 9,
        "axes.titlesize": 9.5,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "hatch.linewidth": 0.5,
    }
    return plt.rc_context(settings)


def save(file: Path, draw: Callable[[], Figure]) -> tuple[Path, Path]:
    """Writes a figure twice, for light and for dark pages.

    Args:
        file: name of the light one, e.g. `curves.png`; the dark one is `curves-dark.png` in the same folder.
        draw: makes the figure; called once per mode.

    Returns:
        Both files.
    """
    files = file, file.with_name(f"{file.stem}-dark{file.suffix}")
    for mode, path in zip(PAGE, files, strict=True):
        with style(mode), whole(path) as part:
            figure = draw()
            figure.savefig(part, dpi=DPI)
            plt.close(figure)
            _shrink(part)
    return files


def _shrink(path: Path) -> None:
    """A third of the bytes: as many colours as shades are told apart, the page's own exactly."""
    with Image.open(path) as drawn:
        page = drawn.convert("RGB").getpixel((0, 0))
        small = drawn.convert("RGB").quantize(TINTS, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette = small.getpalette() or []
    at = 3 * int(small.getpixel((0, 0)))  # type: ignore[arg-type]
    palette[at : at + 3] = page  # type: ignore[assignment]
    small.putpalette(palette)
    small.save(path, optimize=True)


def panels(n: int, height: float = 2.7, columns: int = COLUMNS, **subplots: Any) -> tuple[Figure, list[Axes]]:
    """A figure of n panels, at most two in a row.

    Args:
        n: number of panels.
        height: of a row, in inches.
        columns: 1 or 2.
        subplots: for `pyplot.subplots`, e.g. sharey=True.
    """
    columns = min(n, columns, COLUMNS)
    rows = -(-n // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(WIDTH, height * rows), squeeze=False, layout="constrained", **subplots
    )
    for axis in grid.flat[n:]:
        axis.set_visible(False)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.1, wspace=0.04, hspace=0.06)  # type: ignore[union-attr, call-arg]
    return figure, list(grid.flat[:n])


def color(i: int) -> str:
    """Colour of series i in the mode that is being drawn; 0 is the baseline."""
    cycle: Sequence[str] = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    return cycle[i % len(cycle)]


def line(i: int) -> dict[str, Any]:
    """Colour and dashes of line i, for `axis.plot`: two series differ in one of both, so that print needs no colour."""
    return {"color": color(i), "linestyle": DASHES[i % len(DASHES)], "lw": 2.0}


def bar(i: int) -> dict[str, Any]:
    """Colour and hatch of bar i, for `axis.bar`."""
    return {
        "color": color(i),
        "hatch": HATCHES[i % len(HATCHES)],
        "edgecolor": plt.rcParams["axes.facecolor"],
        "linewidth": 0.0,
        "alpha": 0.9,
        "error_kw": {"ecolor": plt.rcParams["text.color"], "elinewidth": 1.0, "capsize": 2.5},
    }


def bars(axis: Axes, groups: Sequence[str], series: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Grouped bars with 95 % intervals.

    Args:
        axis: where to draw.
        groups: names below the groups.
        series: name -> (mean, half width of the interval) per group, the baseline first.
    """
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        at = [g + width * (i - (len(series) - 1) / 2) for g in range(len(groups))]
        axis.bar(at, [m for m, _ in values], width * 0.92, yerr=[h for _, h in values], label=name, **bar(i))
    axis.set_xticks(range(len(groups)), groups)
    axis.grid(visible=False, axis="x")


def name_axes(axis: Axes, x: str, y: str) -> None:
    """Names of both axes, with units. That of the vertical axis stands above it, where it is read without turning."""
    axis.set_xlabel(x)
    axis.set_ylabel(y, rotation=0, ha="left", va="bottom")
    axis.yaxis.set_label_coords(0.0, 1.03)
    axis.set_title("\n".join(" " for _ in y.split("\n")), loc="right", pad=8)  # room, which labels above get none of


def name_lines(figure: Figure) -> None:
    """Names every labelled line at its end. Where names are long or many, and for bars, one legend for all panels."""
    found: dict[str, Any] = {}
    axes = [axis for axis in figure.axes if axis.get_visible()]
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    lines = [[item for item in axis.lines if not str(item.get_label()).startswith("_")] for axis in axes]
    only_lines = sum(map(len, lines)) == sum(len(axis.get_legend_handles_labels()[0]) for axis in axes)
    if not only_lines or len(found) > FEW or max(map(len, found), default=0) > SHORT:
        columns = max(1, min(len(found), 90 // (max(map(len, found), default=1) + 6)))
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns, handlelength=2.6)
        return
    figure.draw_without_rendering()
    for axis, here in zip(axes, lines, strict=True):
        _name_ends(axis, here)


def _name_ends(axis: Axes, lines: Sequence[Any]) -> None:
    """Names at the right edge of a panel, in the order of the ends, moved apart where they would overlap."""
    ends = []
    for item in lines:
        y = [float(v) for v in item.get_ydata() if float(v) == float(v)]
        if y:
            ends.append((axis.transLimits.transform(axis.transScale.transform((1.0, y[-1])))[1], item))
    points = axis.get_window_extent().height / axis.figure.dpi * 72
    places = spread([at * points for at, _ in ends], GAP, 0.0, points)
    for (_, item), place in zip(ends, places, strict=True):
        axis.annotate(
            str(item.get_label()),
            (1.0, place / points),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            ha="left",
            color=item.get_color(),
            fontsize=8.5,
            fontweight="bold",
            annotation_clip=False,
        )


def spread(at: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places next to the wanted ones, in the same order, at least `gap` apart, between low and high if they fit.

    Args:
        at: wanted places.
        gap: least distance.
        low, high: the room.
    """
    order = sorted(range(len(at)), key=lambda i: at[i])
    clusters: list[tuple[list[int], float]] = []  # members and centre
    for i in order:
        clusters.append(([i], at[i]))
        while len(clusters) > 1:
            (a, ca), (b, cb) = clusters[-2:]
            if cb - ca >= gap * (len(a) + len(b)) / 2:
                break
            clusters[-2:] = [(a + b, (ca * len(a) + cb * len(b)) / (len(a) + len(b)))]
    places = [0.0] * len(at)
    for members, centre in clusters:
        half = gap * (len(members) - 1) / 2
        centre = max(low + half, min(high - half, centre))
        for k, i in enumerate(members):
            places[i] = centre - half + gap * k
    return places
