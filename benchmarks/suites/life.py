"""Measure the verbs that move the states of a million keys: load a snapshot, export, migrate; and stream into Delta.

Each is the real verb on real tables, in the benchmark's session. A round lands a thousand rows, starts a generation
from the snapshot (its first micro-batch loads every state), exports that generation and migrates the export to the
model's next version; then a micro-batch with a row of every key goes through the live stream into Delta.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.workloads.data import row_of_each
from benchmarks.workloads.work import MODELS
from jobs.core.report import Report
from jobs.core.settings import Settings

NAME = "trend"
FEW = 1_000
NEXT_VERSION = {
    "version": 2,
    "states": ["level", "slope", "bias"],
    "process": {
        "kind": "explicit",
        "F": [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        "Q": [[0.5, 0.0, 0.0], [0.0, 0.01, 0.0], [0.0, 0.0, 0.0]],
    },
    "observation": {"H": [[1.0, 0.0, 1.0]], "R": [[1.0]]},
    "initial": {
        "mean": [0.0, 0.0, 0.0],
        "covariance": [[10.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
    },
    "migrate": {"states": {"bias": {"mean": 0.0, "variance": 0.5}}},
}


class Life:
    """A model with many keys in a separate warehouse; every verb runs in the existing session."""

    def __init__(self, settings: Settings, folder: Path, keys: int) -> None:
        self.folder, self.keys = folder, keys
        self.now, self.next = folder / "now", folder / "next"
        self.now.mkdir(parents=True)
        self.next.mkdir()
        spec = yaml.safe_load((MODELS / f"{NAME}.yaml").read_text())
        self._write(self.now, spec)
        self._write(self.next, {**spec, **NEXT_VERSION})
        warehouse = str(folder / "warehouse")
        self.settings = Settings.load(warehouse, self.now, settings.master, quiet=True)
        self.upgraded = Settings.load(warehouse, self.next, settings.master, quiet=True)
        self.minute = 0

    def _write(self, folder: Path, spec: dict[str, Any]) -> None:
        (folder / f"{NAME}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))

    def land(self, keys: int) -> None:
        """Land one row of each of the first `keys` keys."""
        from jobs import ingest

        path = row_of_each(self.folder, keys, self.minute)
        self.minute += 1
        ingest.run(self.settings, NAME, [str(path)])

    def begin(self) -> str:
        """Land a row of every key, and return the snapshot of them."""
        from jobs import pretrain

        self.land(self.keys)
        return pretrain.run(self.settings, NAME).data["snapshot"]

    def round(self, snapshot: str) -> dict[str, float]:
        """Return keys (and rows, into Delta) a second of each verb, once."""
        from jobs import export, migrate, stream

        self.land(FEW)
        loaded = stream.run(self.settings, [NAME], adopt=snapshot)
        exported = export.run(self.settings, NAME)
        migrated = migrate.run(self.upgraded, NAME, snapshot=exported.data["snapshot"])
        self.land(self.keys)
        into_delta = stream.run(self.settings, [NAME])
        return {
            "snapshot_load": self._rate(loaded),
            "export": self._rate(exported),
            "migrate": self._rate(migrated),
            "stream_into_delta": self._rate(into_delta),
        }

    def _rate(self, report: Report) -> float:
        return self.keys / report.data["seconds"]


def measure(
    settings: Settings, keys: int, rounds: int, folder: Path, told: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return keys a second of each verb, round by round after one that warms up."""
    life = Life(settings, folder, keys)
    snapshot = life.begin()
    rates: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        found = life.round(snapshot)
        told(f"round {number}: " + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in found.items()))
        if number:
            for name, rate in found.items():
                rates.setdefault(name, []).append(rate)
    shutil.rmtree(folder)
    return rates
