"""`rl-plugins bench`: every method on generated tasks, with equal budgets and claims written before the run.

chains.py     the prompts, the verifier, and the rewards
policy.py     the policy of 0.6 million parameters, warm-started once and cached
tasks.py      the tasks: what each trains on, its budget, and the setting in which it differs from `neutral`
variants.py   baselines, and the methods with their parameters
runs.py       trains what is missing, several processes at a time
results.py    the raw results, a Parquet file that anyone can rerun and compare
differences.py, claims.py     differences and intervals, and those of the claims of the cards and their controls
combine.py    Shapley values of methods together, and the search for the best stack
session.py    `rl-plugins bench`; choice.py: which runs a question needs; tables.py: what is printed
verl_runs.py  a sample of the tasks in verl
summary.py    what the package carries of the results, publish.py keeps in a checkout, and published.py reads
page.py, method_page.py, figures.py   the pages and their figures
"""
