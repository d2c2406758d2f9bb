"""A bucket's estimates are those of the filter alone, however keys are shared out, wherever a run begins; no Spark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, LongType, StructField, StructType, TimestampType

from jobs.batch.bucket_estimates import SLICES, EstimatingPlan, build_estimator, list_smoothed_widths
from jobs.snapshots.model_runtime import ModelRuntime
from jobs.state import expiry
from jobs.state.block_format import build_state_layout
from jobs.state.encoding.packets import NEVER, Records, RowPacket
from jobs.state.encoding.routing import compute_buckets, compute_routes, make_routing
from jobs.state.encoding.rows import build_row_packer, unpack_rows
from jobs.state.filter_step import filter_step
from jobs.state.kernel import load_checked_spec
from jobs.state.row_filter import RowFilter
from kalman.filters.rounded import find_storage_dtype
from kalman.smoothers.pieces import Pieces
from tests.jobs.batch import smoothed_alone
from tests.jobs.batch.test_estimate import ALONE, RLS, SMOOTHED, alone, lists_equal, pipeline_of
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, ordered, random_rows

FIELDS = (("id", LongType()), ("at", TimestampType()), ("a", DoubleType()), ("b", DoubleType()))
SCHEMA = StructType([StructField(name, kind) for name, kind in FIELDS])


def runtime_of(pipeline: Pipeline) -> ModelRuntime:
    return ModelRuntime(load_checked_spec("walk", pipeline.settings.models), {}, SCHEMA)


def plan_of(runtime: ModelRuntime, smooth: bool = False, since: int = NEVER) -> EstimatingPlan:
    kernel, out = runtime.kernel, runtime.estimates
    if smooth:
        out = out._replace(extra=(*out.extra, *list_smoothed_widths(kernel)))
    layout = build_state_layout(runtime.kind, kernel.size, find_storage_dtype(kernel))
    spec = runtime.spec
    return EstimatingPlan(
        kernel, spec.unit_us, runtime.rows, layout, out, None, spec.idle_us, since, smooth, since == NEVER
    )


def packets(plan: EstimatingPlan, frame: pd.DataFrame, buckets: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a frame as the packets of so many buckets, from two Arrow batches."""
    numbers = {f"n{i}": frame[name].to_numpy() for i, name in enumerate(plan.rows.numbers)}
    table = pa.table(
        {"identity": frame["id"].to_numpy(), "time": pa.Array.from_pandas(frame["at"]), **numbers}
    )
    table = table.set_column(1, "time", table.column("time").cast(pa.timestamp("us", tz="UTC")))
    pack = build_row_packer(plan.rows, make_routing(buckets, 1), typed=True)
    half = frame.shape[0] // 2
    for part in (table.slice(half), table.slice(0, half)):
        yield from pack(iter(part.combine_chunks().to_batches()))


def result(batches: Iterator[pa.RecordBatch]) -> pd.DataFrame:
    frame = pa.Table.from_batches(list(batches)).to_pandas()
    frame["event_time"] = frame["event_time"].dt.tz_localize(None)
    return ordered(frame)


@pytest.mark.parametrize("buckets", [1, 5])
@pytest.mark.parametrize("kind", [*ALONE, "rls"])
def test_a_kind_has_the_bits_of_the_filter_alone(tmp_path: Path, kind: str, buckets: int) -> None:
    pipeline = pipeline_of(tmp_path, **{**ALONE, "rls": RLS}[kind])
    days = [day.dropna() if kind == "rls" else day for day in random_rows(2, rows=60)]
    plan = plan_of(runtime_of(pipeline))
    found = result(build_estimator(plan)(packets(plan, pd.concat(days), buckets)))
    expected = alone(pipeline, *days)
    assert_bit_equal(found, expected)
    lists_equal(found, expected, [name for name, _ in plan.estimates.extra])
    slices = compute_buckets(compute_routes(found["key"].astype(int).to_numpy()), SLICES)
    np.testing.assert_array_equal(found["batch_id"], slices)


