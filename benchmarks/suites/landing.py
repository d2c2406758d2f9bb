"""Measure the landing of files as users wait for it: whole cold processes, beside other ways to the same Delta rows.

`python -m benchmarks.suites.landing` writes files once and lands them in new processes, in turn: `ours` is `ingest`,
which checks each row; `copy` is pyarrow and delta-rs, `spark` Spark's own CSV to Delta with its start, `polars` Polars
where it is installed: these take rows as they are. Seconds are those of the wall clock, memory is the sum of the peaks
of a process and its children. `--quick` has a tenth of the rows. Writes `landing.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks import results
from benchmarks.contenders.copies import build_copy
from benchmarks.workloads.processes import run_process
from benchmarks.workloads.readings import write_readings

SPEC = """
name: landing
version: 1
key: [sensor]
time: at
measurement: [value]
states: [level]
process: {kind: random_walk, variance: 1.0}
observation: {R: [[1.0]]}
initial: {diffuse: true}
"""


class Case(NamedTuple):
    """Files to land: number, rows, file ending; contenders besides ours."""

    name: str
    files: int
    rows: int
    ending: str
    others: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the files."""
        folder.mkdir()
        draw = np.random.default_rng(self.files)
        for number in range(self.files):
            rows = np.arange(self.rows)
            write_readings(
                folder / f"rows-{number:05}{self.ending}",
                pa.array(np.char.add("sensor-", (rows % 100).astype(str))),
                np.datetime64("2024-01-01", "s") + (rows // 100 + number * self.rows),
                {
                    "value": draw.normal(20.0, 5.0, self.rows).round(6),
                    "other": draw.normal(0.0, 1.0, self.rows).round(4),
                },
            )


def cases(share: float) -> list[Case]:
    """Return the cases with a share of their rows."""
    million = int(1_000_000 * share)
    return [
        Case("one CSV file of 1 M rows", 1, million, ".csv", ("copy", "spark", "polars")),
        Case("8 CSV files of 1 M rows", 8, million, ".csv", ("copy", "spark", "polars")),
        Case("8 Parquet files of 1 M rows", 8, million, ".parquet", ("copy",)),
        Case("10,000 CSV files of 100 rows", int(10_000 * share), 100, ".csv", ()),
    ]


def command_of(contender: str, files: Path, table: Path) -> list[str]:
    """Return a contender's command to land the files."""
    if contender == "ours":
        return [
            sys.executable,
            "-m",
            "jobs.cli",
            "--quiet",
            "ingest",
            "--model",
            "landing",
            "--input",
            str(files),
        ]
    return build_copy(contender, files, table)


def run(contender: str, files: Path, folder: Path) -> tuple[float, float]:
    """Return seconds and MB of memory of a new process, its children included."""
    table = folder / "warehouse"
    shutil.rmtree(table, ignore_errors=True)
    own = {"KALMAN_WAREHOUSE": str(table), "KALMAN_MODELS": str(folder)}
    taken = run_process(command_of(contender, files, table), own)
    return taken.seconds, taken.memory_mb


def measure(share: float, runs: int) -> Iterator[dict[str, Any]]:
    """Yield the result of each contender in each case."""
    folder = Path(tempfile.mkdtemp(prefix="kalman-landing-"))
    (folder / "landing.yaml").write_text(SPEC)
    try:
        for place, case in enumerate(cases(share)):
            files = folder / f"files-{place}"
            case.write(files)
            others = [one for one in case.others if one != "polars" or importlib.util.find_spec("polars")]
            begun = results.begun(os.getloadavg()[0])
            found: dict[str, list[tuple[float, float]]] = {}
            for _ in range(runs):
                for contender in ("ours", *others):
                    found.setdefault(contender, []).append(run(contender, files, folder))
            for contender, taken in found.items():
                yield {
                    "case": case.name,
                    "rows": case.files * case.rows,
                    "what": contender,
                    "seconds": results.spread([seconds for seconds, _ in taken]),
                    "memory_mb": results.spread([memory for _, memory in taken]),
                    **begun,
                }
            shutil.rmtree(files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.suites.landing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=results.RESULTS / "landing.json")
    given = parser.parse_args()
    found = []
    for one in measure(0.1 if given.quick else 1.0, given.runs):
        found.append(one)
        print(
            f"{one['case']}: {one['what']} {one['seconds']['median']:.2f} s, "
            f"{one['memory_mb']['median']:,.0f} MB",
            flush=True,
        )
    document = {"machine": results.machine(), "results": found}
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
