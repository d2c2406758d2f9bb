"""Measure the filters alone: key updates a second of one core, compared with filterpy and simdkalman.

`python -m benchmarks.suites.filters` takes about two minutes. All contenders of a work must give the same estimates
before any is timed; then they take turns, round by round, in one process. Writes `filters.json` and `filters.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import results
from benchmarks.contenders.filter_contenders import (
    Contender,
    Filtered,
    filterpy_extended,
    filterpy_linear,
    filterpy_switching,
    filterpy_unscented,
    ours,
    ours_from_rows,
    simdkalman,
)
from benchmarks.workloads import filter_models as models
from benchmarks.workloads.filter_models import Array, Model

ROUNDS = 9
SECONDS = 0.2
"""A contender's turn is repeated until it has taken this many seconds."""
TOLERANCE = 1e-9
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
GOALS = {("linear, n=2, m=1", "simdkalman"): 3, ("linear, n=2, m=1", "filterpy"): 500}
GOALS |= {("unscented, n=4, m=2", "filterpy"): 100}


class Work(NamedTuple):
    """A work: `keys` series of `rows` measurements each, of a model; the first contender is ours."""

    name: str
    keys: int
    rows: int
    model: Model
    contenders: list[Contender]


def works() -> list[Work]:
    """Return all works."""
    found = []
    for dimensions in (1, 2, 3):
        model = models.linear(dimensions)
        contenders = [
            ours(model),
            ours_from_rows(model),
            simdkalman(model, True),
            simdkalman(model, False),
            filterpy_linear(model, True, 0.005),
            filterpy_linear(model, False, 0.005),
        ]
        found.append(Work(f"linear, n={2 * dimensions}, m={dimensions}", 20_000, 25, model, contenders))
    model = models.linear(1)
    for keys in (256, 100_000):
        found.append(
            Work(f"linear, n=2, m=1, {keys:,} keys", keys, 25, model, [ours(model), simdkalman(model, True)])
        )
    for kind, peer in (("extended", filterpy_extended), ("unscented", filterpy_unscented)):
        model = models.tracked(kind)
        contenders = [ours(model), ours_from_rows(model), peer(model, True, 0.001), peer(model, False, 0.001)]
        found.append(Work(f"{kind}, n=4, m=2", 20_000, 25, model, contenders))
    model, noises, transition, start = models.switching()
    contenders = [
        ours(model),
        ours_from_rows(model),
        filterpy_switching(model, noises, transition, start, 0.001),
    ]
    found.append(Work("imm, 2 modes, n=2, m=1", 20_000, 25, model, contenders))
    return found


def measurements(work: Work, keys: int) -> Array:
    """Return measurements (rows, m, keys): the model's prediction and some noise, the same at each call."""
    rng = np.random.default_rng(7)
    m = len(work.model.R)
    expected = np.zeros((work.rows, m, work.keys))
    if not work.model.H.size:
        x = work.model.mean
        for k in range(work.rows):
            x = x if k == 0 else models.move(x)
            expected[k] = models.seen(x)[:, None]
    noise = rng.normal(size=expected.shape) * np.sqrt(np.diag(work.model.R))[:, None]
    return np.ascontiguousarray((expected + noise)[:, :, :keys])


def largest_difference(a: Filtered, b: Filtered) -> float:
    """Return the distance between estimates, relative to their size if that is above 1."""
    pairs = [(a[0], b[0]), (a[1], b[1])]
    if a[2] is not None and b[2] is not None:
        pairs.append((a[2], b[2]))
    return max(float(np.max(np.abs(x - y) / np.maximum(1.0, np.abs(x)))) for x, y in pairs)


def check(work: Work) -> dict[str, float]:
    """Return each contender's largest difference from ours. Raises AssertionError beyond the tolerance."""
    y = measurements(work, 20)
    wanted, *found = [contender.prepare(y)() for contender in work.contenders]
    differences = {
        contender.name: largest_difference(wanted, one)
        for contender, one in zip(work.contenders[1:], found, strict=True)
    }
    for name, difference in differences.items():
        assert difference < TOLERANCE, f"{work.name}: {name} differs from ours by {difference:.1e}"
    return differences


