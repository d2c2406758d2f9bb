"""Make a warehouse whose control tables describe many models: `python -m benchmarks.workloads.control FOLDER MODELS`.

One model is real: its first generation is retired, its second live, its third a shadow; one of its rows is in
quarantine. The others are its rows in the control tables under other names, with its checkpoints. The specs of all are
in FOLDER/models, the warehouse is that of KALMAN_WAREHOUSE. Its session has the client of a store from its start.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from jobs import ingest, inputs, pretrain, stream, upgrade
from jobs.core.settings import Settings

if TYPE_CHECKING:
    from jobs.spark.warehouse import Warehouse

MODEL = "control"
INPUTS = "inputs.csv"
KEYS = 50
SPEC: dict[str, Any] = {
    "name": MODEL,
    "version": 1,
    "key": ["id"],
    "time": "at",
    "measurement": ["level"],
    "inputs": {"columns": {"noise": "variance"}},
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 0.1},
    "observation": {"R": [["noise"]]},
    "initial": {"mean": [0.0], "covariance": [[10.0]]},
    "stream": {"partitions": 2},
}


def make(settings: Settings, folder: Path, models: int) -> None:
    """Make the model, and describe `models` models in all."""
    settings.models.mkdir(exist_ok=True)
    _write(settings, MODEL, 1)
    ingest.run(settings, MODEL, [_rows(folder, 1)])
    noise = [f"{key},{1 + key % 5}.0\n" for key in range(KEYS)]
    (folder / INPUTS).write_text("id,variance\n" + "".join(noise))
    inputs.run(settings, MODEL, str(folder / INPUTS))
    pretrain.run(settings, MODEL)
    ingest.run(settings, MODEL, [_rows(folder, 2)])
    stream.run(settings, [MODEL])
    _write(settings, MODEL, 2)
    upgrade.run(settings, MODEL, mode="stop-start")
    ingest.run(settings, MODEL, [_rows(folder, 3, "1,2024-01-03T23:00:00Z,many\n")])
    stream.run(settings, [MODEL])
    _write(settings, MODEL, 3)
    upgrade.run(settings, MODEL, promote=False)
    describe(settings, [f"copy_{number:03d}" for number in range(1, models)])


def _rows(folder: Path, day: int, more: str = "") -> str:
    """Write the rows of a day, and return the file's path."""
    rows = [f"{n % KEYS},2024-01-{day:02d}T{n // KEYS:02d}:00:00Z,{n % 7}.5\n" for n in range(20 * KEYS)]
    path = folder / f"{day}.csv"
    path.write_text("id,at,level\n" + "".join(rows) + more)
    return str(path)


def _write(settings: Settings, name: str, version: int) -> None:
    spec = {**SPEC, "name": name, "version": version}
    (settings.models / f"{name}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))


def describe(settings: Settings, names: list[str]) -> None:
    """Add the model's rows of the control tables under other names, and specs of these names."""
    from jobs.lineage import generations, live_rows
    from jobs.snapshots import manifests
    from jobs.spark.session import spark_session
    from jobs.spark.warehouse import Warehouse

    warehouse = Warehouse(spark_session(settings, "copies"), settings.warehouse)
    begun, snapshots = (
        generations.read_generations(warehouse, MODEL),
        manifests.read_manifests(warehouse, MODEL),
    )
    rows: dict[str, list[dict[str, Any]]] = {"generations": [], "manifests": [], live_rows.TABLE: []}
    for name in names:
        _write(settings, name, 3)
        copies = [replace(one, **_renamed(one, name, "generation", "snapshot_id", "parent")) for one in begun]
        states = [
            replace(one, **_renamed(one, name, "snapshot_id", "generation", "parent")) for one in snapshots
        ]
        rows["generations"] += [generations.build_generation_row(one) for one in copies]
        rows["manifests"] += [manifests.build_manifest_row(one) for one in states]
        rows[live_rows.TABLE] += live_rows.build_live_rows(copies, states)
    for table, some in rows.items():
        _append(warehouse, table, some)


def _renamed(one: object, name: str, *fields: str) -> dict[str, Any]:
    """Return the model name of a copy, and its `fields` with this name in their texts."""
    texts: dict[str, str | None] = {field: getattr(one, field) for field in fields}
    return {"model": name, **{field: text and text.replace(MODEL, name) for field, text in texts.items()}}


def _append(warehouse: Warehouse, table: str, rows: list[dict[str, Any]]) -> None:
    schema = warehouse.read(table).schema
    warehouse.append(warehouse.spark.createDataFrame(rows, schema).coalesce(1), table)  # type: ignore[arg-type]


def main() -> int:
    """Make the warehouse."""
    folder = Path(sys.argv[1])
    make(Settings.load(models=folder / "models", quiet=True), folder, int(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
