"""Several methods and a baseline on one config, under the same budget, over several seeds, with intervals.

`plan.py` says what runs, `runs.py` runs it (a process each, resumable), `report.py` makes figures and text of the logs.
"""

from __future__ import annotations
