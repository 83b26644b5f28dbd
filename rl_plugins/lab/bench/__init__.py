"""`rl-plugins bench`: every method on generated tasks with dials, with equal budgets and claims told before the run.

chains.py     the tasks, the verifier, and the rewards
policy.py     the policy of 0.6 million parameters, warm-started once and cached
cells.py      the settings of the dials: what a cell trains on, and its budget
arms.py       baselines, and the methods with their parameters
runs.py       trains what is missing, several processes at a time
results.py    the raw results, a Parquet file that anyone can rerun and compare
verdicts.py   differences, intervals, and what becomes of a claim
combine.py    Shapley values of methods together, and the search for the best stack
summary.py    what the package carries of the results, and ours.py reads
page.py       docs/bench.md and its figures
"""
