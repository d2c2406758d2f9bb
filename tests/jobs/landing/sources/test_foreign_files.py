"""Who writes a user's table names its files: only files of the table's own folder are read, unless the spec says so."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from deltalake import DeltaTable, write_deltalake

from jobs.batch.history_rows import _read_given_rows
from jobs.core.errors import UserError
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import InputsTable
from jobs.offline.stored_keys import _read_inputs_table
from jobs.spark.foreign_files import keep_own_files, read_own_files
from jobs.specs.sections import Inputs
from jobs.storage.foreign_files import normalize_folder, refuse_foreign_table, refuse_foreign_vectors
from jobs.storage.tables import measurements
from jobs.upgrades.migration import importing
from tests.jobs.landing.sources.test_table_source import add, keys, land, numbered, opened
from tests.jobs.support.pipeline import Pipeline

pytestmark = pytest.mark.spark

TOLD = "its log names a file outside the table's folder, so rows of others could be read"
WAYS = ["absolute", "a URI", "another spelling of a URI", "above", "above, encoded", "above, twice encoded in part",
        "a link", "a folder that is a link"]  # fmt: skip

FEW = ["absolute", "above, encoded", "a link"]


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A table of somebody else, whose rows are secret."""
    table = tmp_path / "others" / "secret table"
    add(table, numbered(77, 78))
    return table


def name_foreign_file(table: Path, file: Path, way: str) -> str:
    """Return what a log writes to name a file of another folder."""
    up = f"{os.path.relpath(file.parent, table)}/{quote(file.name)}"
    if way == "a link":
        (table / "own.parquet").symlink_to(file)
        return "own.parquet"
    if way == "a folder that is a link":
        (table / "day=1").symlink_to(file.parent)
        return quote(f"day=1/{file.name}")
    return {
        "absolute": quote(str(file)),
        "a URI": file.as_uri(),
        "another spelling of a URI": file.as_uri().replace("file:///", "file:/"),
        "above": quote(up),
        "above, encoded": up.replace("..", "%2E%2E").replace(" ", "%20"),
        "above, twice encoded in part": up.replace("..", ".%2e").replace(" ", "%20"),
    }[way]


def smuggle(table: Path, others: Path, way: str) -> None:
    """Commit a file of another table into a table's log, as anybody who may write its folder can."""
    (file,) = others.glob("*.parquet")
    version = max(int(one.stem) for one in (table / "_delta_log").glob("*.json")) + 1
    stats = json.dumps({"numRecords": 2})
    added = {
        "path": name_foreign_file(table, file, way),
        "partitionValues": {},
        "size": file.stat().st_size,
        "modificationTime": 1,
        "dataChange": True,
        "stats": stats,
    }
    (table / "_delta_log" / f"{version:020d}.json").write_text(json.dumps({"add": added}) + "\n")


@pytest.mark.parametrize("ways", [FEW, pytest.param(WAYS, marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_table_whose_log_names_other_files_is_refused(
    tmp_path: Path, others: Path, ways: list[str]
) -> None:
    pipeline, _ = opened(tmp_path)
    home = pipeline.warehouse.at(str(tmp_path / "tables"))
    for way in ways:
        table = tmp_path / "tables" / way
        add(table, numbered(1))
        assert refuse_foreign_table(home, way, "it") == 0
        smuggle(table, others, way)
        with pytest.raises(UserError, match=TOLD):  # without Spark
            refuse_foreign_table(home, way, "it")
        with pytest.raises(UserError, match=TOLD):
            read_own_files(home, way, "it", clones=False)
        if way == "above, encoded":  # a stream compares names
            rows = keep_own_files(home.read(way), home.path(way), "it").select("id")
            with pytest.raises(Exception, match=TOLD):
                rows.collect()


@pytest.mark.slow
def test_a_stream_refuses_each_of_these_names(tmp_path: Path, others: Path) -> None:
    pipeline, _ = opened(tmp_path)
    for way in (one for one in WAYS if "link" not in one):
        table = tmp_path / "tables" / way
        add(table, numbered(1))
        smuggle(table, others, way)
        stream = pipeline.warehouse.spark.readStream.format("delta").load(str(table))
        rows = keep_own_files(stream, str(table), "it")
        query = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "notes" / way))
        with pytest.raises(Exception, match=TOLD):
            query.trigger(availableNow=True).start().awaitTermination()


def test_a_table_is_itself_in_each_spelling_of_its_folder(tmp_path: Path) -> None:
    pipeline, _ = opened(tmp_path)
    (tmp_path / "x").mkdir()
    add(tmp_path / "theirs" / "y", numbered(1))
    home = pipeline.warehouse.at(str(tmp_path))
    for spelled in (
        "x/../theirs/y",
        "theirs/./y",
        "theirs//y",
        "./theirs/y",
        "theirs/y/",
        "theirs/../theirs/y",
    ):
        root = f"{tmp_path}/{spelled}"
        assert keep_own_files(home.spark.read.format("delta").load(root), root, "it").count() == 1, spelled
        assert read_own_files(home, spelled, "it", clones=False).count() == 1
        assert refuse_foreign_table(home, spelled, "it") == 0


@pytest.mark.parametrize(
    ("root", "folder"),
    [
        ("s3a://b/x/./y//z/../t/", "s3a://b/x/y/t"),
        ("file:///x/../y%20z/.", "/y z"),
        ("/x/../y", "/y"),
        ("//x", "/x"),
        ("abfss://c@h/../x", "abfss://c@h/x"),
    ],
)
def test_a_folder_has_one_spelling(root: str, folder: str) -> None:
    assert normalize_folder(root) == folder


def test_a_plus_sign_in_the_name_of_a_folder_is_no_space(tmp_path: Path) -> None:
    pipeline, _ = opened(tmp_path)
    for name in ("a+b", "a b"):
        add(tmp_path / "tables" / name, numbered(1))
    home = pipeline.warehouse.at(str(tmp_path / "tables"))
    assert keep_own_files(home.read("a+b"), home.path("a+b"), "it").count() == 1
    smuggle(tmp_path / "tables" / "a+b", tmp_path / "tables" / "a b", "absolute")
    with pytest.raises(Exception, match=TOLD):
        keep_own_files(home.read("a+b"), home.path("a+b"), "it").collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "a b+c", "ä é", "a=b;c"])
