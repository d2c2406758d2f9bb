"""Turn measured times into results: medians and ratios within the run, as JSON and as a table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks import targets

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("pyspark", "delta-spark", "numpy", "pyarrow", "pandas")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the median and the greatest."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def results_of(
    work: str, rates: Mapping[str, Sequence[float]], more: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return one result for each contender, with ratios of medians, such as to the limit and to state by the key.

    Args:
        work: name of the work.
        rates: rows a second by contender.
        more: other numbers of `ours`.
    """
    medians = {name: statistics.median(values) for name, values in rates.items()}
    found = []
    for name, values in rates.items():
        result: dict[str, Any] = {
            "work": work,
            "what": name,
            "rows_per_s": spread(values),
            "samples": len(values),
        }
        for ratio, other in (
            ("vs_limit", "limit"),
            ("vs_per_key", "per_key_row"),
            ("vs_filterpy", "per_key_filterpy"),
            ("vs_floor", "floor"),
            ("vs_folder", "folder"),
        ):
            if other in medians and other != name:
                result[ratio] = medians[name] / medians[other]
        if name == "ours":
            result |= more
        found.append(result)
    return found


def machine() -> str:
    """Return a description of the machine, in a line."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{_processor()}, {_cores()}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def _cores() -> str:
    """Return the number of cores that this process and its children may use."""
    there = os.cpu_count()
    if hasattr(os, "sched_getaffinity") and (used := len(os.sched_getaffinity(0))) != there:
        return f"{used} of {there} cores"
    return f"{there} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the checkout's commit, marked if files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def begun(load: float) -> dict[str, Any]:
    """Return the description of the run in each result: the commit, the start time, and the load then."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit(), "measured_at": at, "load_before": round(load, 2)}


def write(
    results: list[dict[str, Any]],
    run: Mapping[str, Any],
    quick: bool,
    folder: Path = RESULTS,
    keep: bool = False,
    not_run: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write `latest.json` and `latest.md` (`quick.*` for a quick run); return the table's path.

    Each result includes its run (`begun`). With `keep`, works without a new measurement keep their results in the file.
    `not_run`: reasons why works could not be measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'quick' if quick else 'latest'}.json"
    measured = [{**one, **run} for one in results]
    missed = dict(not_run)
    if keep and path.is_file():
        names, before = {one["work"] for one in measured}, json.loads(path.read_text())
        measured = [one for one in before["results"] if one["work"] not in names] + measured
        missed = before.get("not_run", {}) | missed
    names = {one["work"] for one in measured}
    document = {
        **run,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "results": measured,
        "not_run": {work: reason for work, reason in missed.items() if work not in names},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    path = path.with_suffix(".md")
    path.write_text(table(document))
    return path


def table(document: Mapping[str, Any]) -> str:
    """Return the results as a Markdown page."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    lines = [
        f"{document['machine']}; {versions}.",
        "",
        "Rows a second of a micro-batch: median (least to greatest of all measured ones), and how many were measured. "
        "Of `verbs`, keys a second. Ratios are of medians of one run; *load*: when that run began.",
        "",
        "| work | what | rows/s | measured | to the limit | to state by the key | to the floor | to a folder | commit "
        "| load |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for one in document["results"]:
        rate = one["rows_per_s"]
        lines.append(
            f"| {one['work']} | {one['what']} | {rate['median']:,.0f} ({rate['min']:,.0f} to {rate['max']:,.0f}) | "
            f"{one['samples']} | {_percent(one.get('vs_limit'))} | {_times(one.get('vs_per_key'))} | "
            f"{_times(one.get('vs_floor'))} | {_times(one.get('vs_folder'))} | "
            f"`{one['commit']}` | {one['load_before']} |"
        )
    missed = [f"{work}: not run: {reason}." for work, reason in document.get("not_run", {}).items()]
    lines += ["", *missed] if missed else []
    held = targets.lines(document)
    return "\n".join([*lines, *(["", *held] if held else [])]) + "\n"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"
