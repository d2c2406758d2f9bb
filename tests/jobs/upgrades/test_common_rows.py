"""The sums of the rows that two generations have both estimated, against those by pandas; the texts of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import build_key_kind, build_key_text
from jobs.storage.queries import open_queries
from jobs.storage.tables import LATE_COPIES
from jobs.storage.warehouse import Tables
from jobs.upgrades.common_rows import (
    BOTH,
    PAIRED,
    SUMS,
    build_key_text_sql,
    count_unequal_rows,
    keep_paired_sums,
    open_common_rows,
)
from jobs.upgrades.statistics import judge_all_keys
from tests.jobs.support.pipeline import random_walk_spec

Frame = Any
"""A pandas DataFrame."""
NOTHING: Any = None
OLD, NEW = "walk-g0001", "walk-g0002"
FIRST = 2
"""The old generation's rows of its micro-batches before are not compared."""
START = pd.Timestamp("2026-01-01", tz="UTC")
ARRAYS = ("mean", "covariance", "innovation")


def estimated(rng: np.random.Generator, generation: str, count: int = 900) -> Frame:
    """Return estimates of few keys and times, so that several rows have the same; the last batches are corrections."""
    batch = np.sort(rng.integers(0, 8, count))
    white = np.where(rng.random((count, 2)) < 0.2, np.nan, rng.normal(size=(count, 2)))
    some = rng.random(count)
    return pd.DataFrame(
        {
            "key": rng.choice(["1", "2", "3"], count),
            "event_time": (START + pd.to_timedelta(rng.integers(0, 150, count), unit="min")).as_unit("us"),
            "mean": list(rng.normal(size=(count, 2))),
            "covariance": list(rng.normal(size=(count, 4))),
            "log_likelihood": np.where(some < 0.05, np.nan, rng.normal(size=count)),
            "nis": np.where(some > 0.9, np.nan, rng.chisquare(2, count)),
            "flags": np.where(some < 0.1, "outlier", NOTHING),
            "innovation": [None if value > 0.95 else one for one, value in zip(white, some, strict=True)],
            "batch_id": batch,
            "correction": (batch > 5) & (rng.random(count) < 0.5),
            "generation": generation,
        }
    )


def measured(rng: np.random.Generator, estimates: Frame) -> Frame:
    """Return measurements at the times of estimates; of some a copy too."""
    rows = counted(estimates[estimates["batch_id"] >= FIRST])
    values = np.where(rng.random((2, len(rows))) < 0.2, np.nan, 1.0)
    landed = pd.DataFrame(
        {
            "id": rows["key"].astype(int).to_numpy(),
            "at": rows["event_time"].array,
            "a": values[0],
            "b": values[1],
            "_origin": None,
        }
    )
    copies = landed.iloc[::9].assign(_origin="late:walk-g0001:3:r1")
    return pd.concat([landed, copies], ignore_index=True)


def write(root: Path, table: str, frame: Frame) -> None:
    columns = {
        name: pa.array(frame[name], from_pandas=name not in ("log_likelihood", *ARRAYS)) for name in frame
    }
    half = len(frame) // 2
    for rows in (pa.table(columns).slice(0, half), pa.table(columns).slice(half)):
        write_deltalake(str(root / table), rows, mode="append")


def counted(frame: Frame) -> Frame:
    """Return the rows that count, of corrected ones those of the last micro-batch."""
    same = frame.groupby(["generation", "key", "event_time"])
    last = frame["batch_id"] == same["batch_id"].transform("max")
    return frame[last | ~same["correction"].transform("max")]


def sums_of(frame: Frame) -> Frame:
    white = [np.full(0, np.nan) if one is None else one[~np.isnan(one)] for one in frame["innovation"]]
    known = frame["innovation"].notna()
    good = frame["flags"].isna()
    rows = pd.DataFrame(
        {
            "key": frame["key"],
            "micros": frame["event_time"].astype("int64"),
            "rows": 1.0,
            "ll": frame["log_likelihood"].fillna(0.0),
            "scored": frame["log_likelihood"].notna().astype(float),
            "nis": frame["nis"].where(good),
            "judged": (good & frame["nis"].notna()).astype(float),
            "flagged": (~good).astype(float),
            "innovation": np.where(known, [one.sum() for one in white], np.nan),
            "components": np.where(known, [float(len(one)) for one in white], np.nan),
        }
    )
    return rows.groupby(["key", "micros"]).sum(min_count=1)


