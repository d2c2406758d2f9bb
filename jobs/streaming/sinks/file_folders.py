"""Publish micro-batches as files in Hive-style folders, `generation=.../batch_id=...`, each row exactly once.

A driver that was frozen may wake up while a later one publishes the same micro-batch, or after that. So no driver
removes or replaces what another one may have published. Each writes into a hidden folder of its own, named by its
epoch, and moves the files from there into the micro-batch's folder. There a file's name consists of its number and of a
mark of the micro-batch's plan: attempts to publish the same rows give the same names, and of each file the first one
stays. This needs no rename of folders, and of a file only that it appears as a whole, as it does in object stores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.roots import local_path
from jobs.spark.hadoop_files import HadoopFiles
from jobs.storage.files import WarehouseFiles, files_of
from jobs.storage.settings import in_s3
from jobs.streaming.sinks.published_batch import JSON_TIME, MicroBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DONE = "_SUCCESS"
_ATTEMPT = re.compile(r"_attempt-(\d+)")
_WRITTEN = re.compile(r"(part-\d+)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(.*)")
"""The name that Spark gives a file: its number, a random id of the write, and the rest."""


def _files(spark: SparkSession, path: str) -> WarehouseFiles:
    """Return the files of a folder in any store that Spark reaches."""
    return files_of(path) if local_path(path) is not None or in_s3(path) else HadoopFiles(spark, path)


@dataclass(frozen=True)
class FileSink:
    """A folder with a subfolder for each micro-batch, which is complete once it has a file `_SUCCESS`."""

    spark: SparkSession
    path: str
    format: str

    @property
    def name(self) -> str:
        return f"files:{self.path}"

    def write(self, rows: DataFrame, batch: MicroBatch) -> None:
        """Write a micro-batch's files, unless another attempt has written them.

        Raises:
            UserError: a file cannot be moved to its place.
        """
        files = _files(self.spark, self.path.rstrip("/"))
        place = f"generation={batch.generation}/batch_id={batch.batch_id}"
        attempt = f"{place}/_attempt-{batch.epoch}"
        # A task's files may appear in this folder at once: nobody reads it.
        writer = rows.drop("generation", "batch_id").write.mode("overwrite").format(self.format)
        writer = writer.option("mapreduce.fileoutputcommitter.algorithm.version", "2")
        if self.format == "json":
            writer = writer.option("timestampFormat", JSON_TIME)
        writer.save(f"{self.path.rstrip('/')}/{attempt}")
        plan = batch.plan()
        _remove_others(files, place, plan)
        for written in files.names(attempt):
            found = _WRITTEN.fullmatch(written)
            if found is not None:
                self._move(files, f"{attempt}/{written}", f"{place}/{found[1]}-{plan}{found[2]}")
        files.write(f"{place}/{_DONE}", b"")
        _remove_attempts(files, place, batch.epoch)

    def _move(self, files: WarehouseFiles, name: str, to: str) -> None:
        """Move a file to its place, unless another attempt's is there, which has the same rows.

        Raises:
            UserError: it cannot be moved.
        """
        if not files.exists(to) and not files.rename(name, to) and not files.exists(to):
            raise UserError(f"{self.path}/{name} cannot be renamed to {self.path}/{to}", RUN_FAILED)


def _remove_others(files: WarehouseFiles, place: str, plan: str) -> None:
    """Remove files of other rows, which no running driver writes.

    They are of a micro-batch of the same number before the warehouse was put back from a backup, or were left behind by
    a killed driver of an earlier release, which wrote in place.
    """
    names = files.names(place)
    of_plan = re.compile(
        rf"part-\d+-{plan}(?![0-9a-f]).*"
    )  # the random id of Spark's own name may begin alike
    others = [name for name in names if name.startswith("part-") and not of_plan.fullmatch(name)]
    if others:
        files.remove(f"{place}/{_DONE}")
    for name in others:
        files.remove(f"{place}/{name}")
    if "_temporary" in names:
        files.remove_tree(f"{place}/_temporary")


def _remove_attempts(files: WarehouseFiles, place: str, epoch: int) -> None:
    """Remove the folders in which this driver and earlier ones have written a micro-batch that is complete now."""
    for name in files.names(place):
        attempt = _ATTEMPT.fullmatch(name)
        if attempt is not None and int(attempt[1]) <= epoch:
            files.remove_tree(f"{place}/{name}")
