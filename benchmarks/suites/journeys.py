"""Measure what a person waits for: whole cold commands, with default settings and text keys, beside other ways.

`python -m benchmarks.suites.journeys` writes files once. Each command then runs in a new process, in turn with its
contenders: `copy` is pyarrow and delta-rs, `spark` Spark's own CSV to Delta with its start, `statsmodels` and, where it
is installed, `simdkalman` filter from file to file. The floor is the yardstick of warm work: the same rows from Parquet
to estimates to Parquet, without Spark. Each run is checked: rows landed, estimates written, and the estimates of the
contenders are ours. Seconds are those of the wall clock, memory is the sum of the peaks of a process and its children.

`--scale 0.01` has a hundredth of the rows. `--only` measures some groups and keeps the results of the others. Writes
`journeys.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltalake import DeltaTable

from benchmarks import results
from benchmarks.contenders.copies import build_copy
from benchmarks.contenders.estimate_files import compare_files
from benchmarks.workloads import journey_files as files
from benchmarks.workloads.journey_files import FIRST, SECOND, THIRD, Sizes
from benchmarks.workloads.processes import ProcessRun, run_process
from benchmarks.workloads.verbs import Verbs

MODEL, OWN = "readings", "own"
OURS = "ours"
PERIOD = 0.25
"""Seconds between two readings of the memory: long, so that reading gigabytes takes little of the two cores."""
TOLERANCE = 1e-6
"""Of estimates, relative: statsmodels stops computing covariances when they hardly change."""
STEPS = 10


class Work(NamedTuple):
    """What a person waits for, in words; the issue's goal in seconds at full size; whether it filters rows of many
    keys, so that the floor is its yardstick.
    """

    text: str
    goal: float | None = None
    floored: bool = False


WORKS = {
    "ingest_1_file": Work("`ingest` of one CSV file"),
    "ingest_8_files": Work("`ingest` of 8 CSV files"),
    "pretrain": Work("`pretrain` of them", 12, True),
    "ingest_more": Work("`ingest` of 2 more files"),
    "stream_first": Work("first `stream`: states from the snapshot, then 2 rows a key", 15, True),
    "journey": Work("the journey: these four commands", 45),
    "estimate": Work("`estimate` of all these rows", None, True),
    "stream_next": Work("next `stream`: a row a key", 9, True),
    "filter_parquet": Work("`filter` of Parquet, without Spark", 8, True),
    "filter_csv": Work("`filter` of CSV, without Spark", None, True),
    "series_filter": Work("one series, a row a second: `filter`", 3),
    "series_smooth": Work("the same: `filter --smooth`", 6),
    "series_forecast": Work("the same: `forecast` of 10 steps", 2),
    "own_init": Work("one's own CSV: `init`"),
    "own_ingest": Work("one's own CSV: `ingest`"),
    "own_pretrain": Work("one's own CSV: `pretrain --estimates`"),
    "own_stream": Work("one's own CSV: `stream`"),
    "own_forecast": Work("one's own CSV: `forecast`"),
    "own_plot": Work("one's own CSV: `plot`"),
    "own_csv": Work("one's own CSV: these six commands"),
    "floor": Work("the floor: Parquet to estimates to Parquet"),
}
"""All works, in the order of the table."""
JOURNEY = ("ingest_8_files", "pretrain", "ingest_more", "stream_first")
SERIES_COLUMNS = {
    "filter": ("mean", "covariance"),
    "smooth": ("smoothed_mean", "smoothed_covariance"),
    "forecast": ("mean", "covariance"),
}


class Taken(NamedTuple):
    """One run of a contender in a work; inside: seconds in the process, such as those of its filter alone, by name."""

    work: str
    what: str
    rows: int
    seconds: float
    memory_mb: float
    inside: Mapping[str, float] = {}


class Bench:
    """A folder with the files of the works, which are written when they are first needed."""

    def __init__(self, folder: Path, sizes: Sizes, alone: bool) -> None:
        self.folder, self.sizes, self.alone = folder, sizes, alone

    def prepare(self, name: str, write: Callable[[Path], None]) -> Path:
        """Return the path of files, after writing them the first time."""
        path = self.folder / "files" / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write(path)
        return path

    def prepare_minutes(self, name: str, minutes: range) -> Path:
        """Return the folder of a CSV for each minute."""
        return self.prepare(name, lambda path: files.write_minutes(path, minutes, self.sizes.keys))

    def prepare_halves(self) -> Path:
        """Return the folder of the first ten minutes as Parquet."""
        minutes = range(SECOND.stop)
        return self.prepare("halves", lambda path: files.write_halves(path, minutes, self.sizes.keys))

    def start(self, model: str, spec: str | None) -> Verbs:
        """Return the verbs of a model with an empty warehouse."""
        folder = self.folder / "model"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return Verbs(folder, model, spec)

    def list_contenders(self, *contenders: str) -> list[str]:
        """Return the contenders that can run here, unless ours runs alone."""
        there = [one for one in contenders if one != "simdkalman" or importlib.util.find_spec(one)]
        return [] if self.alone else there


def take(work: str, rows: int, verbs: Verbs, verb: str, *options: str) -> Taken:
    """Run a verb in a new process."""
    run = run_process(verbs.build_command(verb, *options), verbs.environment, PERIOD)
    return Taken(work, OURS, rows, run.seconds, run.memory_mb)


def add_up(work: str, rows: int, parts: Sequence[Taken]) -> Taken:
    """Add up commands that run one after another."""
    return Taken(work, OURS, rows, sum(one.seconds for one in parts), max(one.memory_mb for one in parts))


def check_count(what: str, count: int, rows: int) -> None:
    """Check a number of rows.

    Raises:
        ValueError: there are more rows, or fewer.
    """
    if count != rows:
        raise ValueError(f"{what}: {count:,} rows, not {rows:,}")


def count_rows(verbs: Verbs, table: str) -> int:
    """Count the rows of one of the model's tables by its log."""
    return DeltaTable(str(verbs.warehouse / table / verbs.model)).count()


