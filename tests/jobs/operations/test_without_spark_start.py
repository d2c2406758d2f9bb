"""What commands tell without Spark: looks at tables, and refusals. No Java is there, so Spark cannot start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs import status
from jobs.core.report import plain
from jobs.ingestion import quarantine_without_spark
from jobs.ingestion.quarantine_rows import count_by_reason, sorted_rows
from jobs.warehouse.delta import utc
from jobs.warehouse.local_tables import LocalTables
from jobs.warehouse.quarantine import TABLE, Choice
from tests.conftest import RunCli, cli_environment
from tests.jobs.support.pipeline import Pipeline

NO_JAVA = {"JAVA_HOME": "/nonexistent", "PATH": "/nonexistent"}

SPEC: dict[str, Any] = {
    "name": "rooms",
    "version": 1,
    "key": ["room"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["temperature"],
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 1.0},
    "observation": {"R": [[0.25]]},
    "initial": {"diffuse": True},
    "monitor": {"rules": [{"name": "unfit", "kind": "nis", "at_least": 9}]},
}


def rows(count: int, day: int) -> pd.DataFrame:
    at = pd.date_range(f"2024-05-{day:02d}", periods=count, freq="h", tz="UTC")
    return pd.DataFrame({"at": at, "room": ["kitchen", "cellar"] * (count // 2), "temperature": 20.0})


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Pipeline:
    """A model that has landed, quarantined, pretrained and streamed rows."""
    pipe = Pipeline(tmp_path_factory.mktemp("looks") / "pipe", SPEC)
    pipe.land(rows(20, 1))
    pipe.pretrain()
    pipe.land(rows(20, 2))
    pipe.stream()
    bad = pipe.folder / "bad.csv"
    bad.write_text(
        "at,room,temperature\n2024-06-01,kitchen,warm\nyesterday,cellar,12\n2024-06-02,cellar,13\n"
    )
    pipe.land_files(bad)
    return pipe


def test_status_is_the_same_with_and_without_spark(streamed: Pipeline):
    tables = LocalTables(streamed.settings.warehouse)
    without, beside = (
        plain(status._report(streamed.settings, one, None, None).data) for one in (tables, streamed.warehouse)
    )
    (model,) = without["models"]
    assert model["measurements"] == {
        "version": model["measurements"]["version"],
        "rows": 41,
        "quarantined": 2,
    }
    assert [one["rows_behind"] for one in model["generations"]] == [1]
    for data in (without, beside):
        for one in data["models"][0]["generations"]:
            one.pop("seconds_behind")  # since a row has landed
    assert without == beside


@pytest.mark.parametrize(
    "choice", [Choice(), Choice(reason="time"), Choice(since="2d"), Choice(since="2100-01-01")]
)
def test_quarantine_is_the_same_with_and_without_spark(streamed: Pipeline, choice: Choice):
    tables, frame = LocalTables(streamed.settings.warehouse), streamed.warehouse.read(TABLE)
    frame = frame.filter(choice.condition())
    assert quarantine_without_spark.count_by_reason(tables, "rooms", choice) == count_by_reason(frame)
    shown = [utc(row.asDict()) for row in sorted_rows(frame).collect()]
    assert quarantine_without_spark.held_rows(tables, "rooms", choice, 20) == shown


def test_looks_at_tables_need_no_java(streamed: Pipeline, run_cli: RunCli):
    where = ("--warehouse", streamed.settings.warehouse, "--models", streamed.settings.models, "--json")
    done = run_cli("status", *where, env=NO_JAVA)
    assert (done.code, done.stderr) == (0, ""), done.stderr
    assert json.loads(done.stdout)["models"][0]["measurements"]["rows"] == 41
    done = run_cli("quarantine", "list", "--model", "rooms", *where, env=NO_JAVA)
    assert (done.code, json.loads(done.stdout)["rows"]) == (0, 2), done.stderr
    done = run_cli("quarantine", "show", "--model", "rooms", *where, env=NO_JAVA)
    assert (done.code, len(json.loads(done.stdout)["rows"])) == (0, 2), done.stderr


REFUSED = [
    (2, "--to-version 99: measurements/rooms has versions 0 to", "rooms", "pretrain", "--to-version", "99"),
    (2, "model rooms has no such snapshot (it has rooms-v1-", "rooms", "stream", "--adopt", "nothing"),
    (2, "model rooms has no generation rooms-g0009", "rooms", "stream", "--generation", "rooms-g0009"),
    (2, "model rooms has no snapshot of a version before 1", "rooms", "migrate"),
    (2, "model rooms has no shadow to promote", "rooms", "promote"),
    (2, "model rooms has no shadow to retire", "rooms", "retire"),
    (2, "model rooms has no generation to roll back to", "rooms", "rollback"),
    (2, "model rooms has no generation rooms-g0009", "rooms", "export", "--generation", "rooms-g0009"),
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
    with contextlib.redirect_stderr(out):
        got = app([*args, "--model", model, "--quiet", *sys.argv[2:]], standalone_mode=False)
    if got != code or said not in out.getvalue() or "Spark" in out.getvalue():
        print(args, model, got, out.getvalue())
"""


def test_what_the_tables_tell_is_told_before_spark_starts(streamed: Pipeline, tmp_path: Path):
    streamed.write_spec({**SPEC, "name": "other"})
    where = ["--warehouse", streamed.settings.warehouse, "--models", str(streamed.settings.models)]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(REFUSED), *where],
        cwd=tmp_path,
        env=cli_environment(tmp_path, NO_JAVA),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_missing_column_and_a_version_without_rules_are_told_before_spark_starts(
    streamed: Pipeline, run_cli: RunCli, tmp_path: Path
):
    pipe = streamed.copied(tmp_path / "copy")
    where = ("--warehouse", pipe.settings.warehouse, "--models", pipe.settings.models, "--quiet")
    pipe.write_spec({**SPEC, "key": ["house"]})
    done = run_cli("pretrain", "--model", "rooms", *where, env=NO_JAVA)
    assert done.code == 2 and "the measurements of rooms have no column house" in done.stderr, done.stderr
    pipe.write_spec({**SPEC, "version": 3, "migrate": {"from": 2}})
    done = run_cli("upgrade", "--model", "rooms", *where, env=NO_JAVA)
    assert done.code == 2 and "version 2" in done.stderr and "Spark" not in done.stderr, done.stderr


def test_a_command_says_at_once_what_it_does(run_cli: RunCli):
    done = run_cli("pretrain", "--model", "nile", env=NO_JAVA)
    first, *rest = done.stderr.splitlines()
    assert first == (
        "pretrain nile: learn the model's parameters, filter the whole history, and commit a snapshot"
    )
    assert len(rest) == 1 and rest[0].startswith("error: model nile has no measurements in"), done.stderr
