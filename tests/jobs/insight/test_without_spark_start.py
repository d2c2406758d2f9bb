"""What commands tell without Spark: looks at tables, and refusals. No Java is there, so Spark cannot start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from jobs import maintain, quarantine, status
from jobs import migrate as jobs_migrate
from jobs.core.errors import UserError
from jobs.core.report import convert_to_json
from jobs.core.settings import Settings
from jobs.insight.maintenance import Maintenance
from jobs.spark.warehouse import Warehouse
from jobs.storage.warehouse import Tables
from jobs.upgrades.migration.migrating import select_source_snapshot
from tests.conftest import RunCli, cli_environment
from tests.fixtures.make_release import FOLDER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_JAVA = {"JAVA_HOME": "/nonexistent", "PATH": "/nonexistent"}

WALK: dict[str, Any] = yaml.safe_load(
    """
    name: other
    version: 1
    key: [id]
    time: at
    measurement: [a]
    states: [level]
    process: {kind: random_walk, variance: 1.0}
    observation: {R: [[0.25]]}
    initial: {diffuse: true}
    monitor: {rules: [{name: unfit, kind: nis, at_least: 9}]}
    """
)
NOW = datetime.now(UTC)
REJECTED = [
    ("1", "time at: not a time", None, NOW - timedelta(days=3)),
    ("2", "time at: not a time", None, NOW - timedelta(days=1)),
    ("3", "time at: not a time", "replayed", NOW - timedelta(hours=9)),
    ("4", "measurement a: not a number", None, NOW - timedelta(hours=2)),
    ("5", "measurement a: not a number", "discarded", NOW - timedelta(hours=1)),
]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The warehouse that Spark wrote for the last release: landed, pretrained, streamed, exported, and rows to come."""
    folder = tmp_path_factory.mktemp("looks")
    with tarfile.open(sorted(FOLDER.glob("*.tar.gz"))[-1]) as archive:
        archive.extractall(folder, filter="data")
    count = len(REJECTED)
    rows = {
        "model": ["walk"] * count,
        "payload": ['{"id": "x"}'] * count,
        "reason": [reason for _, reason, _, _ in REJECTED],
        "source": ["a.csv"] * count,
        "position": ["{}"] * count,
        "batch_id": pa.nulls(count, pa.int64()),
        "generation": pa.nulls(count, pa.string()),
        "quarantined_at": pa.array([at for *_, at in REJECTED], pa.timestamp("us", "UTC")),
        "id": [name for name, *_ in REJECTED],
        "status": pa.array([status for _, _, status, _ in REJECTED], pa.string()),
        "resolved_at": pa.array(
            [
                at - timedelta(days=1) if status == "replayed" else at if status else None
                for *_, status, at in REJECTED
            ],
            pa.timestamp("us", "UTC"),
        ),
    }
    write_deltalake(str(folder / "warehouse" / "quarantine"), pa.table(rows))
    (folder / "models" / "other.yaml").write_text(yaml.safe_dump(WALK))
    return Settings.load(warehouse=str(folder / "warehouse"), models=folder / "models", quiet=True)


def where(settings: Settings) -> list[str]:
    return ["--warehouse", settings.warehouse, "--models", str(settings.models)]


@pytest.mark.spark
def test_status_is_the_same_with_and_without_spark(released: Settings, spark: SparkSession):
    both = (Tables(released.warehouse), Warehouse(spark, released.warehouse))
    without, beside = (convert_to_json(status._report(released, one, "walk", None).data) for one in both)
    (model,) = without["models"]
    assert model["measurements"] == {"version": 4, "rows": 160, "quarantined": 3}
    assert [one["rows_behind"] for one in model["generations"]] == [80]
    for data in (without, beside):
        for one in data["models"][0]["generations"]:
            one.pop("seconds_behind")  # it grows
    assert without == beside


@pytest.fixture
def upgraded(released: Settings, tmp_path: Path) -> Settings:
    """The released warehouse, and a spec of version 2 that drops the slope and keeps little."""
    spec = yaml.safe_load((released.models / "walk.yaml").read_text())
    changed = {
        "version": 2,
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {**spec["observation"], "H": [[1.0], [0.5]]},
        "initial": {"mean": [0.0], "covariance": [[10.0]]},
        "migrate": {"from": 1, "drop": ["slope"]},
        "retention": {"progress": "1d", "quarantine": "1d", "estimates": True},
        "learn": None,
    }
    (tmp_path / "walk.yaml").write_text(yaml.safe_dump({**spec, **changed}))
    return Settings.load(warehouse=released.warehouse, models=tmp_path, quiet=True)


