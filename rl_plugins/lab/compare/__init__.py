"""Several methods and a baseline on one config, under the same budget, over several seeds, with intervals.

`plan.py` says what runs, `runs.py` runs it (a process each, resumable), `costs.py` reads from the logs what each run
has cost and where a budget ends it, `report.py` makes figures (in the style of `figures.py`) and text of them.
What differs between hosts is in two files each: the arguments of a run in `trl.py` and `verl.py`, the process that
trains with them in `trl_worker.py` (`masked_worker.py` for masked diffusion models) and `verl_worker.py`.
"""

from __future__ import annotations
