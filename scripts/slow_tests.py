"""Give each slow test its turn: `python scripts/slow_tests.py share` runs those that are due, within ten minutes.

In this order, as long as the time lasts:

1. alternately, a test whose turn it is by the number of the commit (one in TURNS), and a test with a change: in its
   file, or in a module that has its name or that it imports;
2. the other tests, from the oldest last green run on.

A change is one in commits after a test's last green run, among the last COMMITS. tests/slow_runs.tsv records each
test's seconds and the number of the commit of its last green run. A run writes it: commit it with your change. `all`
runs every slow test and writes it, too; more arguments are pytest's. `list` runs none.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("tests", "slow_runs.tsv")
HEAD = "test\tseconds\tgreen\n"
MARKS = "slow and not soak"
TURNS = 12
"""Number of consecutive commits in which each test has one turn."""
COMMITS = 40
SECONDS = 600.0
"""Seconds that the tests of a share take together, estimated from their last runs."""
LIMIT_SECONDS = 720.0
"""Seconds after which a share is ended; tests that have not run are listed and do not count as failures."""
STOP_SECONDS = 30.0
UNKNOWN_SECONDS = 90.0
RESULTS = "SLOW_TESTS_RESULTS"
NO_TESTS = 5  # pytest's exit code


class Run(NamedTuple):
    """The record of a test: its seconds, and the number of the commit of its last green run; None without one."""

    seconds: float | None = None
    green: int | None = None

    @property
    def expected(self) -> float:
        """Return the expected seconds of the test."""
        return UNKNOWN_SECONDS if self.seconds is None else self.seconds


class Share(NamedTuple):
    """The tests that run now, each with the reason; due tests without time left; tests longer than a share."""

    run: dict[str, str]
    waiting: dict[str, str]
    too_long: list[str]


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def turn_of(position: int, commit: int) -> int:
    """Return the number of the last commit at which the test with this position had its turn."""
    return commit - (commit - position) % TURNS


def read_record(path: Path) -> dict[str, Run]:
    """Return the record of each test."""
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    cells = [line.split("\t") for line in lines]
    return {
        test: Run(float(seconds) if seconds else None, int(green) if green else None)
        for test, seconds, green in cells
    }


def write_record(path: Path, tests: Sequence[str], known: Mapping[str, Run]) -> None:
    """Write the records of the existing tests."""
    rows = [(test, known.get(test, Run())) for test in sorted(tests)]
    lines = [
        f"{test}\t{'' if run.seconds is None else f'{run.seconds:.0f}'}\t{'' if run.green is None else run.green}\n"
        for test, run in rows
    ]
    path.write_text(HEAD + "".join(lines))


def modules_of(file: Path, root: Path) -> set[str]:
    """Return our files that a test file covers: those that it imports, and the one with its name."""
    about = file.relative_to(root / "tests").with_name(file.name.removeprefix("test_"))
    found = {str(about)}
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        for name in names:
            path = name.replace(".", "/")
            found |= {f"{path}.py", f"{path}/__init__.py"}
    return found


def choose(
    tests: Sequence[str],
    known: Mapping[str, Run],
    commit: int,
    changed: Mapping[str, int],
    modules: Mapping[str, set[str]],
    workers: int = 1,
) -> Share:
    """Choose the tests of a share.

    Args:
        tests: all slow tests.
        known: their records.
        commit: number of the current commit.
        changed: the number of the last commit that changed a file, for recently changed files.
        modules: the files that each test file covers.
        workers: number of processes that run the test files.
    """
    green = {test: known.get(test, Run()).green or 0 for test in tests}
    turns = {test for position, test in enumerate(sorted(tests)) if turn_of(position, commit) == commit}
    changes = {}
    for test in tests:
        own = changed.get(file_of(test), 0)
        module = max((changed.get(path, 0) for path in modules.get(file_of(test), ())), default=0)
        if own > green[test]:
            changes[test] = (0, -own, "its file has changed")
        elif module > green[test]:
            changes[test] = (1, -module, "a module of it has changed")
    # In turns, so that neither takes all of the time.
    both = itertools.zip_longest(
        sorted(turns, key=lambda test: (green[test], test)),
        sorted(changes, key=lambda test: (changes[test], test)),
    )
    reasons = {
        test: "its turn" if test in turns else changes[test][2] for pair in both for test in pair if test
    }
    due = set(reasons)
    for test in sorted(green, key=lambda test: (green[test], test)):
        if green[test] < commit:
            reasons.setdefault(test, "the oldest run")
    share = Share({}, {}, [])
    taken: dict[str, float] = {}
    for test, reason in reasons.items():
        seconds = known.get(test, Run()).expected
        after = {**taken, file_of(test): taken.get(file_of(test), 0.0) + seconds}
        if seconds > SECONDS:
            share.too_long.append(test)
        elif max(sum(after.values()) / workers, *after.values()) <= SECONDS:
            share.run[test], taken = reason, after
        elif test in due:
            share.waiting[test] = reason
    return share


def results_in(path: Path) -> dict[str, tuple[str, float]]:
    """Return outcome and seconds of each ended test, from the plug-in's file."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        part = json.loads(line)
        parts.setdefault(part["test"], []).append(part)
    found = {}
    for test, mine in parts.items():
        if mine[-1]["when"] == "teardown":  # else the test was cut off
            outcomes = {part["outcome"] for part in mine}
            outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
            found[test] = (outcome, sum(part["seconds"] for part in mine))
    return found


def updated(
    known: Mapping[str, Run], results: Mapping[str, tuple[str, float]], commit: int
) -> dict[str, Run]:
    """Return the records after a run; a skipped test has not run."""
    new = dict(known)
    for test, (outcome, seconds) in results.items():
        if outcome != "skipped":
            green = commit if outcome == "passed" else known.get(test, Run()).green
            new[test] = Run(seconds, green)
    return new