def compare(work: Work, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return key updates a second of each contender, one number a round."""
    prepared: list[tuple[str, int, Callable[[], Filtered]]] = []
    for contender in work.contenders:
        keys = max(10, round(contender.share * work.keys)) if contender.share < 1.0 else work.keys
        run = contender.prepare(measurements(work, keys))
        run()
        prepared.append((contender.name, keys, run))
    rates: dict[str, list[float]] = {name: [] for name, _, _ in prepared}
    for number in range(rounds):
        for name, keys, run in prepared if number % 2 == 0 else prepared[::-1]:
            # processor time: other processes have little influence on it
            count, began = 0, time.process_time()
            while (spent := time.process_time() - began) < seconds or not count:
                run()
                count += 1
            rates[name].append(keys * work.rows * count / spent)
    return rates


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a contender's turn")
    parser.add_argument("--only", nargs="*", help="beginnings of works' names")
    parser.add_argument("--output", type=Path, default=results.RESULTS)
    given = parser.parse_args()
    if any(os.environ.get(name) != "1" for name in THREADS):  # NumPy reads them when it is loaded
        environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.suites.filters", *sys.argv[1:]], environment
        )
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}: what else runs is measured too", file=sys.stderr)
    found: list[dict[str, Any]] = []
    for work in works():
        if given.only and not work.name.startswith(tuple(given.only)):
            continue
        differences = check(work)
        rates = compare(work, given.rounds, given.seconds)
        found.append(result_of(work, rates, differences))
        told = ", ".join(
            f"{one['what']} {one['updates_per_s']['median']:,.0f}" for one in found[-1]["contenders"]
        )
        print(f"{work.name}: {told} updates/s", flush=True)
    document = {
        "commit": results.commit(),
        "machine": results.machine(),
        "threads": 1,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": round(load, 2),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "filterpy", "simdkalman")},
        },
        "works": found,
    }
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "filters.json").write_text(json.dumps(document, indent=1) + "\n")
    path = given.output / "filters.md"
    path.write_text(table(document))
    print(f"\n{path.read_text()}\nwritten to {path} and {path.with_suffix('.json')}")
    return 0


def result_of(work: Work, rates: dict[str, list[float]], differences: dict[str, float]) -> dict[str, Any]:
    """Return the result of a work: for each contender its rates, its distance from ours, and our speed-up."""
    own = rates["ours"]
    contenders = []
    for contender in work.contenders:
        one: dict[str, Any] = {
            "what": contender.name,
            "updates_per_s": results.spread(rates[contender.name]),
        }
        if contender.name in differences:
            one["largest_difference"] = differences[contender.name]
            # round by round, because a slow round slows both
            ratios = [a / b for a, b in zip(own, rates[contender.name], strict=True)]
            one["ours_times_as_fast"] = results.spread(ratios)
            goal = GOALS.get((work.name, contender.name))
            if goal is not None:
                one["goal"] = goal
        contenders.append(one)
    return {"work": work.name, "keys": work.keys, "rows": work.rows, "contenders": contenders}


def table(document: dict[str, Any]) -> str:
    """Return the results as a Markdown page."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines = [
        f"Commit `{document['commit']}`, {document['measured_at']}, {document['machine']}, one thread; {versions}. "
        f"Load when it began: {document['load_before']}.",
        "",
        "Key updates (predict, update, log-likelihood) a second of processor time: median (least to greatest of the "
        "rounds). How many times as fast ours is: median (least to greatest) of the ratios of each round. *states "
        "alone*: without log-likelihood. *rows to estimates*: from sorted rows to an estimate for each, as batch and "
        "stream do it. The estimates were compared before anything was timed: *difference* is the largest from ours.",
        "",
        "| filter | who | updates/s | ours, times as fast | difference |",
        "|---|---|---:|---:|---:|",
    ]
    for work in document["works"]:
        for one in work["contenders"]:
            rate, ratio = one["updates_per_s"], one.get("ours_times_as_fast")
            times = "" if ratio is None else f"{_number(ratio['median'])} x ({_number(ratio['min'])} to "
            times += "" if ratio is None else f"{_number(ratio['max'])})"
            difference = one.get("largest_difference")
            lines.append(
                f"| {work['work']} | {one['what']} | {rate['median']:,.0f} ({rate['min']:,.0f} to "
                f"{rate['max']:,.0f}) | {times} | {'' if difference is None else f'{difference:.0e}'} |"
            )
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
