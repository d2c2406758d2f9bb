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
from jobs.landing.sources.table import TableReader, open_table_reader
from jobs.lineage.generations import DeployedModel
from jobs.lineage.inputs_table import InputsTable
from jobs.offline.stored_keys import _read_inputs_table
from jobs.spark.foreign_files import keep_own_files, read_own_files
from jobs.specs.sections import Inputs
from jobs.storage.foreign_files import (
    name_vector_file,
    normalize_folder,
    refuse_foreign_files,
    refuse_foreign_table,
    refuse_foreign_vectors,
)
from jobs.storage.tables import measurements
from jobs.upgrades.migration import importing
from tests.jobs.landing.sources.test_table_source import add, keys, land, numbered, opened
from tests.jobs.support.pipeline import Pipeline

pytestmark = pytest.mark.spark

TOLD = "its log names a file outside the table's folder, so rows of others could be read"
WAYS = ["absolute", "a URI", "another spelling of a URI", "above", "above, encoded", "above, twice encoded in part",
        "a link", "a folder that is a link", "a fragment that leads back", "a link and a fragment"]  # fmt: skip

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
    if way.startswith("a link"):
        (table / "own.parquet").symlink_to(file)
        return "own.parquet" if way == "a link" else "own.parquet#fragment"
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
        "a fragment that leads back": f"{file.as_uri()}#{quote(lead_back(table))}",
    }[way]


def lead_back(table: Path) -> str:
    """Return the end of a name that the system, but not Hadoop, would resolve into a table."""
    return f"/{'../' * 20}{str(table)[1:]}/x"


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


@pytest.mark.parametrize("root", ["/tables/t", "file:///tables/t", "/x/../tables/./t/", "s3a://b/t"])
def test_no_spelling_of_a_name_leads_out_of_a_table(tmp_path: Path, root: str) -> None:
    """Of a URI, Hadoop opens what stands before a `?` or `#`; an absolute folder of a vector is not below the table."""
    back, store = lead_back(Path("/tables/t")), root.startswith("s3a:")
    own = "s3a://b/t" if store else "/tables/t"
    digits = "ab^-aqEH.-t@S}K{vb[*k^"[-20:]
    for name in ("x.parquet", "day=1/x y%+z#1?.parquet", "a..b/..x"):
        refuse_foreign_files([f"{own}/{name}"], root, "it")
    for name in (
        f"/others/x#{back}",
        f"/others/x?{back}",
        f"{own}/a/../x",
        f"{own}/#/../x",
        "FILE:///tables/t/x",
    ):
        with pytest.raises(UserError, match=TOLD):
            refuse_foreign_files([name], root, "it")
    vectors = [("u", digits), ("u", f"a/b{digits}"), ("u", f"{own}/a{digits}")]
    names = f"{own if store else f'file://{own}'}/x.bin"
    vectors += [("p", names), ("p", f"{names}?a"), ("p", names.replace("x", "%78"))]
    refuse_foreign_files((name_vector_file(*one, root) for one in vectors), root, "it")
    folders = "/others", "file:///others", "s3a://other/x", "file:/others", "..", "a/../.."
    elsewhere = [("u", f"{folder}{digits}") for folder in folders]
    elsewhere += [("p", f"file:///others/x.bin{sign}{back}") for sign in "?#"]
    elsewhere += [("p", f"s3a://other/x.bin{sign}{back}") for sign in "?#"]
    for vector in elsewhere:
        with pytest.raises(UserError, match=TOLD):
            refuse_foreign_files([name_vector_file(*vector, root)], root, "it")


def test_a_link_in_a_table_leads_out_also_before_a_fragment(tmp_path: Path) -> None:
    table, other = tmp_path / "a#b" / "t", tmp_path / "other"
    for folder in (table, other):
        folder.mkdir(parents=True)
    (table / "own").symlink_to(other / "x")
    refuse_foreign_files([f"{table}/x", f"file://{table}/x#y"], str(table), "it")
    for name in ("own", "own#", "own#/y", "own?y"):
        with pytest.raises(UserError, match=TOLD):
            refuse_foreign_files([f"{table}/{name}"], str(table), "it")


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
    frame = read_own_files(home, "theirs/y", "it", clones=False)
    add(tmp_path / "theirs" / "y", numbered(2))
    assert frame.count() == 1  # the checked version is read


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


VECTORS = ["above, by a protocol for writers alone", "its own", "above", "a URI", "a link", "a URI of its own",
           "an absolute folder", "a folder's URI", "a URI with ?", "a URI with #"]  # fmt: skip


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
    elif way.startswith("above"):
        vector["pathOrInlineDv"] = f"{os.path.relpath(file.parent, table)}{vector['pathOrInlineDv']}"
    elif "folder" in way:
        folder = file.parent if way == "an absolute folder" else f"file://{file.parent}"
        vector["pathOrInlineDv"] = f"{folder}{vector['pathOrInlineDv']}"
    elif way != "its own":
        end = f"{way[-1]}{quote(lead_back(table))}" if way[-1] in "?#" else ""
        vector |= {
            "storageType": "p",
            "pathOrInlineDv": (own if way.endswith("its own") else file).as_uri() + end,
        }
    commit.write_text("".join(f"{json.dumps(one)}\n" for one in actions))
    commit.with_name(f".{commit.name}.crc").unlink()
    if way.endswith("for writers alone"):
        hide_feature(table / "_delta_log")
    return action


def hide_feature(log: Path) -> None:
    """Name deletion vectors among the features of a protocol for writers alone; Delta reads them nevertheless."""
    for commit in log.glob("*.json"):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for one in actions:
            if "readerFeatures" in one.get("protocol", {}):
                one["protocol"]["readerFeatures"].remove("deletionVectors")
        commit.write_text("".join(f"{json.dumps(one)}\n" for one in actions))
    for checksum in log.glob("*.crc"):
        checksum.unlink()
    for checksum in log.glob(".*.crc"):
        checksum.unlink()


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
            with pytest.raises(
                UserError, match=f"it: its log no longer has version {version + 1}, .* deletion vec"
            ):
                refuse_foreign_vectors(home, way, "it", range(version + 2))
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


@pytest.mark.slow
def test_commits_while_the_first_rows_are_read_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, table = opened(tmp_path)
    action = copy_marked(mark(pipeline, tmp_path / "others" / "t"), tmp_path / "tables" / "copy", "a URI")
    add(table, numbered(1))
    reader, _ = open_table_reader(pipeline.warehouse, pipeline.spec, False)
    assert isinstance(reader, TableReader)
    reader.rows()
    for number, name in ((1, "add"), (2, "remove")):
        (table / "_delta_log" / f"{number:020d}.json").write_text(json.dumps({name: action["add"]}) + "\n")
    monkeypatch.setattr(reader.checkpoint, "find_touched_version", lambda batch: 0)
    assert reader.reached(0)["version"] == 0
    reader, _ = open_table_reader(pipeline.warehouse, pipeline.spec, False)
    assert isinstance(reader, TableReader)
    monkeypatch.setattr(reader.checkpoint, "find_touched_version", lambda batch: 2)
    reader._opened = 0
    with pytest.raises(UserError, match=TOLD):
        reader.reached(0)


def test_a_commit_of_an_ordinary_table_may_be_gone(tmp_path: Path) -> None:
    pipeline, table = opened(tmp_path)
    add(table, numbered(1))
    refuse_foreign_vectors(pipeline.warehouse.at(str(table.parent)), table.name, "it", [5])
