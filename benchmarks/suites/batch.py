"""Batch filtering and learning as in pretrain, compared with a shuffle of the same rows by key through Python."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders.contenders import PARTITIONS, limit
from benchmarks.workloads.data import batch, fill
from benchmarks.workloads.work import Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs.batch.batch_filter import Batch
    from jobs.specs.model_spec import ModelSpec

LEARNED = ["level_variance", "slope_variance", "R"]
ITERATIONS = 3
"""Steps of the optimiser in one measured search; the result is rows a second of its evaluations."""
KEY_ROWS = 20
"""Rows of each key that learns its own parameters."""


def compare(
    spark: SparkSession, work: Work, batches: int, rounds: int, folder: Path
) -> dict[str, list[float]]:
    """Return rows a second, by contender, of filtering `batches` micro-batches' rows to each key's latest state. For
    learning, rows a second in an evaluation of the likelihood with its gradient.
    """
    import kalman
    from jobs.batch.batch_filter import Batch, Interval, compute_final_states, pack_buckets
    from jobs.batch.learning import learn_pooled
    from jobs.specs.model_spec import ModelSpec
    from jobs.state.encoding.keys import build_key_kind
    from jobs.state.encoding.rows import build_row_format

    rows = fill(work, folder) + sum(batch(work, folder, number) for number in range(1, batches + 1))
    frame = spark.read.parquet(str(folder))
    spec = work.spec
    kernel = kalman.build(spec.definition(), {})
    fmt = build_row_format(spec, build_key_kind(spec.key, frame.schema))
    way = Batch(fmt, spec.unit_us)
    learning = ModelSpec.model_validate(
        {**spec.model_dump(by_alias=True), "learn": {"parameters": LEARNED, "max_iterations": ITERATIONS}}
    )
    assert learning.learn is not None
    search = learning.learn

    def packed() -> DataFrame:
        return pack_buckets(frame, fmt, rows)

    def through(made: DataFrame) -> int:
        made.write.format("noop").mode("overwrite").save()
        return rows

    def learn() -> int:
        said: list[str] = []
        learn_pooled(packed(), learning.definition(), search, way, Interval(), None, said.append)
        return rows * len(said)

    contenders: dict[str, Callable[[], int]] = {
        "ours": lambda: through(compute_final_states(packed(), kernel, way).frame),
        "limit": lambda: through(limit(frame, work)),
        "learning": learn,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS)
    for attempt in range(rounds + 1):  # the first warms up
        for name, run in contenders.items():
            began = time.perf_counter()
            gone = run()
            if attempt:
                rates[name].append(gone / (time.perf_counter() - began))
    shutil.rmtree(folder)
    return rates


def learning(spark: SparkSession, work: Work, folder: Path) -> dict[str, list[float]]:
    """Return rows a second of learning by maximum likelihood and by EM, pooled and each key's own, once each.

    For pooled learning: rows a second in an evaluation. For learning by key: all of `pretrain` with `learn.scope: key`
    except writing, that is the population from a sample of keys, every key with this prior, and the filter; also keys a
    second.
    """
    from jobs.batch.batch_filter import Batch, Interval, pack_buckets
    from jobs.batch.learning import learn_pooled
    from jobs.specs.model_spec import ModelSpec
    from jobs.state.encoding.keys import build_key_kind
    from jobs.state.encoding.rows import build_row_format

    rows = fill(work, folder)
    number = 0
    while rows < KEY_ROWS * work.keys:
        number += 1
        rows += batch(work, folder, number)
    frame = spark.read.parquet(str(folder))
    fmt = build_row_format(work.spec, build_key_kind(work.spec.key, frame.schema))
    way = Batch(fmt, work.spec.unit_us)
    spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS)
    rates: dict[str, list[float]] = {}
    for method in ("mle", "em"):
        given = {"parameters": LEARNED, "max_iterations": ITERATIONS, "method": method}
        spec = ModelSpec.model_validate({**work.spec.model_dump(by_alias=True), "learn": given})
        assert spec.learn is not None
        said: list[str] = []
        began = time.perf_counter()
        learn_pooled(
            pack_buckets(frame, fmt, rows),
            spec.definition(),
            spec.learn,
            way,
            Interval(),
            None,
            said.append,
        )
        rates[f"pooled, {method}"] = [rows * len(said) / (time.perf_counter() - began)]
        given = {"parameters": LEARNED, "scope": "key", "method": method}
        spec = ModelSpec.model_validate({**work.spec.model_dump(by_alias=True), "learn": given})
        began = time.perf_counter()
        _by_key(pack_buckets(frame, fmt, rows), spec, way, work.keys)
        seconds = time.perf_counter() - began
        rates[f"by key, {method}"] = [rows / seconds]
        rates[f"by key, {method}: keys"] = [work.keys / seconds]
    shutil.rmtree(folder)
    return rates


def _by_key(packed: DataFrame, spec: ModelSpec, way: Batch, keys: int) -> None:
    """Learn the parameters of each key and filter its rows with them."""
    import kalman
    from jobs.batch.batch_filter import Interval
    from jobs.batch.key_learning import learn_key_states, learn_populations
    from kalman.learning.learners import learnable

    assert spec.learn is not None
    definition = spec.definition()
    populations = learn_populations(packed, definition, spec.learn, way, Interval(), keys, _silent)
    kernel = kalman.build(definition, populations.parameters(learnable(definition)))
    made = learn_key_states(packed, definition, kernel, way, Interval(), populations)
    made.write.format("noop").mode("overwrite").save()


def _silent(line: str) -> None:
    """Discard a line of progress."""