def take_copies(bench: Bench, work: str, source: Path, rows: int) -> Iterator[Taken]:
    """Yield the run of each contender that copies CSV files to Delta."""
    for contender in bench.list_contenders("copy", "spark"):
        table = bench.folder / "copy"
        shutil.rmtree(table, ignore_errors=True)
        run = run_process(build_copy(contender, source, table), {}, PERIOD)
        check_count(f"{work}, {contender}", DeltaTable(str(table)).count(), rows)
        yield Taken(work, contender, rows, run.seconds, run.memory_mb)


def measure_ingest(bench: Bench) -> Iterator[Taken]:
    """Yield the landing of one file and its contenders."""
    source, rows = bench.prepare_minutes("third", THIRD), bench.sizes.keys
    verbs = bench.start(MODEL, files.build_spec(MODEL, "minute"))
    yield take("ingest_1_file", rows, verbs, "ingest", "--input", str(source))
    check_count("ingest_1_file", count_rows(verbs, "measurements"), rows)
    yield from take_copies(bench, "ingest_1_file", source, rows)


def measure_journey(bench: Bench) -> Iterator[Taken]:
    """Yield the commands from files to live estimates, and the next stream after more rows."""
    keys = bench.sizes.keys
    first, second = bench.prepare_minutes("first", FIRST), bench.prepare_minutes("second", SECOND)
    third = bench.prepare_minutes("third", THIRD)
    verbs = bench.start(MODEL, files.build_spec(MODEL, "minute"))
    parts = [
        take("ingest_8_files", len(FIRST) * keys, verbs, "ingest", "--input", str(first)),
        take("pretrain", len(FIRST) * keys, verbs, "pretrain"),
        take("ingest_more", len(SECOND) * keys, verbs, "ingest", "--input", str(second)),
        take("stream_first", len(SECOND) * keys, verbs, "stream"),
    ]
    landed = SECOND.stop * keys
    check_count("measurements", count_rows(verbs, "measurements"), landed)
    check_count("stream_first", count_rows(verbs, "estimates"), len(SECOND) * keys)
    yield from parts
    yield add_up("journey", landed, parts)
    yield take("estimate", landed, verbs, "estimate")
    check_count("estimate", count_rows(verbs, "estimates_history"), landed)
    verbs.finish("ingest", "--input", str(third))
    yield take("stream_next", keys, verbs, "stream")
    check_count("stream_next", count_rows(verbs, "estimates"), (len(SECOND) + len(THIRD)) * keys)
    yield from take_copies(bench, "ingest_8_files", first, len(FIRST) * keys)


