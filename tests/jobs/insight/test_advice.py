"""The advice of `status`: what it says, when it is silent, and that it rests on what the tables and files say."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.insight.status import StreamMeasures, TableFiles, advise, measure_stream
from jobs.lineage import generations
from jobs.lineage.catalog import Catalog
from jobs.lineage.generations import LIVE, RETIRED, Generation
from jobs.specs.model_spec import ModelSpec
from jobs.storage.table_rows import measure_files
from jobs.storage.warehouse import Tables
from tests.jobs.support.pipeline import random_walk_spec

NOW = datetime(2024, 5, 1, tzinfo=UTC)
MB = 1 << 20


def batches(seconds: float, lag: list[int]) -> list[dict[str, Any]]:
    return [{"seconds": seconds, "rows": 100, "lag_rows": waiting} for waiting in lag]


SLOW = StreamMeasures("nile", batches(90.0, [0, 0, 0]), partitions=2, keys=1000, cores=8)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (SLOW, "nile takes 90 s a micro-batch with 2 partitions on 8 cores: `kalman-pipeline upgrade --model nile "
         "--mode repartition --partitions 8`"),
        (SLOW._replace(records=batches(2.0, [10, 20, 30]), partitions=1), "falls further behind with 1 partition on 8"),
        (SLOW._replace(partitions=8), None),  # no core is idle
        (SLOW._replace(records=batches(2.0, [30, 20, 10])), None),  # it catches up
        (SLOW._replace(records=batches(90.0, [0, 0])), None),  # two micro-batches tell nothing
        (SLOW._replace(cores=None), None),
        (SLOW._replace(records=batches(1.0, [0] * 3), keys=3_000_001, partitions=4), "--partitions 7`"),
        (StreamMeasures("nile", files=[TableFiles("estimates/nile", 4000, 4000 * MB)]), "4,000 files of 1.0 MB on"),
        (StreamMeasures("nile", files=[TableFiles("estimates/nile", 4000, 4000 * 64 * MB)]), None),
        (StreamMeasures("nile", files=[TableFiles("estimates/nile", 20, 20)]), None),
        (StreamMeasures("nile", due_generations=["nile-g0001"]), "1 generation of nile may be removed (nile-g0001): `"),
        (StreamMeasures("nile", due_snapshots=list("abcd")), "4 snapshots of nile may be removed (a, b, c, ...)"),
        (StreamMeasures("nile", oldest_progress=NOW - timedelta(days=120), progress=timedelta(days=90)),
         "the progress of nile goes back 120 d, and retention.progress keeps 90 d"),
        (StreamMeasures("nile", oldest_progress=NOW - timedelta(days=80), progress=timedelta(days=90)), None),
    ],
)  # fmt: skip
def test_what_is_said(seen: StreamMeasures, said: str | None) -> None:
    found = advise(seen, NOW)
    assert found == [] if said is None else len(found) == 1 and said in found[0]


def test_it_rests_on_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, spec = str(tmp_path), ModelSpec.model_validate(random_walk_spec())
    for number in range(3):
        rows = pa.table({"key": ["a"], "nis": [float(number)]})
        write_deltalake(str(tmp_path / "estimates" / "walk"), rows, mode="append")
    parquet = sum(one.stat().st_size for one in (tmp_path / "estimates" / "walk").glob("*.parquet"))
    assert (
        measure_files(root, "estimates/walk") == (3, parquet) and measure_files(root, "estimates/no") is None
    )
    folder = tmp_path / "_progress" / "walk"
    folder.mkdir(parents=True)
    lines = [
        {
            "generation": generation,
            "started_at": f"2024-04-0{day}T00:00:00Z",
            "seconds": 1.0,
            "rows": 1,
            "lag_rows": 0,
        }
        for day, generation in enumerate(["walk-g0001", "walk-g0002", "walk-g0002"], 1)
    ]
    (folder / "walk-g0002.000001.000000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))

    def generation(number: int, status: str) -> Generation:
        at = NOW - timedelta(days=400 - number)
        return Generation(
            f"walk-g{number:04d}", "walk", 1, spec.fingerprint(), "s", "", {}, 2, 2, status,
            created_at=at, retired_at=at,
        )  # fmt: skip

    known = [*(generation(number, RETIRED) for number in (1, 2, 3)), generation(4, LIVE)]
    monkeypatch.setattr(generations, "read_generations", lambda tables: known)
    seen = measure_stream(Catalog(Tables(root)), "walk", spec, cores=4)
    assert seen.due_generations == ["walk-g0001", "walk-g0002"]  # the third is the newest of the retired
    assert (seen.partitions, seen.files) == (2, [TableFiles("estimates/walk", 3, parquet)])
    assert seen.oldest_progress == datetime(2024, 4, 1, tzinfo=UTC) and seen.progress == timedelta(days=90)
