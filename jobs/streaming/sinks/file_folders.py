"""Publish micro-batches as files in Hive-style folders, `generation=.../batch_id=...`, each row exactly once.

A frozen driver may wake up while a later driver publishes the same micro-batch, or afterwards. So no driver removes or
replaces files that another driver may have published. Each driver writes into a hidden folder named by its epoch, and
moves the files from there into the micro-batch's folder. The final file name consists of the file's number and a mark
of the micro-batch's plan. Attempts to publish the same rows give the same names, and the first file of a name stays. No
folder is renamed, and a file need only appear as a whole, as it does in object stores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.roots import find_local_path
from jobs.spark.hadoop_files import HadoopFiles
from jobs.storage.files import WarehouseFiles, open_files
from jobs.storage.settings import is_in_s3
from jobs.streaming.sinks.published_batch import JSON_TIME, MicroBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DONE = "_SUCCESS"
_ATTEMPT = re.compile(r"_attempt-(\d+)")
_WRITTEN = re.compile(r"(part-\d+)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(.*)")
"""Spark's name of a file: its number, a random id of the write, and the rest."""


def _open_files(spark: SparkSession, path: str) -> WarehouseFiles:
    """Return the files of a folder in any store that Spark can reach."""
    return (
        open_files(path) if find_local_path(path) is not None or is_in_s3(path) else HadoopFiles(spark, path)
    )


@dataclass(frozen=True)
class FolderSink:
    """Folder with a subfolder for each micro-batch; a subfolder with a file `_SUCCESS` is complete."""

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
        files = _open_files(self.spark, self.path.rstrip("/"))
        place = f"generation={batch.generation}/batch_id={batch.batch_id}"
        attempt = f"{place}/_attempt-{batch.epoch}"
        # A task's files may appear in this folder immediately: nobody reads it.
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
        """Move a file to its final place, unless another attempt's file, with the same rows, is there.

        Raises:
            UserError: the file cannot be moved.
        """
        if not files.exists(to) and not files.rename(name, to) and not files.exists(to):
            raise UserError(f"{self.path}/{name} cannot be renamed to {self.path}/{to}", RUN_FAILED)


def _remove_others(files: WarehouseFiles, place: str, plan: str) -> None:
    """Remove files with other rows, which no running driver writes.

    They come from a micro-batch with the same number before a restore of the warehouse, or from a killed driver of an
    earlier release, which wrote in place.
    """
    names = files.names(place)
    of_plan = re.compile(
        rf"part-\d+-{plan}(?![0-9a-f]).*"
    )  # the random id in Spark's file name may begin with the same characters
    others = [name for name in names if name.startswith("part-") and not of_plan.fullmatch(name)]
    if others:
        files.remove(f"{place}/{_DONE}")
    for name in others:
        files.remove(f"{place}/{name}")
    if "_temporary" in names:
        files.remove_tree(f"{place}/_temporary")


def _remove_attempts(files: WarehouseFiles, place: str, epoch: int) -> None:
    """Remove the folders in which this driver and earlier drivers wrote a micro-batch that is now complete."""
    for name in files.names(place):
        attempt = _ATTEMPT.fullmatch(name)
        if attempt is not None and int(attempt[1]) <= epoch:
            files.remove_tree(f"{place}/{name}")