def take_program(work: str, contender: str, rows: int, *words: str) -> Taken:
    """Run a contender's program in a new process; it prints the seconds of its filter alone."""
    run = run_process([sys.executable, "-m", *words], {}, PERIOD)
    inside = json.loads(run.output)["inside"]
    return Taken(work, contender, rows, run.seconds, run.memory_mb, {"filter alone": inside})


def check_equal(work: str, contender: str, path: Path, other: Path, columns: tuple[str, ...]) -> None:
    """Check that a contender's estimates are ours.

    Raises:
        ValueError: they differ by more than rounding.
    """
    difference = compare_files(path, other, columns)
    if not difference <= TOLERANCE:
        raise ValueError(f"{work}: the estimates of {contender} differ from ours by {difference:.1e}")


def measure_filter(bench: Bench) -> Iterator[Taken]:
    """Yield the filter without Spark of Parquet and of CSV, and simdkalman, since all keys have equal lengths."""
    keys = bench.sizes.keys
    sources = {"filter_parquet": bench.prepare_halves(), "filter_csv": bench.prepare_minutes("first", FIRST)}
    for (work, source), minutes in zip(sources.items(), (SECOND.stop, len(FIRST)), strict=True):
        verbs = bench.start(MODEL, files.build_spec(MODEL, "minute"))
        output, other = verbs.folder / "ours.parquet", verbs.folder / "simdkalman.parquet"
        yield take(work, minutes * keys, verbs, "filter", "--input", str(source), "--output", str(output))
        check_count(work, files.count_file_rows(output), minutes * keys)
        for contender in bench.list_contenders("simdkalman"):
            program = ("benchmarks.contenders.equal_lengths", str(source), str(other))
            yield take_program(work, contender, minutes * keys, *program)
            check_equal(work, contender, output, other, SERIES_COLUMNS["filter"])


def measure_series(bench: Bench) -> Iterator[Taken]:
    """Yield the filter, the smoother and a forecast of one long series, beside statsmodels and simdkalman."""
    rows = bench.sizes.series_rows
    source = bench.prepare("series.parquet", lambda path: files.write_series(path, rows))
    verbs = bench.start(MODEL, files.build_spec(MODEL, "second"))
    output, other = verbs.folder / "ours.parquet", verbs.folder / "other.parquet"
    given = ("--input", str(source), "--output", str(output))
    options = {
        "filter": ("filter", *given),
        "smooth": ("filter", *given, "--smooth"),
        "forecast": ("forecast", *given, "--steps", str(STEPS), "--all-columns"),
    }
    for mode, columns in SERIES_COLUMNS.items():
        work = f"series_{mode}"
        verb, *words = options[mode]
        yield take(work, rows, verbs, verb, *words)
        check_count(work, files.count_file_rows(output), STEPS if mode == "forecast" else rows)
        for contender in bench.list_contenders("statsmodels", "simdkalman"):
            program = ["benchmarks.contenders.one_series", mode]
            if contender == "simdkalman":
                if mode != "filter":
                    continue
                program = ["benchmarks.contenders.equal_lengths"]
            yield take_program(work, contender, rows, *program, str(source), str(other))
            check_equal(work, contender, output, other, columns)


