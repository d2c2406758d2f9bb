"""The table of forecasts: a run's rows are written in one commit, which replaces the rows of the same run.

A reader sees all rows of a run or none, whatever is killed: Delta's commit is the one moment in which the files that a
run has written become part of the table, and those of its former attempt leave it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from jobs.core.errors import RUN_FAILED, UserError, raised_in_python
from jobs.spark.warehouse import Warehouse, ddl_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RUN = "run"
"""The partition column: the id of the run that made a forecast."""
_OURS = "jobs.core.errors.UserError: "


class Written(NamedTuple):
    """The rows of a run: how many, of how many keys, flagged ones; the newest row of any key (microseconds)."""

    forecasts: int
    keys: int
    flagged: int
    newest: int | None


def replace_run(home: Warehouse, table: str, run: str, rows: DataFrame, facts: str) -> Written:
    """Write the rows of a run in one commit, in place of the rows that the table has of it.

    Args:
        home: where the table is.
        table: its name; it is made if need be.
        run: id of the run.
        rows: of the run.
        facts: of the run, as JSON: the metadata of the commit.

    Raises:
        UserError: a worker has found a mistake in what was given, or the table is another one.
    """
    marked = rows.select(F.lit(run).alias(RUN), *rows.columns)
    home.create(table, ddl_of(marked.schema), (RUN,))
    if RUN not in home.read(table).columns:
        raise UserError(f"--output {home.path(table)}: is a table of something else; give another one")
    try:
        home.replace(marked, table, [[(RUN, "=", run)]], facts)
    except (PySparkException, Py4JJavaError) as error:  # some jobs that fail raise the latter
        said = raised_in_python(error)
        if _OURS in str(error):
            raise UserError(said) from error
        raise UserError(f"the forecasts failed: {said}", RUN_FAILED) from error
    return _counted(home.read(table).filter(F.col(RUN) == run))


def _counted(rows: DataFrame) -> Written:
    first = F.col("step") == 1
    row: Any = rows.agg(
        F.count("*").alias("forecasts"),
        F.count_if(first).alias("keys"),
        F.count("flag").alias("flagged"),
        F.max(F.unix_micros("made_at")).alias("newest"),
    ).first()
    return Written(row["forecasts"], row["keys"], row["flagged"], row["newest"])