def expected_sums(old: Frame, new: Frame, landed: Frame) -> Frame:
    a, b = sums_of(counted(old[old["batch_id"] >= FIRST])), sums_of(counted(new))
    both: Any = a.add_prefix("a_").join(b.add_prefix("b_"), how="inner")
    both = both[both["a_rows"] == both["b_rows"]]
    scored = (both["a_scored"] == both["a_rows"]) & (both["b_scored"] == both["b_rows"])
    both["gained"] = (both["b_ll"] - both["a_ll"]).where(scored, 0.0)
    both["scored"] = both["a_rows"].where(scored, 0.0)
    seen = landed[["a", "b"]].notna().sum(axis=1)
    there = pd.DataFrame(
        {"key": landed["id"].astype(str), "micros": landed["at"].astype("int64"), "seen": seen, "landed": 1.0}
    )[(seen > 0) & landed["_origin"].isna()]
    both = both.join(there.groupby(["key", "micros"]).sum(), how="left")
    for letter in "ab":
        whole = both[f"{letter}_judged"] == both["landed"]
        both[f"{letter}_degrees"] = both["seen"].where(whole, 0.0)
        both[f"{letter}_nis"] = both[f"{letter}_nis"].where(whole)
    return both[BOTH].sort_index()


def test_the_sums_are_those_of_the_rows_that_count(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    old, new = estimated(rng, OLD), estimated(rng, NEW)
    landed = measured(rng, old)
    write(tmp_path, "estimates/walk", pd.concat([old, new, estimated(rng, "walk-g0003")]))
    write(tmp_path, "measurements/walk", landed)
    tables, spec = Tables(str(tmp_path)), ModelSpec.model_validate(random_walk_spec())
    tables.create("late_copies", LATE_COPIES)
    expected = expected_sums(old, new, landed)
    assert len(expected) > 50 and expected["b_degrees"].sum() > 0 and (expected["scored"] == 0).any()
    with open_queries(str(tmp_path)) as queries:
        keep_paired_sums(tables, spec, open_common_rows(queries, "walk", OLD, NEW, FIRST))
        found = queries.run(f"SELECT * FROM {PAIRED}").to_pandas().set_index(["key", "micros"]).sort_index()
        np.testing.assert_array_equal(found.index.to_list(), expected.index.to_list())
        for name in BOTH:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-12, err_msg=name)
        keys = judge_all_keys(queries, 2)
    assert len(keys.sample) == 2 and keys.numbers["keys"] == 3
    assert keys.numbers["rows"] == expected["a_rows"].sum()
    by_key = expected.groupby("key").sum().loc[keys.sample]
    for name in SUMS:
        np.testing.assert_allclose(keys.sums[f"b_{name}"], by_key[f"b_{name}"], rtol=1e-12, err_msg=name)


def test_rows_that_differ_in_one_bit_are_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    old = estimated(rng, OLD, 200).assign(correction=False)
    new = old[old["batch_id"] >= FIRST].assign(generation=NEW).sample(frac=1.0, random_state=1)
    changed = new.copy()
    changed["mean"] = [
        np.nextafter(one, np.inf) if number in (3, 70) else one for number, one in enumerate(new["mean"])
    ]
    for number, (side, unequal) in enumerate(
        ((new, 0), (changed, 2), (new.iloc[5:], None), (new.iloc[:0], 0))
    ):
        root = tmp_path / str(number)
        write(root, "estimates/walk", pd.concat([old, side]))
        with open_queries(str(root)) as queries:
            found = count_unequal_rows(open_common_rows(queries, "walk", OLD, NEW, FIRST))
        if (
            unequal is None
        ):  # of rows at one time all but one may be missing; a time without rows is not compared
            left = pd.MultiIndex.from_frame(side[["key", "event_time"]])
            gone = pd.MultiIndex.from_frame(new.iloc[:5][["key", "event_time"]])
            unequal = gone.isin(left).sum()
        assert found == unequal


def test_without_estimates_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with open_queries(str(tmp_path)) as queries:
        rows = open_common_rows(queries, "walk", OLD, NEW, FIRST)
        keep_paired_sums(Tables(str(tmp_path)), ModelSpec.model_validate(random_walk_spec()), rows)
        assert judge_all_keys(queries, 5).numbers["rows"] == count_unequal_rows(rows) == 0


@pytest.mark.spark
def test_the_texts_of_keys_are_those_of_spark(tmp_path: Path, spark: Any) -> None:
    texts = ["", "é ü", "a,b", '"\\/', "\b\f\n\r\t\x01\x1f\x7f", "'", None]
    rows = pa.table({"k": range(len(texts)), "my col": texts})
    write_deltalake(str(tmp_path / "t"), rows)
    frame = spark.read.parquet(str(tmp_path / "t"))
    with open_queries(str(tmp_path)) as queries:
        queries.add("t", "t")
        for key in (["k"], ["my col"], ["k", "my col"], []):
            found = queries.run(f"SELECT {build_key_text_sql(key)} AS text FROM t ORDER BY k")[
                "text"
            ].to_pylist()
            wanted = (
                frame.select("k", build_key_text(build_key_kind(key, frame.schema)).alias("text"))
                .orderBy("k")
                .collect()
            )
            assert found == [row["text"] for row in wanted]