def measure_own(bench: Bench) -> Iterator[Taken]:
    """Yield the six commands from one's own CSV to a picture.

    The snapshot reflects all rows, so the stream has none to estimate: `plot` draws the estimates of `pretrain`.
    """
    rows = bench.sizes.own_rows
    source = bench.prepare("own.csv", lambda path: files.write_own(path, bench.sizes.own_keys))
    verbs = bench.start(OWN, None)
    command = [sys.executable, "-m", "jobs.cli", "init", "--input", str(source), "--name", OWN]
    run = run_process(command, verbs.environment, PERIOD)
    picture = verbs.folder / "own.png"
    parts = [
        Taken("own_init", OURS, rows, run.seconds, run.memory_mb),
        take("own_ingest", rows, verbs, "ingest", "--input", str(source)),
        take("own_pretrain", rows, verbs, "pretrain", "--estimates"),
        take("own_stream", rows, verbs, "stream"),
        take("own_forecast", rows, verbs, "forecast", "--steps", str(STEPS), "--every", "1h"),
        take("own_plot", rows, verbs, "plot", "--output", str(picture)),
    ]
    check_count("own_ingest", count_rows(verbs, "measurements"), rows)
    check_count("own_pretrain", count_rows(verbs, "estimates_history"), rows)
    check_count("own_forecast", count_rows(verbs, "forecasts"), STEPS * bench.sizes.own_keys)
    if not picture.is_file():
        raise ValueError("own_plot: no picture")
    yield from parts
    yield add_up("own_csv", rows, parts)


def measure_floor(bench: Bench) -> Iterator[Taken]:
    """Yield the warm work without Spark in one process, with its parts, and on two processes."""
    source, rows = bench.prepare_halves(), SECOND.stop * bench.sizes.keys
    verbs = bench.start(MODEL, files.build_spec(MODEL, "minute"))
    spec, output = verbs.folder / "models" / f"{MODEL}.yaml", verbs.folder / "floor"
    program = ("benchmarks.contenders.floor", str(spec), str(source), str(output))
    run: ProcessRun = run_process([sys.executable, "-m", *program], {}, PERIOD)
    found = json.loads(run.output)
    check_count("floor", found["rows"], rows)
    parts: dict[str, float] = found["parts"]
    yield Taken("floor", "one process", rows, sum(parts.values()), run.memory_mb, parts)
    yield Taken("floor", "two processes", rows, found["two_processes"], run.memory_mb)


GROUPS = {
    "ingest": measure_ingest,
    "journey": measure_journey,
    "filter": measure_filter,
    "series": measure_series,
    "own": measure_own,
    "floor": measure_floor,
}


def summarise(
    rounds: Sequence[Sequence[Taken]], begun: Mapping[str, Any], full: bool
) -> list[dict[str, Any]]:
    """Return a result for each contender in each work, with its ratio to ours of each round; full: at full size."""
    by_name: dict[tuple[str, str], list[Taken]] = {}
    for taken in rounds:
        for one in taken:
            by_name.setdefault((one.work, one.what), []).append(one)
    found = []
    for (work, what), runs in by_name.items():
        seconds, rows = [one.seconds for one in runs], runs[0].rows
        result: dict[str, Any] = {
            "work": work,
            "what": what,
            "rows": rows,
            "seconds": results.spread(seconds),
            "rows_per_s": results.spread([rows / one for one in seconds]),
            "memory_mb": results.spread([one.memory_mb for one in runs]),
            "samples": len(runs),
        }
        if runs[0].inside:
            names = runs[0].inside
            result["inside_s"] = {name: results.spread([one.inside[name] for one in runs]) for name in names}
        if what != OURS and (ours := by_name.get((work, OURS))):
            ratios = [other / one.seconds for one, other in zip(ours, seconds, strict=True)]
            result["ours_times_as_fast"] = results.spread(ratios)
        if what == OURS and full and WORKS[work].goal is not None:
            result["goal_s"] = WORKS[work].goal
        found.append({**result, **begun})
    return found


def add_floor(found: Sequence[dict[str, Any]]) -> None:
    """Add to our results the ratio of their rows a second to the floor on two processes, if the run measured it."""
    floors = {
        one["measured_at"]: one["rows_per_s"]["median"] for one in found if one["what"] == "two processes"
    }
    for one in found:
        if one["what"] == OURS and WORKS[one["work"]].floored and one["measured_at"] in floors:
            one["vs_floor"] = one["rows_per_s"]["median"] / floors[one["measured_at"]]