def test_the_files_of_the_table_itself_are_read(tmp_path: Path, name: str) -> None:
    pipeline, _ = opened(tmp_path)
    table = tmp_path / "theirs" / name
    write_deltalake(str(table), numbered(1, 2, 3).assign(day="x y+z%ä"), partition_by=["day"])
    home = pipeline.warehouse.at(str(table.parent))
    assert read_own_files(home, name, "it", clones=False).count() == 3
    assert refuse_foreign_table(home, name, "it") == 0
    rows = keep_own_files(home.read(name), home.path(name), "it")
    assert sorted(row["id"] for row in rows.select("id").collect()) == [1, 2, 3]


def test_a_commit_while_the_source_is_landed_brings_no_rows_of_others(tmp_path: Path, others: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(1, 2))
    assert land(pipeline).data["rows"] == 2
    smuggle(table, others, "absolute")
    with pytest.raises(
        UserError, match=f"landing table .* failed: table {table}: {TOLD}.*clones: true"
    ) as refused:
        land(pipeline)
    assert refused.value.exit_code == 1 and keys(pipeline) == [1, 2]
    spec = {"kind": "delta", "table": str(table), "clones": True}
    trusting, _ = opened(tmp_path / "trusting", source=spec)
    assert land(trusting).data["rows"] == 4 and keys(trusting) == [1, 2, 77, 78]


@pytest.mark.slow
def test_a_file_elsewhere_that_a_checkpoint_names_is_not_landed(tmp_path: Path, others: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(1, 2))
    smuggle(table, others, "a URI")
    DeltaTable(str(table)).create_checkpoint()
    (table / "_delta_log" / f"{0:020d}.json").unlink()  # the log's commits are in a file of Parquet
    with pytest.raises(UserError, match=TOLD):
        land(pipeline)
    assert not pipeline.tables.exists(measurements("walk")) or keys(pipeline) == []


@pytest.mark.slow
def test_a_table_of_inputs_or_of_an_option_is_refused_likewise(tmp_path: Path, others: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(1, 2))
    smuggle(table, others, "absolute")
    assert pipeline.spec.source is not None
    model = DeployedModel(pipeline.spec, pipeline.warehouse)
    trusting = pipeline.spec.model_copy(
        update={"source": pipeline.spec.source.model_copy(update={"clones": True})}
    )
    with pytest.raises(UserError, match=f"--input {table}: {TOLD}"):
        _read_given_rows(model, str(table), None)
    other = pipeline.spec.source.model_copy(update={"clones": True, "table": "other"})
    elsewhere = pipeline.spec.model_copy(update={"source": other})
    with pytest.raises(UserError, match="copy its rows into a new table, and name that one") as refused:
        _read_given_rows(model.with_spec(elsewhere), str(table), None)
    assert "clones" not in refused.value.message  # the spec has no such setting for this table
    _read_given_rows(model.with_spec(trusting), str(table), None)
    with pytest.raises(UserError, match=f"--input {table}: {TOLD}; if you trust its writers, copy its rows"):
        importing.read_table(pipeline.warehouse, str(table))
    section = {"table": str(table), "key": ["id"], "columns": {"noise": "a"}}
    for clones in (False, True):
        spec = pipeline.spec.model_copy(update={"inputs": Inputs(**section, clones=clones)})
        inputs = InputsTable(DeployedModel(spec, pipeline.warehouse))
        if clones:
            assert inputs._read(1).count() == 4
            continue
        with pytest.raises(UserError, match=f"{table}: {TOLD}"):
            inputs._read(1)
        with pytest.raises(UserError, match=f"{table}: {TOLD}"):
            _read_inputs_table(str(tmp_path), spec)


