"""A catalog says what the control tables say, and reads each of them once."""

from __future__ import annotations

import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.lineage import generations
from jobs.lineage.catalog import Catalog
from jobs.snapshots import manifests
from jobs.storage.row_changes import put_rows
from jobs.storage.warehouse import Tables
from tests.fixtures.make_release import FOLDER

RELEASE = FOLDER / "0.3.0.tar.gz"


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """A released warehouse of `walk`, and a second model with the same rows in its control tables."""
    with tarfile.open(RELEASE) as archive:
        archive.extractall(tmp_path, filter="data")
    tables = Tables(str(next(tmp_path.rglob("manifests")).parent))
    snapshots = [replace(one, model="twin") for one in manifests.read_manifests(tables, "walk")]
    known = [replace(one, model="twin") for one in generations.read_generations(tables, "walk")]
    rows = [manifests.build_manifest_row(one) for one in snapshots]
    put_rows(tables, "manifests", ("model", "snapshot_id"), lambda there: rows)
    put_rows(
        tables,
        "generations",
        generations.KEYS,
        lambda there: [generations.build_generation_row(one) for one in known],
    )
    return tables


def test_it_has_what_the_tables_have(tables: Tables) -> None:
    catalog = Catalog(tables)
    assert catalog.models == ["twin", "walk"]
    for model in catalog.models:
        assert list(catalog.generations(model)) == generations.read_generations(tables, model)
        assert list(catalog.manifests(model)) == manifests.read_manifests(tables, model)
        assert catalog.live(model) == generations.find_live(tables, model)
        assert catalog.lineage(model) == generations.read_live_lineage(tables, model)
    assert (
        catalog.generations("none") == () and catalog.live("none") is None and catalog.lineage("none") == []
    )


def test_each_table_is_read_once(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    columns = Tables.columns

    def counted(self: Tables, table: str, *more: Any, **options: Any) -> Any:
        read[table] += 1
        return columns(self, table, *more, **options)

    monkeypatch.setattr(Tables, "columns", counted)
    catalog = Catalog(tables)
    for model in (*catalog.models, "none"):
        for look in (catalog.generations, catalog.manifests, catalog.count_quarantined_rows, catalog.live):
            look(model)
    assert read == {"generations": 1, "manifests": 1}