def build_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Build the results as a table in Markdown, and the floor in a sentence."""
    lines = [
        "| what a person waits for | rows | who | seconds (least to greatest) | rows/s | memory, MB | "
        "ours, times as fast | to the floor | goal, seconds |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        took, floor = one["seconds"], one.get("vs_floor")
        ratio = one.get("ours_times_as_fast", {}).get("median")
        inside = one.get("inside_s", {}).get("filter alone")
        who = one["what"] + (f" (its filter alone {inside['median']:.2f} s)" if inside else "")
        lines.append(
            f"| {WORKS[one['work']].text} | {one['rows']:,} | {who} | "
            f"{took['median']:.2f} ({took['min']:.2f} to {took['max']:.2f}) | "
            f"{one['rows_per_s']['median']:,.0f} | {one['memory_mb']['median']:,.0f} | "
            f"{'' if ratio is None else f'{ratio:.2f}'} | "
            f"{'' if floor is None else f'{floor:.3f}'} | {one.get('goal_s', '')} |"
        )
    return "\n".join([*lines, *describe_floor(found)])


def describe_floor(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the parts of the floor in nanoseconds a row; nothing if it was not measured."""
    for one in found:
        if one["work"] == "floor" and "inside_s" in one:
            parts = {name: part["median"] / one["rows"] * 1e9 for name, part in one["inside_s"].items()}
            said = ", ".join(f"{name} {part:.0f}" for name, part in parts.items())
            return ["", f"The floor in one process takes {sum(parts.values()):.0f} ns a row: {said}."]
    return []


def measure(
    bench: Bench, groups: Sequence[str], runs: int, full: bool, write: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Run groups of works, each several times, and write all results after each group."""
    begun = results.begun(os.getloadavg()[0])
    found: list[dict[str, Any]] = []
    for group in groups:
        rounds = []
        for _ in range(runs):
            rounds.append([])
            for one in GROUPS[group](bench):
                rounds[-1].append(one)
                print(f"{one.work}: {one.what} {one.seconds:.2f} s, {one.memory_mb:,.0f} MB", flush=True)
        found += summarise(rounds, begun, full)
        write(found)


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.suites.journeys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scale", type=float, default=1.0, help="a share of the rows")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", default=list(GROUPS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without the contenders")
    parser.add_argument("--output", type=Path, default=results.RESULTS / "journeys.json")
    given = parser.parse_args()
    if given.output == results.RESULTS / "journeys.json" and (given.scale != 1.0 or given.alone):
        parser.error("--scale and --alone are for trials: give their results another file with --output")
    return given


def merge(found: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return new results and those of works that were not measured again, in the order of the works."""
    measured = {one["work"] for one in found}
    merged = [*found, *(one for one in before if one["work"] not in measured)]
    add_floor(merged)
    return sorted(merged, key=lambda one: list(WORKS).index(one["work"]))


def read_results(path: Path, scale: float) -> list[dict[str, Any]]:
    """Return the results of an earlier run at the same scale; none without its file."""
    document = json.loads(path.read_text()) if path.is_file() else {}
    return document["results"] if document.get("scale") == scale else []


def main() -> int:
    """Measure, print and write."""
    given = parse_arguments()
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: the load is {load:.1f}: what else runs is measured too", file=sys.stderr)
    before = read_results(given.output, given.scale)
    not_run = {} if importlib.util.find_spec("simdkalman") else {"simdkalman": "it is not installed"}
    for name, reason in not_run.items():
        print(f"{name}: not run: {reason}")

    def write(found: list[dict[str, Any]]) -> None:
        merged = merge(found, before)
        document = {"machine": results.machine(), "scale": given.scale, "results": merged, "not_run": not_run}
        given.output.write_text(json.dumps(document, indent=1) + "\n")

    folder = Path(tempfile.mkdtemp(prefix="kalman-journeys-"))
    try:
        bench = Bench(folder, files.build_sizes(given.scale), given.alone)
        measure(bench, given.only, given.runs, given.scale == 1.0, write)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{build_table(json.loads(given.output.read_text())['results'])}\n\nwritten to {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