@pytest.mark.spark
def test_a_dry_run_of_maintain_counts_what_a_run_removes(
    upgraded: Settings, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(upgraded.warehouse, tmp_path / "warehouse")
    settings = Settings.load(warehouse=str(tmp_path / "warehouse"), models=upgraded.models, quiet=True)
    would = maintain.run(settings, "walk", dry_run=True).data
    assert would["quarantine"] == 1, "of two rows that were resolved one is old"
    assert would["optimized"] and would["vacuumed"]
    monkeypatch.setattr(Maintenance, "_compact_and_vacuum", lambda self: None)  # which is not compared
    done = maintain.run(settings, "walk").data
    counted = ("generations", "snapshots", "checkpoints", "reports", "estimates", "quarantine", "progress")
    assert {name: done[name] for name in counted} == {name: would[name] for name in counted}
    assert done["followers"] == would["followers"] and done["kept"] == would["kept"]
    assert maintain.run(settings, "walk", dry_run=True).data["quarantine"] == 0


def test_how_states_would_change_is_told_without_spark(upgraded: Settings):
    tables = Tables(upgraded.warehouse)
    data = jobs_migrate.run(upgraded, "walk", dry_run=True).data
    assert (data["snapshot"], data["made"], data["dry_run"]) == (None, False, True)
    assert data["change"]["keys"] == select_source_snapshot(tables, "walk", None, 2).key_count > 0
    assert data["change"]["dropped"] == ["slope"]


def test_a_snapshot_that_lost_keys_is_told_without_spark(upgraded: Settings, tmp_path: Path):
    shutil.copytree(upgraded.warehouse, tmp_path / "warehouse")
    tables = Tables(str(tmp_path / "warehouse"))
    source = select_source_snapshot(tables, "walk", None, 2)
    rows = DeltaTable(tables.path("snapshots"))
    rows.delete(f"snapshot_id = '{source.snapshot_id}' AND key <> 'never'")
    rows.vacuum(0, dry_run=False, enforce_retention_duration=False)
    settings = Settings.load(warehouse=tables.root, models=upgraded.models, quiet=True)
    with pytest.raises(
        UserError, match=f"is damaged: 0 keys with checksum 0+, where its manifest says {source.key_count}"
    ):
        jobs_migrate.run(settings, "walk", dry_run=True)


def test_looks_at_tables_need_no_java(released: Settings, run_cli: RunCli):
    done = run_cli("status", *where(released), "--json", env=NO_JAVA)
    assert (done.code, done.stderr) == (0, ""), done.stderr
    found = {one["model"]: one for one in json.loads(done.stdout)["models"]}
    assert found["walk"]["measurements"] == {"version": 4, "rows": 160, "quarantined": 3}
    assert (found["other"]["snapshots"], found["other"]["generations"]) == ([], [])
    listed = quarantine.list_(released, "walk").data
    assert [(one["reason"], one["held"], one["replayed"]) for one in listed["reasons"]] == [
        ("time at: not a time", 2, 1),
        ("measurement a: not a number", 1, 0),
    ]
    shown = quarantine.show(released, "walk", since="2d").data
    assert [one["id"] for one in shown["rows"]] == ["2", "4"]


def test_a_damaged_checkpoint_is_told_without_spark(released: Settings, tmp_path: Path):
    shutil.copytree(released.warehouse, tmp_path / "warehouse")
    offsets = tmp_path / "warehouse" / "checkpoints" / "walk-g0001" / "offsets" / "0"
    offsets.write_bytes(offsets.read_bytes().replace(b"reservoirVersion", b"reservoirversion"))
    data = status._report(released, Tables(str(tmp_path / "warehouse")), "walk", None).data
    error = data["models"][0]["generations"][0]["last_error"]
    assert error == "the checkpoint is damaged: offsets/0 cannot be read (ChecksumException)"


REFUSED = [
    (2, "--to-version 99: measurements/walk has versions 0 to", "walk", "pretrain", "--to-version", "99"),
    (2, "model walk has no such snapshot (it has walk-v1-", "walk", "stream", "--adopt", "nothing"),
    (2, "model walk has no generation walk-g0009", "walk", "stream", "--generation", "walk-g0009"),
    (2, "model walk has no snapshot of a version before 1", "walk", "migrate"),
    (2, "model walk has no shadow to promote", "walk", "promote"),
    (2, "model walk has no shadow to retire", "walk", "retire"),
    (2, "model walk has no generation to roll back to", "walk", "rollback"),
    (2, "walk-g0001 of walk came from no other version", "walk", "rollback", "--last-state"),
    (2, "walk-g0001 of walk came from no other version", "walk", "rollback", "--last-state", "--dry-run"),
    (2, "model walk has no generation walk-g0009", "walk", "rollback", "--last-state", "--to", "walk-g0009"),
    (2, "model walk has no generation walk-g0009", "walk", "export", "--generation", "walk-g0009"),
    (2, "model other has no measurements in", "other", "pretrain"),
    (2, "model other has no measurements in", "other", "estimate"),
    (2, "model other has no measurements in", "other", "stream"),
    (2, "model other has no measurements in", "other", "upgrade"),
    (2, "model other has no live estimates", "other", "monitor"),
    (3, "model other has no live generation", "other", "export", "--needed"),
]
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, sys
from jobs.cli import app
for code, said, model, *args in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        got = app([*args, "--model", model, "--quiet", *sys.argv[2:]], standalone_mode=False)
    if (got or 0) != code or said not in out.getvalue() or "Spark" in out.getvalue():
        print(args, model, got, out.getvalue())
"""


def test_what_the_tables_tell_is_told_before_spark_starts(
    released: Settings, upgraded: Settings, tmp_path: Path
):
    """Refusals, and what dry runs of a second version would do."""
    next_version = str(upgraded.models / "walk.yaml")
    dry_runs = [
        (0, "to version 2", next_version, "migrate", "--dry-run"),
        (0, "walk: dry run, nothing was changed", next_version, "maintain", "--dry-run"),
        (
            0,
            "dry run: version 2 would start without the states of walk-g0001",
            next_version,
            *("upgrade", "--mode", "stateless", "--lose-state", "--dry-run"),
        ),
    ]
    changed = yaml.safe_load((released.models / "walk.yaml").read_text())
    versions = tmp_path / "versions"
    versions.mkdir()
    (versions / "walk.yaml").write_text(yaml.safe_dump({**changed, "version": 3, "migrate": {"from": 2}}))
    keyed = tmp_path / "keyed"
    keyed.mkdir()
    (keyed / "walk.yaml").write_text(yaml.safe_dump({**changed, "key": ["house"]}))
    refused = [
        *REFUSED,
        (
            2,
            "the measurements of walk have no column house, which the spec names now (they have",
            str(keyed / "walk.yaml"),
            "pretrain",
        ),
        (2, "version 2", str(versions / "walk.yaml"), "upgrade"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps([*refused, *dry_runs]), *where(released)],
        cwd=tmp_path,
        env=cli_environment(tmp_path, NO_JAVA),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_command_says_at_once_what_it_does(run_cli: RunCli):
    done = run_cli("pretrain", "--model", "nile", env=NO_JAVA)
    first, *rest = done.stderr.splitlines()
    assert (
        first
        == "pretrain nile: learn the model's parameters, filter the whole history, and commit a snapshot"
    )
    assert len(rest) == 1 and rest[0].startswith("error: model nile has no measurements in"), done.stderr


def test_a_model_without_a_live_generation_is_not_verified_at_once(run_cli: RunCli, tmp_path: Path):
    metrics = tmp_path / "verify.prom"
    done = run_cli("verify", "--model", "nile", "--json", "--metrics-file", str(metrics), env=NO_JAVA)
    assert done.code == 3 and "nile: nothing to verify: no generation is live" in done.stderr
    assert json.loads(done.stdout)["outcome"] == "nothing to verify"
    assert "nile" in metrics.read_text()


def test_a_picture_is_announced(run_cli: RunCli):
    done = run_cli("plot", "--model", "nile", env=NO_JAVA)
    assert done.stderr.startswith("plot nile: draw estimates of some keys with their bands, as a PNG")