VECTORS = ["above", "its own", "a URI", "a link", "a URI of its own"]


def mark(pipeline: Pipeline, table: Path) -> Path:
    """Make a table of two rows, delete the first by a deletion vector, and return the vector's file."""
    add(table, numbered(77, 78))
    for statement in (
        f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')",
        f"DELETE FROM delta.`{table}` WHERE id = 77",
    ):
        pipeline.warehouse.spark.sql(statement)
    (file,) = table.glob("*.bin")
    return file


def copy_marked(file: Path, table: Path, way: str) -> dict[str, Any]:
    """Copy a table; its deletion vector has another name, or stays behind. Return the action with the vector."""
    shutil.copytree(file.parent, table)
    *_, commit = sorted((table / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    (action,) = (one for one in actions if "add" in one)
    vector, own = action["add"]["deletionVector"], table / file.name
    if not way.endswith("its own"):
        own.unlink()
    if way == "a link":
        own.symlink_to(file)
    elif way == "above":
        vector["pathOrInlineDv"] = f"{os.path.relpath(file.parent, table)}{vector['pathOrInlineDv']}"
    elif way != "its own":
        vector |= {"storageType": "p", "pathOrInlineDv": (file if way == "a URI" else own).as_uri()}
    commit.write_text("".join(f"{json.dumps(one)}\n" for one in actions))
    commit.with_name(f".{commit.name}.crc").unlink()
    return action


@pytest.mark.parametrize(
    "ways", [VECTORS[:2], pytest.param(VECTORS, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_deletion_vector_elsewhere_is_refused_unless_clones_are_trusted(
    tmp_path: Path, ways: list[str]
) -> None:
    pipeline, _ = opened(tmp_path)
    file = mark(pipeline, tmp_path / "others" / "secret table")
    home = pipeline.warehouse.at(str(tmp_path / "tables"))
    for way in ways:
        copy_marked(file, tmp_path / "tables" / way, way)
        version = home.latest_version(way)
        assert [row["id"] for row in read_own_files(home, way, "it", clones=True).collect()] == [78]
        if "its own" in way:
            assert read_own_files(home, way, "it", clones=False).count() == 1
            refuse_foreign_vectors(home, way, "it", range(version + 1))
            continue
        with pytest.raises(UserError, match=TOLD):
            read_own_files(home, way, "it", clones=False)
        refuse_foreign_vectors(home, way, "it", range(version))
        with pytest.raises(UserError, match=TOLD):
            refuse_foreign_vectors(home, way, "it", [version])


@pytest.mark.slow
def test_a_source_with_a_deletion_vector_elsewhere_does_not_land(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path)
    file = mark(pipeline, tmp_path / "others" / "secret table")
    copy_marked(file, table, "its own")
    assert land(pipeline).data["rows"] == 1 and keys(pipeline) == [78]
    action = copy_marked(file, tmp_path / "tables" / "copy", "a URI")
    shutil.copy(table / action["add"]["path"], table / "again.parquet")
    action["add"]["path"] = "again.parquet"
    later = (
        table
        / "_delta_log"
        / f"{pipeline.warehouse.at(str(table.parent)).latest_version(table.name) + 1:020d}.json"
    )
    later.write_text(json.dumps(action) + "\n")
    with pytest.raises(UserError, match=f"landing table .* failed: .*table {table}: {TOLD}.*clones: true"):
        land(pipeline)
    assert keys(pipeline) == [78]
    spec = {"kind": "delta", "table": str(table), "clones": True}
    trusting, _ = opened(tmp_path / "trusting", source=spec)
    assert land(trusting).data["rows"] == 2
    DeltaTable(str(table)).create_checkpoint()
    for commit in (table / "_delta_log").glob("*.json"):
        if commit != later:
            commit.unlink()
    anew, _ = opened(tmp_path / "anew", source={**spec, "clones": False})
    with pytest.raises(UserError, match=TOLD):
        land(anew)
    assert keys(anew) == []
