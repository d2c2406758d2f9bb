"""Measure control verbs as users wait for them: a process from its start to its end, in a folder and in S3.

`python -m benchmarks.suites.control_verbs` makes a warehouse in each place: a model with a retired generation, a live
one and a shadow, and copies of its rows, so that the control tables describe 200 models. Each verb runs in five new
processes. Before each the warehouse is put back as it was made, so that each does the same. A verb that refuses counts
too. The store is that of the tests; where it is not installed, S3 is left out, with the reason. `--verbs` measures some
and keeps the results of the others. Writes `control_verbs.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.workloads.control import INPUTS, MODEL
from tests.support import object_store
from tests.support.object_store import BUCKET, ObjectStore, environment

OF_MODEL = ("--model", MODEL)
VERBS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "promote": ("promote", *OF_MODEL),
    "rollback": ("rollback", *OF_MODEL),
    "retire": ("retire", *OF_MODEL),
    "resume": ("resume", *OF_MODEL),
    "stop": ("stop", *OF_MODEL),
    "quarantine list": ("quarantine", "list", *OF_MODEL),
    "inputs": ("inputs", *OF_MODEL, "--input", INPUTS),
    "report": ("report", *OF_MODEL),
}


class Place(NamedTuple):
    """A warehouse: its root, the folder of its files, and the environment variables of its store."""

    name: str
    root: str
    files: Path
    variables: Mapping[str, str]

    def make(self, folder: Path, models: int) -> None:
        """Make the warehouse in a separate process, and keep a copy."""
        made = ["-m", "benchmarks.workloads.control", str(folder), str(models)]
        done = subprocess.run([sys.executable, *made], env=self.environment(folder), cwd=results.ROOT)
        if done.returncode:
            raise RuntimeError(f"{self.name}: the warehouse was not made")
        shutil.copytree(self.files, self._kept)

    def run(self, verb: str, folder: Path) -> tuple[float, int]:
        """Return seconds and exit code of a verb in a new process, on the original warehouse."""
        shutil.rmtree(self.files)
        shutil.copytree(self._kept, self.files)
        command = [sys.executable, "-m", "jobs.cli", *VERBS[verb]]
        log = folder / f"{self.name}-{verb}.log"
        with log.open("wb") as output:
            began = time.perf_counter()
            done = subprocess.run(
                command,
                env=self.environment(folder),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            seconds = time.perf_counter() - began
        said = log.read_text(errors="replace")
        if "Traceback" in said:
            raise RuntimeError(f"{self.name}, {verb}: {said[-2000:]}")
        if done.returncode:
            print(f"{self.name}, {verb}: {said.strip()[-300:]}", file=sys.stderr, flush=True)
        return seconds, done.returncode

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the variables of a command on the warehouse."""
        path = os.pathsep.join([str(results.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"KALMAN_WAREHOUSE": self.root, "KALMAN_MODELS": str(folder / "models"), "PYTHONPATH": path}
        return {**os.environ, **self.variables, **own}

    @property
    def _kept(self) -> Path:
        return self.files.with_name(f"{self.files.name}-as-made")


def places(folder: Path, stack: ExitStack) -> Iterator[Place]:
    """Yield the places of this machine; the store runs until the end of the stack."""
    yield Place("folder", str(folder / "warehouse"), folder / "warehouse", {})
    if (reason := object_store.missing(java=True)) is not None:
        print(f"S3: not run: {reason}")
        return
    store = stack.enter_context(ObjectStore(folder / "objects"))
    files = store.folder / BUCKET / "warehouse"
    yield Place("S3", f"s3a://{BUCKET}/warehouse", files, environment(store.address))


def measure(
    verbs: Sequence[str], runs: int, models: int, told: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Measure the wall time of each verb in each place, in turn, and report the results after each round."""
    folder = Path(tempfile.mkdtemp(prefix="kalman-control-"))
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    begun = {"models": models, **results.begun(os.getloadavg()[0])}
    try:
        with ExitStack() as stack:
            there = list(places(folder, stack))
            for place in there:
                place.make(folder, models)
            for _ in range(runs):
                for place, verb in product(there, verbs):
                    found.setdefault((verb, place.name), []).append(place.run(verb, folder))
                told([{**_summary(*which, of), **begun} for which, of in found.items()])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _summary(verb: str, place: str, runs: Sequence[tuple[float, int]]) -> dict[str, Any]:
    return {
        "verb": verb,
        "place": place,
        "seconds": results.spread([seconds for seconds, _ in runs]),
        "samples": len(runs),
        "exit_codes": sorted({code for _, code in runs}),
    }


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a table in Markdown."""
    lines = ["| verb | where | seconds (least to greatest) | exit code |", "|---|---|---:|---:|"]
    for one in found:
        took = one["seconds"]
        lines.append(
            f"| `{one['verb']}` | {one['place']} | {took['median']:.2f} ({took['min']:.2f} to {took['max']:.2f}) | "
            f"{', '.join(map(str, one['exit_codes']))} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.suites.control_verbs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--verbs", nargs="+", choices=list(VERBS), metavar="VERB", default=list(VERBS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--output", type=Path, default=results.RESULTS / "control_verbs.json")
    given = parser.parse_args()
    before = json.loads(given.output.read_text())["results"] if given.output.is_file() else []

    def write(found: list[dict[str, Any]]) -> None:
        measured = {(one["verb"], one["place"]) for one in found}
        every = [*found, *(one for one in before if (one["verb"], one["place"]) not in measured)]
        every.sort(key=lambda one: (list(VERBS).index(one["verb"]), one["place"] == "S3"))
        document = {"machine": results.machine(), "results": every}
        given.output.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{table(found)}\n", flush=True)

    measure(given.verbs, given.runs, given.models, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