def pytest_runtest_logreport(report: Any) -> None:
    """Record each part of a test as it ends: pytest calls this function, since the script is its plug-in."""
    if RESULTS in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[RESULTS], "a") as out:
            part = {
                "test": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": report.duration,
            }
            out.write(json.dumps(part) + "\n")


def git(*words: str, root: Path) -> str:
    """Return the output of a git command."""
    # A checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", *words]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def number_of(commit: str, root: Path) -> int:
    """Return the number of a commit: the count of its ancestors and itself."""
    return int(git("rev-list", "--count", commit, root=root))


def changed_files(root: Path, commit: int) -> dict[str, int]:
    """Return the number of the last commit that changed a file, for the last COMMITS of the main line.

    Changes that are not committed yet have the next number.
    """
    found = {line[3:]: commit + 1 for line in git("status", "--porcelain", root=root).splitlines()}
    log = git("log", f"-{COMMITS}", "-m", "--first-parent", "--format=%x00%H", "--name-only", root=root)
    for entry in log.split("\0")[1:]:
        one, *names = entry.split("\n")
        number = number_of(one, root)
        for name in filter(None, names):
            found.setdefault(name, number)
    return found


def collect(root: Path) -> list[str]:
    """Return the slow tests, by pytest."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKS]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, NO_TESTS):
        print(done.stdout + done.stderr, file=sys.stderr)
        raise SystemExit("error: the slow tests cannot be collected")
    return [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]


def run_tests(
    root: Path, workers: int, words: Iterable[str], limit: float | None
) -> tuple[int | None, dict[str, tuple[str, float]]]:
    """Run pytest; return its exit code, None if it was cut off, and the results."""
    spread = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        command = [sys.executable, "-m", "pytest", "-p", "scripts.slow_tests", "-m", MARKS, *spread, *words]
        env = {
            **os.environ,
            RESULTS: str(results),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        }
        env.pop("PYTEST_XDIST_WORKER", None)  # of a test of this script
        process = subprocess.Popen(
            command, cwd=root, env=env, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(limit), results_in(results)
        except subprocess.TimeoutExpired:
            ended = results_in(results)
            os.killpg(process.pid, signal.SIGINT)  # as by Ctrl-C: each process ends its children
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None, ended  # tests that failed because they were ended are not in it


def report(tests: Sequence[str], known: Mapping[str, Run], commit: int) -> None:
    """Print the last green run of each test, the oldest first, and the last turn that it had by its number."""
    turns = {test: turn_of(position, commit) for position, test in enumerate(sorted(tests))}
    print(
        f"\nlast green run of each of {len(tests)} slow tests, and its last turn (this is commit {commit}):"
    )
    for test in sorted(tests, key=lambda test: (known.get(test, Run()).green or 0, test)):
        run = known.get(test, Run())
        seconds = "? s" if run.seconds is None else f"{run.seconds:.0f} s"
        print(f"  green {run.green or 'never':>5}  turn {turns[test]:>5}  {seconds:>6}  {test}")


def print_list(title: str, lines: Sequence[str]) -> None:
    """Print a list with its title, if it has lines."""
    if lines:
        print(f"\n{title}:", *(f"  {line}" for line in lines), sep="\n")


def run_share(root: Path, tests: Sequence[str], commit: int, workers: int, arguments: Sequence[str]) -> int:
    """Run the due tests; return the exit code: not 0 if a test failed."""
    known = read_record(root / RECORD)
    modules = {file: modules_of(root / file, root) for file in {file_of(test) for test in tests}}
    share = choose(tests, known, commit, changed_files(root, commit), modules, workers)
    expected = sum(known.get(test, Run()).expected for test in share.run)
    print(f"{len(share.run)} of {len(tests)} slow tests, {expected:.0f} s on {workers} processes:")
    print(*(f"  {test}: {reason}" for test, reason in share.run.items()), sep="\n", flush=True)
    code, results = NO_TESTS, {}
    if share.run:
        code, results = run_tests(root, workers, [*share.run, *arguments], LIMIT_SECONDS)
    now = updated(known, results, commit)
    write_record(root / RECORD, tests, now)
    report(tests, now, commit)
    failed = [test for test, (outcome, _) in results.items() if outcome == "failed"]
    print_list("due, and no time was left", [f"{test}: {why}" for test, why in share.waiting.items()])
    print_list("longer than a share: `make test-slow` alone runs them", share.too_long)
    print_list("skipped", [test for test, (outcome, _) in results.items() if outcome == "skipped"])
    print_list("cut off", [test for test in share.run if code is None and test not in results])
    print_list("failed", failed)
    print(f"\nslow tests: {len(results) - len(failed)} of {len(share.run)} without a failure")
    return 1 if failed else 0 if code in (None, NO_TESTS) else code


def main(words: Sequence[str]) -> int:
    """Run a share, all slow tests or none, and print the last green run of each."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the tests end with us
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("what", choices=["share", "all", "list"])
    parser.add_argument("--workers", type=int, default=1, help="processes that the tests are shared out to")
    given, arguments = parser.parse_known_args(words)
    commit = number_of("HEAD", ROOT)
    tests = collect(ROOT)
    if given.what == "share":
        return run_share(ROOT, tests, commit, given.workers, arguments)
    known, code = read_record(ROOT / RECORD), 0
    if given.what == "all":
        code, results = run_tests(ROOT, given.workers, arguments, None)
        known = updated(known, results, commit)
        write_record(ROOT / RECORD, tests, known)
    report(tests, known, commit)
    return code or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
