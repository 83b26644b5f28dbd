"""Stands in for TRL's `tests/testing_utils.py`, which is not part of the released package."""

import pytest


class TrlTestCase:
    @pytest.fixture(autouse=True)
    def set_tmp_dir(self, tmp_path):
        self.tmp_dir = str(tmp_path)
