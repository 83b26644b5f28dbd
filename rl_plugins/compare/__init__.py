"""Several methods and a baseline on one config, under the same budget, over several seeds, with intervals.

`plan.py` says what runs, `runs.py` runs it (a process each, resumable), `report.py` makes figures and text of the logs.
What differs between hosts is in two files each: the arguments of a run in `trl.py` and `verl.py`, the process that
trains with them in `trl_worker.py` and `verl_worker.py`.
"""

from __future__ import annotations
