"""Run contenders on a work in interleaved rounds, and take the time of each micro-batch from Spark's own progress."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.contenders import Contender
from benchmarks.data import FILES, batch, fill
from benchmarks.work import Work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Measured(NamedTuple):
    """What the measured micro-batches of one contender were.

    seconds: of each; rows: of each; state_bytes: of its state store's files after the last, None where unknown.
    """

    seconds: list[float]
    rows: int
    state_bytes: int | None

    @property
    def rates(self) -> list[float]:
        """Return rows a second of each micro-batch."""
        return [self.rows / one for one in self.seconds]


class Lane:
    """One contender on one work: its input, its checkpoint and its times."""

    def __init__(self, spark: SparkSession, work: Work, contender: Contender, folder: Path) -> None:
        self.spark, self.work, self.contender = spark, work, contender
        self.source, self.checkpoint = folder / "source", folder / "checkpoint"
        self.source.mkdir(parents=True)
        self.seconds: list[float] = []
        self.state_bytes: int | None = None

    def run(self, files: Sequence[Path], measured: int) -> None:
        """Take in these files, and keep the times of the last `measured` micro-batches."""
        for file in files:
            os.link(file, self.source / file.name)
        schema = self.spark.read.parquet(str(self.source)).schema
        reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES)
        estimates = self.contender.build(reader.parquet(str(self.source)), self.work)
        mode = "update" if self.contender.name == "floor" else "append"
        writer = estimates.writeStream.format("noop").outputMode(mode).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.checkpoint)).start()
        query.awaitTermination()
        problem = query.exception()
        if problem is not None:
            raise problem
        progress = [one for one in query.recentProgress if one["numInputRows"]]
        if len(progress) != len(files) // FILES:
            raise RuntimeError(
                f"{self.contender.name}: {len(files) // FILES} micro-batches, {len(progress)} reported"
            )
        if measured:
            self.seconds += [one["durationMs"]["triggerExecution"] / 1000 for one in progress[-measured:]]
        for operator in progress[-1]["stateOperators"]:
            self.state_bytes = dict(operator["customMetrics"]).get("rocksdbSstFileSize")


def compare(
    spark: SparkSession,
    work: Work,
    contenders: Sequence[tuple[Contender, int]],
    rounds: int,
    folder: Path,
    told: str = "",
) -> dict[str, Measured]:
    """Run a work by several contenders in turn.

    Each makes its state first, from one row a key. A round of a contender is a start from its checkpoint, a
    micro-batch that is not measured (it loads the state and warms up), and those that are.

    Args:
        spark: the session.
        work: what is done.
        contenders: each with the number of its measured micro-batches a round.
        rounds: how many.
        folder: for data and checkpoints; emptied at the end.
        told: nothing more than a name for the progress line.

    Returns:
        What was measured, by contender.
    """
    data = folder / "data"
    fill(work, data)
    lanes = [
        (Lane(spark, work, contender, folder / contender.name), measured)
        for contender, measured in contenders
    ]
    numbers = {contender.name: 1 for contender, _ in contenders}
    made: set[int] = set()
    for lane, _ in lanes:
        lane.run(_files(data, 0), 0)
    for _ in range(rounds):
        for lane, measured in lanes:
            first = numbers[lane.contender.name]
            numbers[lane.contender.name] = first + 1 + measured
            wanted = range(first, first + 1 + measured)
            for number in wanted:
                if number not in made:
                    batch(work, data, number)
                    made.add(number)
            lane.run([file for number in wanted for file in _files(data, number)], measured)
    shutil.rmtree(folder)
    return {
        lane.contender.name: Measured(lane.seconds, work.batch_rows, lane.state_bytes) for lane, _ in lanes
    }


def _files(data: Path, number: int) -> list[Path]:
    return sorted(data.glob(f"{number:05d}-*.parquet"))
