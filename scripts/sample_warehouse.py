"""Make a small warehouse to look at: `python scripts/sample_warehouse.py FOLDER` (a minute or two).

Forty made-up rooms, streamed day by day, with late rows, unreadable rows, a sensor that is suddenly noisier than its
model, and an upgrade in the middle. The verbs make the warehouse, as for a user.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs import ingest, pretrain, stream, upgrade  # noqa: E402
from jobs.core.settings import Settings  # noqa: E402

START = pd.Timestamp("2024-03-01", tz="UTC")
ROOMS, DAYS, HISTORY = 40, 24, 12
SPEC: dict[str, Any] = {
    "name": "rooms",
    "version": 1,
    "description": "Temperature of each room, as a level with a slope.",
    "key": ["room"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["temperature"],
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 0.3},
    "observation": {"R": [[0.3]]},
    "initial": {"mean": [20.0], "covariance": [[25.0]]},
    "learn": {"parameters": ["variance", "R"], "scope": "key"},
    "robust": {"gate": {"probability": 0.99999}},
    "upgrade": {"rows": 100, "keys": 5},
    "stream": {"max_files_per_batch": 1, "partitions": 2},
}
WITH_SLOPE: dict[str, Any] = {
    "version": 2,
    "states": ["level", "slope"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.05, "slope_variance": 0.01},
    "observation": {"H": [[1.0, 0.0]], "R": [[0.3]]},
    "initial": {"mean": [20.0, 0.0], "covariance": [[25.0, 0.0], [0.0, 0.25]]},
    "learn": {"parameters": ["level_variance", "R"], "scope": "key"},
    "migrate": {"states": {"slope": {"initial": True}}},
}


def rows_of_a_day(day: int) -> pd.DataFrame:
    """Return a day's rows, several hundred, in order. One sensor is noisier every day after the history."""
    rng = np.random.default_rng(1000 + day)
    count = ROOMS * 12
    number = rng.integers(0, ROOMS, count)
    second = np.sort(rng.choice(86_400, count, replace=False))
    hours = day * 24 + second / 3600
    level = 18 + number / 8 + 3 * np.sin(2 * np.pi * (hours / 24 + number / ROOMS)) + 0.01 * hours
    noise = 0.3 + 0.02 * number + np.where((number == 7) & (day >= HISTORY), 1.8, 0.0)
    value = level + noise * rng.normal(size=count)
    value[rng.random(count) < 0.004] += 25.0  # somebody opens an oven
    value[rng.random(count) < 0.03] = np.nan
    at = START + pd.to_timedelta(day * 86_400 + second, "s")
    names = np.array([f"room-{n:02d}" for n in number])
    frame = pd.DataFrame({"at": at, "room": names, "temperature": np.round(value, 2).astype(object)})
    if day >= HISTORY:  # some rows come a day late, and some are unreadable
        late = rng.choice(count, 6, replace=False)
        frame.loc[late, "at"] = frame.loc[late, "at"] - pd.Timedelta("30h")
        frame.loc[rng.choice(count, 3, replace=False), "temperature"] = "n/a?"
    return frame


def make(folder: Path, master: str = "local[2]") -> Settings:
    """Make the warehouse in `folder`, and return the settings to reach it."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    settings = Settings.load(warehouse=str(folder / "warehouse"), models=models, master=master, quiet=True)
    name = SPEC["name"]

    def write(spec: dict[str, Any]) -> None:
        (models / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))

    def land(days: range) -> None:
        files = []
        for day in days:
            files.append(str(folder / f"day-{day:02d}.csv"))
            rows_of_a_day(day).to_csv(files[-1], index=False)
        ingest.run(settings, name, files)

    write(SPEC)
    land(range(HISTORY))
    pretrain.run(settings, name)
    land(range(HISTORY, HISTORY + 6))
    stream.run(settings, [name])
    land(range(HISTORY + 6, HISTORY + 9))
    write({**SPEC, **WITH_SLOPE})
    upgrade.run(settings, name, force=True)
    land(range(HISTORY + 9, DAYS))
    stream.run(settings, [name])
    return settings


if __name__ == "__main__":
    make(Path(sys.argv[1]))
