"""Tables in S3 read without Spark as those of a folder, by delta-rs and Arrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.inputs_table import build_inputs_layout, map_records, read_copied_records
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.packets import Records
from jobs.state.encoding.routing import compute_routes
from jobs.storage.object_files import ObjectFiles, build_delta_options
from jobs.storage.table_rows import find_write_time, measure_files, read_column_types, read_table
from tests.support.object_store import BUCKET, ObjectStore, Proxy

ROOT = f"s3a://{BUCKET}/tables"
ROWS = pa.table({"model": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "key": ["k", "l", "m"]})


def test_tables_in_s3_are_read_as_those_of_a_folder(
    store: ObjectStore, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not through the proxy: delta-rs lets no other thread of the process run while it asks for a table's history.
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
    for place, options in ((f"s3://{BUCKET}/tables/t", build_delta_options()), (str(tmp_path / "t"), None)):
        for _ in range(2):
            write_deltalake(place, ROWS, mode="append", partition_by=["model"], storage_options=options)
    roots = ROOT, str(tmp_path)
    for partition, rows in ((None, 6), ({"model": "a"}, 4)):
        there, here = (read_table(root, "t", ["x", "key"], partition=partition) for root in roots)
        assert there is not None and here is not None
        assert there.num_rows == rows and sorted(there["x"].to_pylist()) == sorted(here["x"].to_pylist())
    there, here = (
        read_table(root, "t", ["x", "key"], version=0, among=("key", ["k", "m"])) for root in roots
    )
    assert there is not None and here is not None and there.num_rows == here.num_rows == 2
    assert read_column_types(ROOT, "t") == read_column_types(str(tmp_path), "t") == {
        "model": "string", "x": "double", "key": "string",
    }  # fmt: skip
    assert measure_files(ROOT, "t") == measure_files(str(tmp_path), "t")
    assert find_write_time(ROOT, "t") is not None
    assert (read_table(ROOT, "absent", ["x"]), read_column_types(ROOT, "absent")) == (None, {})


def test_wrong_credentials_are_a_sentence(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret-of-the-tests")
    with pytest.raises(UserError, match="t cannot be read: ") as caught:
        read_table(ROOT, "t", ["x"])
    assert caught.value.exit_code == RUN_FAILED and "another-secret" not in caught.value.message


def test_a_worker_copies_the_inputs_that_a_folder_lets_it_map(proxy: Proxy, tmp_path: Path) -> None:
    keys = np.arange(200)
    layout = build_inputs_layout(KeyKind(("id",), ("bigint",), True), 2)
    values = {"route": np.sort(compute_routes(keys)), "u": np.arange(400.0).reshape(2, 200)}
    packet = layout.encode(Records({name: values[name] for name in ("route", "u")}, None))
    (tmp_path / "p.packet").write_bytes(packet)
    ObjectFiles(f"{ROOT}/checkpoints/g/inputs").write("p.packet", packet)
    here = map_records(tmp_path / "p.packet", layout)
    there = read_copied_records(f"{ROOT}/checkpoints/g/inputs/p.packet", layout)
    assert {name: values.tolist() for name, values in there.arrays.items()} == {
        name: values.tolist() for name, values in here.arrays.items()
    }
    with pytest.raises(
        RuntimeError, match="the table of inputs that was pinned for this micro-batch is gone"
    ):
        read_copied_records(f"{ROOT}/checkpoints/g/inputs/other.packet", layout)
