"""The demo's headline on seeds that did not choose its setting: GDPO on two rewards of different size, in TRL.

    python examples/evidence/headline.py --out evidence-results/headline

The setting of `rl-plugins demo` was chosen on the seeds 0 to 2. This script runs the same variants on seeds 3 to 7, and
one more: TRL's own `multi_objective_aggregation="normalize_then_sum"`, without this package's methods. Runs are kept in
the folder of the results, so a script that was interrupted goes on. Ten minutes on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from rl_plugins.lab.compare import report
from rl_plugins.lab.compare.plan import Variant, make_plan
from rl_plugins.lab.compare.runs import run_all
from rl_plugins.lab.compare.trl import Trl
from rl_plugins.lab.demo import headline, settings
from rl_plugins.lab.demo.policy import load_policy

HOST_ONLY = Variant("normalize_then_sum", (), ("--multi_objective_aggregation", "normalize_then_sum"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5, 6, 7])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("evidence-results/headline"))
    options = parser.parse_args()
    data = options.out / "data"
    settings.write_data(data)
    config = yaml.safe_dump(headline.config(load_policy(), data.absolute(), long=False))
    plan = make_plan(Trl(config), [*headline.VARIANTS, HOST_ONLY], options.seeds, options.out, notes=headline.NOTES)
    seconds = run_all(plan, options.jobs, watch="rewards/mark/mean", environment=settings.environment(options.out))
    print(report.text(report.write(plan, headline.METRICS, seconds, headline.LABELS)))
    held_out = {name: headline.LABELS[name] for name in headline.METRICS[:2]}
    report.draw(plan, held_out, options.out / "headline.png")


if __name__ == "__main__":
    main()
