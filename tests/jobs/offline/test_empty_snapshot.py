"""A snapshot without keys, as an upgrade without states leaves it, is no damaged one. No Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake

from jobs import filter as offline
from jobs.core.errors import UserError
from jobs.core.settings import Settings
from jobs.offline.stored_keys import read_live_keys, read_snapshot_keys
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec
from tests.jobs.offline.test_learned_parameters import spec as spec_of

EMPTY = "by_key-v1-0-empty"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return settings of a model that learns by key, with a live generation that began without any state."""
    models, root = tmp_path / "models", tmp_path / "warehouse"
    models.mkdir()
    (models / "by_key.yaml").write_text(yaml.safe_dump(spec_of("by_key", sinks={"latest": True})))
    settings = Settings.load(warehouse=str(root), models=models)
    made(settings, count=0)
    generation = {"generation": "g1", "model": "by_key", "status": "live", "snapshot_id": EMPTY}
    generation |= {"model_version": 1, "fingerprint": "f", "checkpoint": "c", "partitions": 1, "blocks": 1}
    generation |= {"start_position": '{"source": "delta", "table": "measurements/by_key", "version": 0}'}
    generation |= {"parent": "g0", "parent_batch": 0, "owner": "one"}
    write(settings, "generations", [generation])
    names = pa.schema(
        [("key", pa.string()), ("generation", pa.string()), ("event_time", pa.timestamp("us", "UTC"))]
        + [(name, pa.list_(pa.float64())) for name in ("mean", "covariance")]
        + [("flags", pa.string())]
    )
    write_deltalake(str(root / "latest/by_key"), names.empty_table(), partition_by=["generation"])
    return settings


def made(settings: Settings, count: int) -> None:
    """Write the manifest of a snapshot that counts so many keys, of which no row is there."""
    spec = load_spec("by_key", settings.models)
    learned = {"variance": 2.0, "R": [[0.5]]}
    manifest = {"snapshot_id": EMPTY, "model": "by_key", "model_version": 1, "status": "good"}
    manifest |= {"fingerprint": spec.fingerprint(), "parameters": json.dumps(learned)}
    manifest |= {"position": '{"source": "delta", "version": 0}', "key_count": count, "snapshots_version": 0}
    manifest |= {"checksum": "", "rows": 0, "spec": spec.model_dump_json()}
    nothing = pa.table({"cut": pa.nulls(1, pa.timestamp("us", "UTC"))})
    table = pa.Table.from_pylist([manifest]).append_column("cut", nothing["cut"])
    write_deltalake(str(Path(settings.warehouse, "manifests")), table, mode="overwrite")


def write(settings: Settings, table: str, rows: list[dict[str, Any]]) -> None:
    write_deltalake(str(Path(settings.warehouse, table)), pa.Table.from_pylist(rows))


def model(settings: Settings) -> ModelSpec:
    return load_spec("by_key", settings.models)


def test_filter_takes_the_populations_parameters(settings: Settings, tmp_path: Path) -> None:
    at = pd.date_range("2024-03-01", periods=4, freq="h", tz="UTC")
    frame = pd.DataFrame({"site": "n", "id": 1, "at": at, "a": np.arange(4.0)})
    frame.to_csv(tmp_path / "in.csv", index=False)
    report = offline.run(settings, "by_key", str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))
    assert (report.data["snapshot"], report.data["keys_known"], report.data["keys_unknown"]) == (EMPTY, 0, 1)
    made(settings, count=3)
    with pytest.raises(UserError, match="is damaged: it has 0 keys, where its manifest says 3"):
        offline.run(settings, "by_key", str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))


def test_there_is_nothing_to_forecast_from(settings: Settings) -> None:
    spec = model(settings)
    with pytest.raises(UserError, match=f"snapshot {EMPTY} has no key: there is nothing to forecast from"):
        read_snapshot_keys(settings.warehouse, spec, None, [], None)
    with pytest.raises(UserError, match=f"--key nix: snapshot {EMPTY} has no state of it"):
        read_snapshot_keys(settings.warehouse, spec, None, ["nix"], None)
    with pytest.raises(UserError, match=f"snapshot {EMPTY} has no key: there is nothing to forecast from"):
        read_live_keys(settings.warehouse, spec, [], None)
    with pytest.raises(UserError, match=f"--key nix: snapshot {EMPTY} has no state of it"):
        read_live_keys(settings.warehouse, spec, ["nix"], None)