@pytest.mark.parametrize(("buckets", "room"), [(1, None), (5, None), (1, 30_000)])
@pytest.mark.parametrize("kind", SMOOTHED)
def test_a_smoothed_kind_has_the_bits_of_smoothing_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, buckets: int, room: int | None
) -> None:
    """In one piece, and in the many pieces that fit in a small room."""
    pipeline = pipeline_of(tmp_path, **SMOOTHED[kind])
    days = random_rows(2, rows=60)
    expected = alone(pipeline, *days, smooth=True)
    plan = plan_of(runtime_of(pipeline), smooth=True)
    given = list(packets(plan, pd.concat(days), buckets))
    if room is not None:
        monkeypatch.setattr(Pieces.__init__, "__defaults__", (None, room))
        monkeypatch.setattr(expiry, "ROWS_AT_ONCE", 17)
    batches = list(build_estimator(plan)(iter(given)))
    assert len(batches) > 1 if room is not None else len(batches) <= buckets
    found = result(iter(batches))
    assert_bit_equal(found, expected)
    lists_equal(found, expected, [name for name in expected.columns if name.startswith("smoothed_")])


@pytest.mark.slow
@pytest.mark.parametrize("idle", [0, 10**15], ids=["without expiry", "with expiry"])
def test_a_process_that_smooths_does_not_grow_with_the_history(idle: int) -> None:
    """Twice the rows take what the rows themselves take: 24 bytes each, where the results of a row take 144."""

    def grown(rows: int) -> int:
        done = subprocess.run(
            [sys.executable, "-m", smoothed_alone.__name__, str(rows), str(idle)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        count, taken = map(int, done.stdout.split())
        assert count == rows * smoothed_alone.KEYS
        return taken

    once, twice = grown(20_000), grown(40_000)
    assert twice - once < 48 * 20_000 * smoothed_alone.KEYS


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("kind", ["linear", "expiry", "extended"])
def test_from_the_states_before_an_interval_come_the_bits_of_the_whole(
    tmp_path: Path, kind: str, smooth: bool
) -> None:
    options: dict[str, dict[str, Any]] = {"linear": {}, **ALONE}
    pipeline = pipeline_of(tmp_path, **options[kind])
    days = random_rows(3, rows=60)
    runtime = runtime_of(pipeline)
    first = int(days[1]["at"].min().normalize().value // 1000)
    plan = plan_of(runtime, smooth, first)
    # The states after the first day, as a snapshot has them; those of keys without later rows are among them.
    before = unpack_rows([part["payload"][0].as_py() for part in packets(plan, days[0], 1)], plan.rows)
    known = filter_step(
        RowFilter(plan.kernel, plan.unit), plan.layout, plan.layout.empty(), before, idle=plan.idle
    ).records

    def both() -> Iterator[pa.RecordBatch]:
        yield from packets(plan, pd.concat(days[1:]), 3)
        labels = make_routing(3, 1).labels
        of = compute_buckets(known.arrays["route"], 3)
        for bucket in range(3):
            some: Records = known.take(np.flatnonzero(of == bucket))
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array([labels[bucket]], pa.int32()),
                    pa.array([int(RowPacket.STATES)], pa.int32()),
                    pa.array([plan.layout.encode(some)], pa.binary()),
                ],
                ["bucket", "kind", "payload"],
            )

    found = result(build_estimator(plan)(both()))
    everything = alone(pipeline, *days, smooth=smooth)
    expected = everything.loc[everything["event_time"] >= pd.Timestamp(first, unit="us")]
    expected = expected.reset_index(drop=True)
    assert len(expected) == 120
    assert_bit_equal(found, expected)
    if smooth:
        lists_equal(found, expected, ["smoothed_mean", "smoothed_covariance"])
    # The rows before, read and not put out, give the same.
    whole = plan._replace(only_own=True)
    again = result(build_estimator(whole)(packets(plan, pd.concat(days), 2)))
    assert_bit_equal(again, expected)
