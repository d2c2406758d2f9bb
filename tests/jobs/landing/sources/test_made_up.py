"""Made-up rows: the same whatever the pieces they land in, resumed after a kill, and for every kind of filter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs import ingest
from jobs.core.errors import UserError
from jobs.landing.sources import made_up as made_up_rows
from jobs.landing.sources.made_up import find_progress, make_up_rows
from jobs.specs.model_spec import ModelSpec
from jobs.storage.table_log import FileTable
from jobs.storage.tables import measurements
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

RATE = {"rows_per_second": 1e-6, "first_rows": 500, "keys": 7, "seed": 3, "missing": 0.1, "every": "10s"}
TYPES = {"id": "string"}


def spec_of(**changes: Any) -> ModelSpec:
    rate = {**RATE, **changes.pop("rate", {})}
    given = {**random_walk_spec(), "source": {"kind": "rate", "rate": rate}, **changes}
    return ModelSpec.model_validate({name: value for name, value in given.items() if value is not None})


def test_a_row_depends_on_the_seed_and_its_number_alone() -> None:
    spec = spec_of()
    whole = make_up_rows(spec, 0, 500, TYPES)
    cuts = [0, 1, 2, 101, 499, 500]
    parts = [make_up_rows(spec, a, b, TYPES) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert pa.concat_tables(parts).combine_chunks().equals(whole)
    assert not make_up_rows(spec_of(rate={"seed": 4}), 0, 500, TYPES).equals(whole)
    assert whole.column("id").to_pylist()[:8] == [
        "id-0",
        "id-1",
        "id-2",
        "id-3",
        "id-4",
        "id-5",
        "id-6",
        "id-0",
    ]
    times = np.asarray(whole.column("at").cast(pa.int64()))
    assert (np.diff(times[::7]) == 10_000_000).all() and times[0] == 1704067200000000
    many = make_up_rows(spec, 0, 70_000, TYPES)
    a = np.array(many.column("a"), float)
    assert np.isnan(a).mean() == pytest.approx(0.1, abs=0.005)
    noise = made_up_rows._draw_noise(3, np.arange(70_000), 2)[0]
    assert noise.mean() == pytest.approx(0.0, abs=0.01) and noise.var() == pytest.approx(1.0, abs=0.02)
    assert abs((noise[0] * noise[1]).mean()) < 0.01 and abs((noise[0, 1:] * noise[0, :-1]).mean()) < 0.01


def test_without_key_columns_each_row_has_a_time_of_its_own() -> None:
    times = np.asarray(make_up_rows(spec_of(key=None), 0, 50, {}).column("at").cast(pa.int64()))
    assert (np.diff(times) == 10_000_000).all()


@pytest.mark.parametrize(
    ("kind", "mixture", "known"),
    [
        ("poisson_mixture", {"rates": [[8.0, 8.0], [12.0, 12.0]]}, range(100)),
        ("bernoulli_mixture", {"probabilities": [[0.3, 0.3], [0.6, 0.6]]}, range(2)),
        ("categorical_mixture", {"components": 1, "categories": [3, 3]}, range(3)),
    ],
)
def test_mixtures_get_what_they_can_take(kind: str, mixture: dict[str, Any], known: range) -> None:
    plain: dict[str, Any] = dict.fromkeys(("process", "observation", "initial", "states"))
    table = make_up_rows(spec_of(filter=kind, mixture=mixture, **plain), 0, 5000, TYPES)
    found = set(np.array(table.column("a").drop_null(), float).tolist())
    assert len(found) > 1 and found <= set(map(float, known))


def test_rows_land_once_and_a_killed_landing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up_rows, "ROWS_A_FILE", 200)
    spec = random_walk_spec(source={"kind": "rate", "rate": RATE})
    pipeline = Pipeline(tmp_path, spec)
    commit, done = FileTable.commit, []

    def killed(self: FileTable, *more: Any) -> None:
        done.append(commit(self, *more))
        if len(done) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FileTable, "commit", killed)
        ingest.run(pipeline.settings, "walk")
    assert ingest.run(pipeline.settings, "walk").data["rows"] == 100
    assert ingest.run(pipeline.settings, "walk").data["rows"] == 0
    rows = pipeline.tables.columns(measurements("walk"), ("id", "at", "a", "b"))
    order = [("at", "ascending"), ("id", "ascending")]
    expected = make_up_rows(pipeline.spec, 0, 500, TYPES).cast(rows.schema)
    assert rows.sort_by(order).equals(expected.sort_by(order))
    # by the clock: a thousand a second since the first landing
    known = find_progress(pipeline.tables, pipeline.spec)
    assert known is not None and known.rows == 500
    pipeline.write_spec(random_walk_spec(source={"kind": "rate", "rate": {**RATE, "rows_per_second": 100.0}}))
    due = 500 + 100 * (time.time() - known.since)
    total = 500 + ingest.run(pipeline.settings, "walk").data["rows"]
    assert due <= total + 1 <= 500 + 100 * (time.time() - known.since) + 1
    with pytest.raises(UserError, match="made-up rows are never lost"):
        ingest.run(pipeline.settings, "walk", accept_loss=True)
