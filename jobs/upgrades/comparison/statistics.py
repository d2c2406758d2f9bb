"""Compare two generations on the rows that both have estimated: which predicts better, and which is better calibrated.

Three statistics a key: the predictive log-likelihood; the NIS, whose average is the number of measured components if a
filter's covariances are right, with the chi-square bounds of that average; and the bias, the mean of the normalised
innovations, if the spec writes them (`outputs.innovation`). Two generations of the same model must agree to the last
bit.

Rows of one key and one event time cannot be told apart, so their statistics are summed. Of corrected rows
(`order.kind: replay`) the last estimates count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import functions as F

from jobs.encoding.keys import key_kind, text_of
from jobs.history.table import is_run
from jobs.lineage.generations import Generation, origin
from jobs.lineage.live import latest_corrections
from jobs.lineage.replayed_late_rows import without
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.tables import estimates, estimates_history, measurements
from jobs.upgrades.comparison.paired import Squares
from kalman.evaluation.diagnostics import mean_bounds

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame

SIDES = {"a": "old", "b": "new"}
SUMS = ("rows", "ll", "nis", "degrees", "flagged", "innovation", "components")
"""The sums of each side: rows, log-likelihood, NIS of the rows without flags and their measured components (its degrees
of freedom), flagged rows, normalised innovations and their number."""


def same_model(warehouse: Warehouse, spec: ModelSpec, old: Generation, new: Generation) -> bool:
    """Tell if two generations have the same model and parameters, whatever their version numbers.

    spec: the new one's.
    """
    sides: list[tuple[str, Mapping[str, Any]]] = []
    for one in (old, new):
        if one.snapshot_id:
            made = origin(warehouse, one)
            model, parameters = made.model_spec(), made.parameters
        else:  # a run over history with the values in the spec
            model, parameters = spec, {}
        sides.append((model.model_copy(update={"version": 1}).fingerprint(), parameters))
    return sides[0] == sides[1]


def paired_sums(warehouse: Warehouse, spec: ModelSpec, old: str, new: str, first_batch: int) -> DataFrame:
    """Return the `SUMS` of the old (`a_`) and the new generation (`b_`) by key and event time, `scored` and `gained`.

    Only pairs of the same number of rows are compared. scored: the number of rows, 0 if a row has no log-likelihood on
    one side; gained: the log-likelihood that the new generation has more on them.

    first_batch: the old generation's first micro-batch whose rows the new one has too.
    """
    table = estimates_table(warehouse, spec.name, new)
    a, b = (
        _sums_of(table, generation, letter, first)
        for generation, letter, first in ((old, "a", first_batch), (new, "b", 0))
    )
    both = a.join(b, ["key", "event_time"], "inner").filter(F.col("a_rows") == F.col("b_rows"))
    scored = (F.col("a_scored") == F.col("a_rows")) & (F.col("b_scored") == F.col("b_rows"))
    both = both.withColumns(
        {
            "scored": F.when(scored, F.col("a_rows")).otherwise(F.lit(0)),
            "gained": F.when(scored, F.col("b_ll") - F.col("a_ll")).otherwise(F.lit(0.0)),
        }
    )
    return _with_degrees(warehouse, spec, both)


def estimates_table(warehouse: Warehouse, model: str, new: str) -> DataFrame:
    """Return the estimates of all generations; no rows if none has estimated any yet.

    If the new side is a run over history, its estimates are among them.
    """
    if warehouse.exists(estimates(model)):
        rows = warehouse.read(estimates(model))
        if not is_run(new):
            return rows
        return rows.unionByName(warehouse.read(estimates_history(model)), allowMissingColumns=True)
    return warehouse.spark.createDataFrame(
        [],
        "key string, event_time timestamp, generation string, batch_id bigint, mean array<double>, "
        "covariance array<double>, log_likelihood double, nis double, flags string",
    )


def _sums_of(table: DataFrame, generation: str, letter: str, first_batch: int) -> DataFrame:
    measured = F.lit(None).cast("array<double>")
    if "innovation" in table.columns:
        measured = F.filter("innovation", lambda value: ~F.isnan(value))
    good = F.col("flags").isNull()
    named: dict[str, Column] = {
        "rows": F.count("*"),
        "ll": F.sum(F.nanvl("log_likelihood", F.lit(0.0))),  # a flagged row has none
        "scored": F.count(F.when(~F.isnan("log_likelihood"), F.col("log_likelihood"))),
        "nis": F.sum(F.when(good, F.col("nis"))),
        "judged": F.count(F.when(good, F.col("nis"))),
        "flagged": F.count("flags"),
        "innovation": F.sum(F.aggregate(measured, F.lit(0.0), lambda total, value: total + value)),
        "components": F.sum(F.when(measured.isNotNull(), F.size(measured))),
    }
    rows = latest_corrections(
        table.filter((F.col("generation") == generation) & (F.col("batch_id") >= first_batch))
    )
    return rows.groupBy("key", "event_time").agg(
        *(column.alias(f"{letter}_{name}") for name, column in named.items())
    )


def _with_degrees(warehouse: Warehouse, spec: ModelSpec, both: DataFrame) -> DataFrame:
    """Add the degrees of freedom of NIS, the measured components; with several columns, from the measurements table."""
    if len(spec.measurement) == 1:
        return both.select("*", *(F.col(f"{letter}_judged").alias(f"{letter}_degrees") for letter in SIDES))
    if not warehouse.exists(measurements(spec.name)):  # a topic that has not landed
        return both.select("*", *(F.lit(0).cast("bigint").alias(f"{letter}_degrees") for letter in SIDES))
    table = without(warehouse, warehouse.read(measurements(spec.name)))
    seen = sum((F.col(f"`{name}`").isNotNull().cast("bigint") for name in spec.measurement), F.lit(0))
    landed = (
        table.select(
            text_of(key_kind(spec.key, table.schema)).alias("key"),
            F.col(f"`{spec.time}`").alias("event_time"),
            seen.alias("seen"),
        )
        .filter("seen > 0")
        .groupBy("key", "event_time")
        .agg(F.count("*").alias("landed"), F.sum("seen").alias("seen"))
    )
    joined = both.join(landed, ["key", "event_time"], "left")
    for letter in SIDES:
        # If only some rows of one event time have a NIS, their measurements are not known: none of them counts.
        whole = F.col(f"{letter}_judged") == F.col("landed")
        joined = joined.withColumn(f"{letter}_degrees", F.when(whole, F.col("seen")).otherwise(F.lit(0)))
        joined = joined.withColumn(f"{letter}_nis", F.when(whole, F.col(f"{letter}_nis")))
    return joined


def sums_by_key(both: DataFrame) -> DataFrame:
    """Return the sums of each key, and the columns that `judge_keys` adds.

    gain: log-likelihood per row that the new generation has more; nis_outside: the average NIS is outside its 95 %
    chi-square bounds; bias_outside: the mean innovation is more than 1.96 of its standard deviations from 0. Null where
    no row tells.
    """
    names = [*(f"{letter}_{name}" for letter in SIDES for name in SUMS), "scored", "gained"]
    keys = both.groupBy("key").agg(*(F.sum(name).alias(name) for name in names))
    schema = ", ".join(f"`{name}` double" for name in names)
    added = ", ".join(
        f"`{letter}_{what}` boolean" for letter in SIDES for what in ("nis_outside", "bias_outside")
    )
    numbers = keys.select("key", *(F.col(name).cast("double").alias(name) for name in names))
    return numbers.mapInPandas(_judge_keys, f"key string, {schema}, gain double, {added}")


def _judge_keys(frames: Any) -> Any:
    for frame in frames:
        yield judge_keys(frame)


def judge_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """Add gain, nis_outside and bias_outside to the sums of keys."""
    frame["gain"] = (frame["b_ll"] - frame["a_ll"]) / frame["a_rows"]
    for letter in SIDES:
        degrees = frame[f"{letter}_degrees"].fillna(0.0).to_numpy()
        low, high = mean_bounds(1, np.maximum(degrees, 1.0))
        ratio = frame[f"{letter}_nis"].to_numpy() / np.maximum(degrees, 1.0)
        outside = (ratio < low) | (ratio > high)
        frame[f"{letter}_nis_outside"] = _where_known((degrees > 0) & np.isfinite(ratio), outside)
    for letter in SIDES:
        count = frame[f"{letter}_components"].fillna(0.0).to_numpy()
        total = frame[f"{letter}_innovation"].to_numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            far = np.abs(total) / np.sqrt(count) > 1.959963984540054
        frame[f"{letter}_bias_outside"] = _where_known(count > 0, far)
    names = [f"{letter}_{what}" for letter in SIDES for what in ("nis_outside", "bias_outside")]
    sums = [f"{letter}_{name}" for letter in SIDES for name in SUMS]
    return frame.filter(["key", *sums, "scored", "gained", "gain", *names])


def _where_known(known: Any, value: Any) -> Any:
    """Return booleans (N,), null where they are not known."""
    nullable = value.astype(object)
    nullable[~known] = None
    return nullable


def totals(keys: DataFrame) -> dict[str, Any]:
    """Return the statistics over all keys, the keys predicted better and worse, and the shares outside their bounds.

    scored: what `paired_gain` needs of the keys.
    """
    names = [f"{letter}_{name}" for letter in SIDES for name in SUMS]
    judged_columns = [f"{letter}_{what}" for letter in SIDES for what in ("nis_outside", "bias_outside")]
    scored, gained = F.col("scored"), F.col("gained")
    row = keys.agg(
        F.count("*").alias("keys"),
        F.sum(scored).alias("scored"),
        F.count(F.when(scored > 0, 1)).alias("scored_keys"),
        F.sum(gained * gained).alias("gain2"),
        F.sum(gained * scored).alias("gain_rows"),
        F.sum(scored * scored).alias("rows2"),
        F.sum(scored * scored * scored * scored).alias("rows4"),
        *(F.sum(name).alias(name) for name in names),
        F.sum((F.col("gain") > 0).cast("int")).alias("better"),
        F.sum((F.col("gain") < 0).cast("int")).alias("worse"),
        *(F.avg(F.col(name).cast("int")).alias(name) for name in judged_columns),
    ).first()
    assert row is not None

    def average(name: str, by: str) -> dict[str, float | None]:
        pairs = {letter: (row[f"{letter}_{name}"], row[f"{letter}_{by}"]) for letter in SIDES}
        return {
            SIDES[letter]: float(total) / float(count) if total is not None and count else None
            for letter, (total, count) in pairs.items()
        }

    def sides(name: str) -> dict[str, Any]:
        return {side: row[f"{letter}_{name}"] for letter, side in SIDES.items()}

    return {
        "keys": int(row["keys"]),
        "rows": int(row["a_rows"] or 0),
        "log_likelihood_a_row": average("ll", "rows"),
        "nis_a_component": average("nis", "degrees"),
        "nis_outside": sides("nis_outside"),
        "bias": average("innovation", "components"),
        "bias_outside": sides("bias_outside"),
        "flagged": {side: int(value or 0) for side, value in sides("flagged").items()},
        "keys_better": int(row["better"] or 0),
        "keys_worse": int(row["worse"] or 0),
        "scored": {
            "rows": int(row["scored"] or 0),
            "keys": int(row["scored_keys"]),
            "by_key": Squares(*(float(row[name] or 0.0) for name in Squares._fields)),
            "rows4": float(row["rows4"] or 0.0),
        },
    }


def count_unequal_rows(table: DataFrame, old: str, new: str, first_batch: int) -> int:
    """Return how many rows of two generations of one model differ in any bit."""
    columns = ["key", "event_time", "mean", "covariance", "log_likelihood", "nis", "flags"]
    common = (F.col("generation") == old) & (F.col("batch_id") >= first_batch)
    before = latest_corrections(table.filter(common)).select(*columns)
    after = latest_corrections(table.filter(F.col("generation") == new)).select(*columns)
    times = after.select("key", "event_time").distinct()
    return before.join(times, ["key", "event_time"], "left_semi").select(*columns).exceptAll(after).count()
