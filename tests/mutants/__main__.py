"""Draw mutants, try each, and say which no test noticed: `make mutants N=300 SEED=1`."""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutants import children, drawing, equivalent, reach, trying
from tests.mutants.sources import ROOT, mutated_files

say = functools.partial(print, flush=True)


def main() -> int:
    """Print a line a mutant, the survivors with their changes, and the rate; return 1 below the wanted rate."""
    options = _options()
    known = equivalent.judgements()
    for one in equivalent.stale(known, ROOT):
        say(f"equivalent.toml: {one.path} no longer has: {one.before}")
    children.import_libraries()
    paths = [path for path in mutated_files() if path.startswith(tuple(options.only))]
    if not paths:
        say(f"no mutated file begins with {', '.join(options.only)}: see tests/mutants/sources.py")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        children.copy_tree(tree)
        say("Which tests reach which lines (kept in var/mutants):")
        known_reach = reach.measure(tree, say)
        say(f"Drawing {options.number} mutants with seed {options.seed}:")
        drawn = drawing.draw(paths, options.number, options.seed)
        trials = []
        for number, mutant in enumerate(drawn, 1):
            trials.append(trying.try_mutant(tree, mutant, known_reach, known, options.patience))
            say(f"  {number:4d} {trials[-1].verdict:10s} {mutant.path}:{mutant.line}")
    return _report(trials, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--number", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--only", nargs="+", default=[""], help="draw from files whose paths begin so")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on time limits, for a busy machine"
    )
    parser.add_argument("--least", type=float, default=0.95, help="the rate below which the exit code is 1")
    return parser.parse_args()


def _report(trials: list[trying.Trial], options: argparse.Namespace) -> int:
    counts = Counter(trial.verdict for trial in trials)
    missed = [trial for trial in trials if trial.verdict in ("survived", "unreached")]
    for trial in missed:
        say(f"\n{trial.verdict} ({trial.tests} tests)\n{trial.mutant.diff}")
    noticed, counted = counts["killed"] + counts["timeout"], len(trials) - counts["equivalent"]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rate = noticed / counted if counted else 0.0
    reached = counted - counts["unreached"]
    say(
        f"\ncommit {commit}, seed {options.seed}: of {len(trials)} mutants {counts['killed']} killed, "
        f"{counts['timeout']} endless, {counts['survived']} survived, {counts['unreached']} reached by no test, "
        f"{counts['equivalent']} equivalent: {rate:.1%} noticed, "
        f"{noticed / reached if reached else 0.0:.1%} of those that a test without Spark reaches"
    )
    by_room = Counter(Path(trial.mutant.path).parent.as_posix() for trial in trials)
    lost = Counter(Path(trial.mutant.path).parent.as_posix() for trial in missed)
    for room, number in sorted(by_room.items()):
        say(f"  {room}: {number - lost[room]} of {number}")
    return 0 if rate >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
