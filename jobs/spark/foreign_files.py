"""Read a user's Delta table by Spark, without files outside the table (`jobs.storage.foreign_files`)."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from jobs.spark.warehouse import Warehouse
from jobs.storage.foreign_files import (
    UP,
    explain_foreign_file,
    name_vector_file,
    normalize_folder,
    refuse_foreign_files,
)


def read_own_files(
    home: Warehouse, table: str, where: str, clones: bool, version: int | None = None
) -> DataFrame:
    """Read a version of a user's table, by default the newest.

    Args:
        home: warehouse that contains the table.
        table: name of the table there.
        where: the table in messages.
        clones: whether the table's log may name files outside the table's folder.
        version: version of the table.

    Raises:
        UserError: a file of the version is outside the folder.
    """
    # Without a version, Delta would read a newer one than the checked one if a commit comes between.
    frame = home.read(table, home.latest_version(table) if version is None else version)
    if not clones:
        jvm: Any = home.spark._jvm
        plan: Any = frame._jdf
        files: str = jvm.scala.Predef.genericWrapArray(plan.inputFiles()).mkString("\0")  # in no file's name
        root = home.path(table)
        refuse_foreign_files(
            [*filter(None, files.split("\0")), *_list_vector_files(frame, root)], root, where
        )
    return frame


def _list_vector_files(frame: DataFrame, root: str) -> list[str]:
    """Return the files of the deletion vectors of a version that Spark reads; Delta's frames do not name them."""
    plan: Any = frame._jdf
    version = plan.queryExecution().analyzed().collectLeaves().head().relation().location().getSnapshot()
    if not version.protocol().readerAndWriterFeatureNames().contains("deletionVectors"):
        return []
    vectors = DataFrame(version.allFiles().toDF(), frame.sparkSession).select("deletionVector.*")
    found = vectors.select("storageType", "pathOrInlineDv").filter("storageType != 'i'").distinct().collect()
    return [name_vector_file(kind, name, root) for kind, name in found]


def keep_own_files(rows: DataFrame, root: str, where: str) -> DataFrame:
    """Return the rows of a stream from a user's table, which fails at a row of a file outside the folder `root`.

    Spark compares the names of the files that it reads, so a later commit cannot name others either.
    """
    folder = normalize_folder(root)
    # `try_url_decode` would return a plus sign as a space, which is another folder's name.
    name = F.regexp_replace(F.regexp_replace(F.input_file_name(), "^file:/+", "/"), "[+]", "%2B")
    name = F.try_url_decode(name)
    own = F.coalesce(name.startswith(f"{folder}/") & ~name.rlike(UP), F.lit(False))
    return rows.filter(F.assert_true(own, F.lit(explain_foreign_file(where))).isNull())
