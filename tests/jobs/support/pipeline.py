"""A small pipeline for tests: land, pretrain, stream, read; each step is the real verb on real tables."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import yaml

import kalman
from demo.check import compute_estimates
from jobs import filter as offline
from jobs import ingest, pretrain, stream
from jobs.batch.batch_filter import Batch, pack_buckets
from jobs.core.report import Report
from jobs.core.settings import Settings
from jobs.snapshots import verified_rows
from jobs.spark.session import spark_session
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.estimates import estimate_format
from jobs.state.encoding.keys import build_key_kind
from jobs.state.encoding.rows import build_row_format
from jobs.state.kernel import load_checked_spec
from jobs.storage.tables import estimates, measurements
from jobs.storage.warehouse import Tables

MASTER = "local[2,4]"
ORDER = ["key", "event_time", "log_likelihood"]


class Pipeline:
    """One model in its own warehouse."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.folder = folder
        models = folder / "models"
        models.mkdir(parents=True, exist_ok=True)
        self.write_spec(spec)
        self.settings = Settings.load(
            warehouse=str(folder / "warehouse"), models=models, master=MASTER, quiet=True
        )
        self.name = spec["name"]
        self.files = 0

    def copied(self, folder: Path) -> Self:
        """Return a copy of the pipeline and its warehouse in a new folder.

        Spark's checkpoints contain their own path, which is replaced in the copies.
        """
        shutil.copytree(self.folder, folder)
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        warehouse = folder / "warehouse"
        copy.folder = folder
        copy.settings = replace(self.settings, warehouse=str(warehouse), models=folder / "models")
        for place in warehouse.glob("checkpoints/*/state/*/_metadata/v2/[!.]*"):  # not checksums
            place.write_text(place.read_text().replace(str(self.folder), str(folder)))
            place.with_name(f".{place.name}.crc").unlink(missing_ok=True)
        return copy

    def write_spec(self, spec: dict[str, Any]) -> None:
        (self.folder / "models" / f"{spec['name']}.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))

    @property
    def spec(self) -> ModelSpec:
        return load_checked_spec(self.name, self.settings.models)

    @property
    def warehouse(self) -> Warehouse:
        return Warehouse(
            spark_session(self.settings, "tests", {"spark.sql.shuffle.partitions": "2"}),
            self.settings.warehouse,
        )

    @property
    def tables(self) -> Tables:
        """The tables, without Spark."""
        return Tables(self.settings.warehouse)

    def land(self, *frames: pd.DataFrame, suffix: str = ".parquet", history: bool = False) -> Report:
        """Land each frame as one file, in a separate commit; return the last report."""
        report = Report([], {})
        for frame in frames:
            report = self.land_files(self.file_of(frame, suffix), history=history)
        return report

    def file_of(self, frame: pd.DataFrame, suffix: str = ".parquet") -> Path:
        """Write a frame to a new file, which has not landed."""
        path = self.folder / f"landing-{self.files:04d}{suffix}"
        self.files += 1
        if suffix == ".parquet":
            frame.to_parquet(path, index=False)
        else:
            frame.to_csv(path, index=False)
        return path

    def land_files(self, *paths: str | Path, history: bool = False) -> Report:
        """Land existing files."""
        return ingest.run(self.settings, self.name, [str(path) for path in paths], history=history)

    def pretrain(self, **options: Any) -> Report:
        return pretrain.run(self.settings, self.name, **options)

    def stream(self, **options: Any) -> Report:
        return stream.run(self.settings, [self.name], **options)

    def estimates(self, generation: str | None = None) -> pd.DataFrame:
        """Return the estimates table, ordered, with lists as tuples."""
        frame = self.warehouse.read(estimates(self.name))
        if generation is not None:
            frame = frame.filter(frame["generation"] == generation)
        return ordered(frame.toPandas())

    def batch(self, version: int | None = None, parameters: dict[str, Any] | None = None) -> pd.DataFrame:
        """Filter all measurements in one uninterrupted batch pass."""
        spec, warehouse = self.spec, self.warehouse
        frame = warehouse.read(measurements(self.name), version).select(*spec.columns)
        fmt = build_row_format(spec, build_key_kind(spec.key, frame.schema), frame.schema)
        kernel = kalman.build(spec.definition(), parameters or {})
        packed = pack_buckets(frame, fmt, frame.count())
        out = estimate_format(fmt.kind, spec, kernel)
        batch = Batch(fmt, spec.unit_us, spec.idle_us)
        return ordered(compute_estimates(packed, kernel, batch, out).toPandas())

    def snapshot(self, identity: str) -> pd.DataFrame:
        return (
            verified_rows.read_rows(self.warehouse, identity, self.name)
            .toPandas()
            .sort_values("key", ignore_index=True)
        )


def streaming(folder: Path, history: pd.DataFrame, *later: pd.DataFrame, **changes: Any) -> Pipeline:
    """Return a pipeline that was pretrained on a history and whose stream has processed the later frames.

    `changes`: fields of the spec that differ from `random_walk_spec`.
    """
    pipeline = Pipeline(folder, random_walk_spec(**changes))
    pipeline.land(history)
    pipeline.pretrain()
    pipeline.land(*later)
    pipeline.stream()
    return pipeline


def ordered(frame: pd.DataFrame) -> pd.DataFrame:
    for name in ("mean", "covariance"):
        frame[name] = [tuple(value) for value in frame[name]]
    return frame.sort_values([*ORDER, "mean"], ignore_index=True)


def assert_bit_equal(found: pd.DataFrame, expected: pd.DataFrame, columns: Sequence[str] = ()) -> None:
    """Check that two sets of estimates have the same rows with the same bits."""
    assert len(found) == len(expected)
    for name in columns or ("key", "event_time", "mean", "covariance", "log_likelihood", "nis", "flags"):
        left, right = found[name], expected[name]
        differ = ~((left == right) | (left.isna() & right.isna()))
        assert not differ.any(), (
            f"{differ.sum()} of {len(found)} rows differ in {name}, first:\n"
            f"{found[differ].head(3).to_string()}\n{expected[differ].head(3).to_string()}"
        )


def assert_as_the_filter_alone(
    pipeline: Pipeline, estimates: list[dict[str, Any]], frames: list[pd.DataFrame]
) -> None:
    """Check that each row after the first frame has one estimate, bit-equal to that of the filter without Spark."""
    rows, out = pipeline.folder / "all-rows.parquet", pipeline.folder / "all-filtered.parquet"
    pd.concat(frames).to_parquet(rows, index=False)
    offline.run(pipeline.settings, pipeline.name, str(rows), str(out))
    expected: Any = pd.read_parquet(out).rename(columns={"id": "key", "at": "event_time"})
    found: Any = pd.DataFrame(estimates)
    for some in (expected, found):
        some["event_time"] = some["event_time"].dt.tz_localize(None)
    compared = ("key", "event_time", "mean", "covariance", "log_likelihood", "nis")
    assert_bit_equal(
        ordered(found.astype({"key": str})),
        ordered(since(expected, frames[1]).astype({"key": str})),
        compared,
    )


def reflected(pipeline: Pipeline, snapshot: str) -> dict[str, int]:
    """Return the number of rows in the state of each key in a snapshot."""
    rows = verified_rows.read_rows(pipeline.warehouse, snapshot, pipeline.name).select("key", "state_index")
    return {str(row["key"]): row["state_index"] for row in rows.collect()}


def landed(pipeline: Pipeline) -> dict[str, int]:
    """Return the number of landed rows of each key, for a model with one key column."""
    rows = pipeline.warehouse.read(measurements(pipeline.name)).toPandas()
    return {str(key): int(count) for key, count in rows.groupby(pipeline.spec.key[0]).size().items()}


def since(estimates: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the estimates from the first of these rows on."""
    later = estimates["event_time"] >= rows["at"].min().tz_localize(None)
    return estimates.loc[later].reset_index(drop=True)


def random_walk_spec(name: str = "walk", **changes: Any) -> dict[str, Any]:
    """Return a small model with two measurements, irregular time and correlated noise."""
    return {
        "name": name,
        "version": 1,
        "key": ["id"],
        "time": "at",
        "time_unit": "minute",
        "measurement": ["a", "b"],
        "states": ["level", "slope"],
        "process": {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01},
        "observation": {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[1.0, 0.3], [0.3, 2.0]]},
        "initial": {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]},
        "stream": {"max_files_per_batch": 1, "partitions": 2, "keys_per_block": 8},
        **changes,
    }


def random_rows(
    days: int, keys: int = 60, rows: int = 150, seed: int = 0, text: bool = False
) -> list[pd.DataFrame]:
    """Return a frame a day: random gaps, missing components, equal times, keys that appear and disappear."""
    rng = np.random.default_rng(seed)
    frames = []
    for day in range(days):
        alive = np.arange(day * keys // (2 * days), keys // 2 + day * keys // (2 * days) + 1)
        number = rng.choice(alive, rows)
        minute = np.sort(rng.integers(0, 24 * 60, rows))
        values = rng.normal(size=(2, rows)) + number / 10
        values[rng.random((2, rows)) < 0.15] = np.nan
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(day * 24 * 60 + minute, "min")
        ids = np.array([f"key {n} ü" for n in number]) if text else number
        frames.append(pd.DataFrame({"id": ids, "at": at.as_unit("us"), "a": values[0], "b": values[1]}))
    return frames
