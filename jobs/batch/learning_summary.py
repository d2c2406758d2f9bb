"""Summarize the learning of a snapshot: the outcomes of the searches, the worst fits, and whether the model fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F

from jobs.core.report import format_count
from jobs.snapshots import learned_rows
from jobs.snapshots.learned_rows import GROUP, KEY, POOLED, POPULATION
from jobs.state.encoding.keys import ALL_ROWS, format_key
from kalman.learning.key_fits import FitOutcome

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from jobs.snapshots.manifests import Manifest
    from jobs.spark.warehouse import Warehouse

WORST = 5
"""The maximum number of keys or groups that a summary names."""
NIS_OFF = 0.3
"""The distance of the mean NIS from 1 that counts as far, if it also exceeds four standard errors of the mean."""
DEPENDENT = 0.001
"""The p-value of Ljung and Box below which innovations are dependent; with a right model, one key in a thousand is."""
MANY = 0.05
"""The summary warns if the model does not fit at least this share of keys."""
TOLD = {
    "converged": "converged",
    "at_bound": "at a bound",
    "too_few_rows": "with too few rows of their own",
    "failed": "failed",
}
"""Words for the outcomes, by their names in the table."""


class Summary(NamedTuple):
    """A summary for keys, for groups, or for all keys together (`of`): numbers by outcome, worst fits, and misfits.

    judged: number of keys or groups whose fit is known.
    far: the number whose mean NIS is far from 1.
    dependent: the number with autocorrelated innovations.
    """

    of: str
    outcomes: dict[str, int]
    worst: list[dict[str, Any]]
    judged: int
    far: int
    dependent: int

    @property
    def total(self) -> int:
        """Return the number of keys or groups."""
        return sum(self.outcomes.values())

    @property
    def data(self) -> dict[str, Any]:
        """Return the summary as data for JSON."""
        return self._asdict()

    @property
    def lines(self) -> list[str]:
        """Return the summary as lines of text."""
        counts = ", ".join(
            f"{self.outcomes[name]:,} {words}" for name, words in TOLD.items() if self.outcomes.get(name)
        )
        lines = [] if self.of == POOLED else [f"learned for {format_count(self.total, self.of)}: {counts}"]
        named = [
            f"  {format_key(one['name'])}: {TOLD[one['outcome']]}"
            + (f" ({one['reason']})" if one["reason"] else "")
            + _fit(one)
            for one in self.worst
        ]
        if named and self.of != POOLED:
            lines += [f"the worst {len(named)}:" if len(named) < self.total else "of these:", *named]
        return [*lines, *self._list_warnings()]

    def _list_warnings(self) -> list[str]:
        found: list[str] = []
        whom = ALL_ROWS if self.of == POOLED else None
        for count, what in (
            (self.far, "the mean NIS is far from 1: the noise is not as large as the model says"),
            (self.dependent, "the innovations are autocorrelated: the model leaves structure in the rows"),
        ):
            if count and count >= MANY * self.judged:
                of = whom or f"{count:,} of {format_count(self.judged, self.of)}"
                found.append(
                    f"warning: the model does not fit: of {of} {what} (columns nis and ljung_box of the table learned)"
                )
        return found


def summarize_learning(warehouse: Warehouse, manifest: Manifest) -> Summary | None:
    """Return the summary of a snapshot's learning; None if nothing was learned, or if the snapshot has no record of it.

    Raises:
        UserError: the rows of learned parameters are damaged.
    """
    rows = learned_rows.read_learned_rows(warehouse, manifest)
    if rows is None:
        return None
    rows = rows.filter(F.col("scope") != POPULATION)
    scopes = {row["scope"] for row in rows.select("scope").distinct().collect()}
    of = next(scope for scope in (KEY, GROUP, POOLED) if scope in scopes)
    return _summarize_scope(rows.filter(F.col("scope") == of), of)


def _summarize_scope(rows: DataFrame, of: str) -> Summary:
    values = F.greatest(F.col("rows"), F.lit(1))
    off = F.abs(F.col("nis") - 1.0)
    enough = F.col("rows") >= 10
    far = enough & (off > F.greatest(F.lit(NIS_OFF), 4.0 * F.sqrt(2.0 / values)))
    dependent = enough & (F.col("ljung_box") < DEPENDENT)
    counted = rows.groupBy("outcome").agg(
        F.count("*").alias("n"),
        _count_where(enough & (F.col("nis").isNotNull() | F.col("ljung_box").isNotNull())).alias("judged"),
        _count_where(far).alias("far"),
        _count_where(dependent).alias("dependent"),
    )
    found = {row["outcome"]: row for row in counted.collect()}
    outcomes = {
        outcome.name.lower(): int(found[outcome.name.lower()]["n"]) if outcome.name.lower() in found else 0
        for outcome in FitOutcome
    }
    sums = {name: sum(int(row[name]) for row in found.values()) for name in ("judged", "far", "dependent")}
    return Summary(of, outcomes, _select_worst(rows, of, far | dependent), **sums)


def _count_where(condition: Column) -> Column:
    return F.sum(F.when(condition, 1).otherwise(0))


def _select_worst(rows: DataFrame, of: str, misfit: Column) -> list[dict[str, Any]]:
    """Return the worst fits: first failed ones, then misfits, then those at a bound, then those with too few rows."""
    misfit = F.coalesce(misfit, F.lit(False))
    rank = (
        F.when(F.col("outcome") == "failed", 0)
        .when(misfit, 1)
        .when(F.col("outcome") == "at_bound", 2)
        .when(F.col("outcome") == "too_few_rows", 3)
    )
    name = {KEY: F.col("key"), GROUP: F.col("key_group"), POOLED: F.lit("all keys")}[of]
    away = F.abs(F.log(F.greatest(F.col("nis"), F.lit(1e-300))))
    worst = (
        rows.filter(rank.isNotNull())
        .select(name.alias("name"), "outcome", "reason", "rows", "log_likelihood_a_row", "nis", "ljung_box")
        .withColumn("_rank", rank)
        .withColumn("_away", F.coalesce(away, F.lit(0.0)))
        .orderBy("_rank", F.desc("_away"), "name")
        .drop("_rank", "_away")
        .limit(WORST)
    )
    return [row.asDict() for row in worst.collect()]


def _fit(one: dict[str, Any]) -> str:
    parts = [format_count(one["rows"], "row")]
    if one["nis"] is not None:
        parts.append(f"NIS {one['nis']:.3g}")
    if one["ljung_box"] is not None:
        parts.append(f"Ljung-Box {one['ljung_box']:.2g}")
    return "; " + ", ".join(parts)
