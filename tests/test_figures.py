"""The style of figures: width, columns, colours that can be told apart, names that do not overlap, light and dark."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rl_plugins.lab.compare import figures


def luminance(color: str) -> float:
    """WCAG's relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def draw(n: int = 3, names: tuple[str, ...] = ("grpo", "gdpo", "vade+mc_grpo"), ends: tuple[float, ...] = (1, 1, 1)):
    figure, axes = figures.panels(n)
    for axis in axes:
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            axis.plot([0, 1], [0, end], label=name, **figures.line(i))
        figures.name_axes(axis, "optimizer step", "right answers (share)")
    figures.name_lines(figure)
    return figure


def test_both_modes_are_written_at_twice_the_width_of_a_page(tmp_path):
    from PIL import Image

    files = figures.save(tmp_path / "curves.png", draw)
    assert [f.name for f in files] == ["curves.png", "curves-dark.png"]
    light, dark = (Image.open(f).convert("RGB") for f in files)
    assert light.size == dark.size and light.size[0] == 1600
    assert light.getpixel((3, 3)) == (255, 255, 255) and max(dark.getpixel((3, 3))) < 40
    assert len(set(map(tuple, np.asarray(light).reshape(-1, 3)[::7].tolist()))) > 20


@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1)), (2, (1, 2)), (3, (2, 2)), (5, (3, 2))])
def test_at_most_two_columns(n, shape):
    figure, axes = figures.panels(n)
    grid = axes[0].get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == shape and len(axes) == n
    assert sum(axis.get_visible() for axis in figure.axes) == n
    figures.plt.close(figure)


@pytest.mark.parametrize("mode", list(figures.PAGE))
def test_colours_are_seen_on_the_page_and_told_apart(mode):
    colors, page = figures.COLORS[mode], figures.PAGE[mode]
    assert contrast(figures.INK[mode], page) > 7
    assert all(contrast(c, page) > 2.2 for c in colors) and all(contrast(c, page) > 3.4 for c in colors[:4])
    okabe_ito = {"#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert set(colors[1:]) <= okabe_ito and len(set(colors)) == len(colors)
    with figures.style(mode):
        looks = [(figures.line(i)["color"], str(figures.line(i)["linestyle"])) for i in range(28)]
    assert len(set(looks)) == 28


def test_lines_are_named_where_they_end_without_overlap():
    with figures.style("light"):
        figure = draw(2, ends=(1.0, 0.99, 0.2))
        figure.draw_without_rendering()
        assert not figure.legends
        for axis in figure.axes:
            boxes = [(t.get_text(), t.get_window_extent()) for t in axis.texts]
            assert {name for name, _ in boxes} == {"grpo", "gdpo", "vade+mc_grpo"}
            for (_, a), (_, b) in itertools.combinations(boxes, 2):
                assert a.y0 >= b.y1 - 1 or b.y0 >= a.y1 - 1
            assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for _, box in boxes)
            assert axis.get_xlabel() == "optimizer step" and axis.get_ylabel() == "right answers (share)"
            assert axis.yaxis.label.get_rotation() == 0
        figures.plt.close(figure)


@pytest.mark.parametrize("names", [("grpo", "a name of a variant that is far too long", "b"), ("grpo", "gdpo", "bars")])
def test_long_names_and_bars_get_one_legend(names):
    with figures.style("light"):
        if names[2] == "bars":
            figure, (axis,) = figures.panels(1)
            figures.bars(axis, ["1 : 1", "100 : 1"], {n: [(0.5, 0.1), (0.2, 0.05)] for n in names})
            figures.name_lines(figure)
        else:
            figure = draw(2, names)
        (legend,) = figure.legends
        assert [t.get_text() for t in legend.get_texts()] == list(names)
        assert not any(axis.texts for axis in figure.axes)
        figures.plt.close(figure)


def test_places_are_moved_apart_and_stay_inside():
    assert figures.spread([0, 50, 100], 10, 0, 100) == [0, 50, 100]
    assert figures.spread([50, 50, 50], 10, 0, 100) == [40, 50, 60]
    assert figures.spread([100, 99, 98], 10, 0, 100) == [100, 90, 80]
    assert figures.spread([0, 5, 90], 10, 0, 100) == [0, 10, 90]
    assert figures.spread([], 10, 0, 100) == []


def test_a_mode_that_is_neither():
    with pytest.raises(ValueError, match="mode is 'sepia'; give one of light, dark"):
        figures.style("sepia")
