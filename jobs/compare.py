"""Compare two generations on the rows that both have estimated: which predicts better, and knows its own error better.

For each key: the predictive log-likelihood of both, a row, and their NIS, whose average is the number of measured
components where a filter is right about its uncertainty. Two generations of one model must agree to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.generations import Generation
from jobs.spec import ModelSpec
from jobs.tables import Warehouse, estimates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Comparison(NamedTuple):
    """What the comparison found: numbers, the verdict (is the new one no worse?), and why."""

    numbers: dict[str, Any]
    good: bool
    reasons: list[str]


def compare(
    warehouse: Warehouse, spec: ModelSpec, old: Generation, new: Generation, first_batch: int
) -> Comparison:
    """Compare a new generation with the old one on the rows behind the old one's micro-batch `first_batch - 1`.

    Args:
        warehouse: where.
        spec: the new version's, with its thresholds (`upgrade`).
        old: the live generation.
        new: the shadow.
        first_batch: of the old generation, whose rows the new one has too.
    """
    table = warehouse.read(estimates(spec.name))
    keys = per_key(table, old.generation, new.generation, first_batch)
    numbers = totals(keys)
    same = old.fingerprint == new.fingerprint
    if same:
        numbers["unequal_rows"] = unequal(table, old.generation, new.generation, first_batch)
    return judged(numbers, spec, same)


def per_key(table: DataFrame, old: str, new: str, first_batch: int) -> DataFrame:
    """Return, for each key, rows, log-likelihood and NIS sums of both on the rows that both have."""
    from pyspark.sql import functions as F

    def of(generation: str, letter: str, behind: int) -> DataFrame:
        mine = table.filter((F.col("generation") == generation) & (F.col("batch_id") >= behind))
        return mine.groupBy("key", "event_time").agg(
            F.count("*").alias(f"{letter}_rows"),
            F.sum(F.nanvl("log_likelihood", F.lit(0.0))).alias(
                f"{letter}_ll"
            ),  # of a flagged row there is none
            F.sum("nis").alias(f"{letter}_nis"),
            F.count("nis").alias(f"{letter}_judged"),
            F.count("flags").alias(f"{letter}_flagged"),
        )

    both = of(old, "a", first_batch).join(of(new, "b", 0), ["key", "event_time"], "inner")
    both = both.filter(F.col("a_rows") == F.col("b_rows"))
    names = [f"{letter}_{name}" for letter in "ab" for name in ("rows", "ll", "nis", "judged", "flagged")]
    return both.groupBy("key").agg(*(F.sum(name).alias(name) for name in names))


def totals(keys: DataFrame) -> dict[str, Any]:
    """Return the sums over all keys, and in what share of the keys the new one predicts better."""
    from pyspark.sql import functions as F

    gain = F.col("b_ll") - F.col("a_ll")
    row = keys.agg(
        F.count("*").alias("keys"),
        F.sum("a_rows").alias("rows"),
        *(F.sum(name).alias(name) for name in ("a_ll", "b_ll", "a_nis", "b_nis", "a_judged", "b_judged")),
        *(F.sum(name).alias(name) for name in ("a_flagged", "b_flagged")),
        F.sum(F.when(gain > 0, 1).otherwise(0)).alias("better"),
        F.sum(F.when(gain < 0, 1).otherwise(0)).alias("worse"),
    ).first()
    assert row is not None
    rows = int(row["rows"] or 0)

    def average(name: str, by: str) -> float | None:
        return float(row[name]) / row[by] if row[by] else None

    return {
        "keys": int(row["keys"]),
        "rows": rows,
        "log_likelihood_a_row": {"old": average("a_ll", "rows"), "new": average("b_ll", "rows")},
        "nis": {"old": average("a_nis", "a_judged"), "new": average("b_nis", "b_judged")},
        "flagged": {"old": int(row["a_flagged"] or 0), "new": int(row["b_flagged"] or 0)},
        "keys_better": int(row["better"] or 0),
        "keys_worse": int(row["worse"] or 0),
    }


def unequal(table: DataFrame, old: str, new: str, first_batch: int) -> int:
    """Return how many rows of two generations of one model are not the same to the last bit."""
    from pyspark.sql import functions as F

    columns = ["key", "event_time", "mean", "covariance", "log_likelihood", "nis", "flags"]
    behind = (F.col("generation") == old) & (F.col("batch_id") >= first_batch)
    mine = table.filter(behind).select(*columns)
    theirs = table.filter(F.col("generation") == new).select(*columns)
    times = theirs.select("key", "event_time").distinct()
    return mine.join(times, ["key", "event_time"], "left_semi").select(*columns).exceptAll(theirs).count()


def judged(numbers: dict[str, Any], spec: ModelSpec, same: bool) -> Comparison:
    """Return the verdict on the numbers, by the thresholds of the spec."""
    limits = spec.upgrade
    if same:
        differ = numbers["unequal_rows"]
        reasons = [f"it is the same model, and {differ:,} rows differ"] if differ else []
        return Comparison(numbers, not reasons, reasons)
    reasons: list[str] = []
    if numbers["rows"] < limits.rows:
        reasons.append(f"only {numbers['rows']:,} rows to compare, of {limits.rows:,} wanted (upgrade.rows)")
    if numbers["rows"]:
        loss = numbers["log_likelihood_a_row"]["old"] - numbers["log_likelihood_a_row"]["new"]
        if not loss <= limits.loss:
            reasons.append(
                f"it predicts worse: {loss:.4g} less log-likelihood a row, {limits.loss:g} allowed (upgrade.loss)"
            )
        if numbers["flagged"]["new"] > numbers["flagged"]["old"]:
            reasons.append(
                f"it flags {numbers['flagged']['new']:,} rows, the old one {numbers['flagged']['old']:,}"
            )
    return Comparison(numbers, not reasons, reasons)
