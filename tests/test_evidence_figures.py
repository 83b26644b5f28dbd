"""The figures of the evidence: one per script, for light and dark pages, small, and of a size that can be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted({file.stem for file in (ROOT / "examples/evidence").glob("*.py")} - {"common"})
FIGURES = ROOT / "docs" / "figures" / "evidence"
NONE = {"prompts", "staleness", "staleness_async"}  # hours of training with TRL's trainer


def test_each_script_has_its_figures_and_each_figure_its_script():
    drawn = {file.stem for file in FIGURES.glob("*.png")}
    assert drawn == {name + dark for name in set(SCRIPTS) - NONE for dark in ("", "-dark")}


@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - NONE))
def test_a_figure_can_be_read_at_800_pixels(name: str):
    papers = []
    for dark in ("", "-dark"):
        file = FIGURES / f"{name}{dark}.png"
        assert file.stat().st_size < 100_000, file
        with Image.open(file) as image:
            assert image.width == 1600 and image.height <= 2600, file
            papers.append(np.asarray(image.convert("L"))[0, 0])
    assert papers[0] > 250 and papers[1] < 20
