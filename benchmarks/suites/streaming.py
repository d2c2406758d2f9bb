"""Run contenders on a work in interleaved rounds, and read the time of each micro-batch from Spark's own progress."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.contenders.contenders import Contender
from benchmarks.workloads.data import FILES, batch, fill
from benchmarks.workloads.work import Work
from jobs.spark.conf import set_codegen_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Measured(NamedTuple):
    """The measured micro-batches of one contender.

    seconds, rows: of each micro-batch; state_bytes: bytes of state changes that each wrote to the checkpoint.
    """

    seconds: list[float]
    rows: int
    state_bytes: list[int]

    @property
    def rates(self) -> list[float]:
        """Return rows a second of each micro-batch."""
        return [self.rows / one for one in self.seconds]


class Share(NamedTuple):
    """A contender's share of a comparison.

    measured: micro-batches a round that count; rounds: maximum number, None for all; warm: each round begins with a
    micro-batch that does not count (it loads the state). Slow contenders skip it: the effect is below a hundredth of
    their micro-batch. store: URI of a folder for checkpoint and table, None for a folder beside the input.
    """

    contender: Contender
    measured: int
    rounds: int | None = None
    warm: bool = True
    store: str | None = None


class Lane:
    """One contender on one work: its input, its checkpoint and its times."""

    def __init__(self, spark: SparkSession, work: Work, share: Share, folder: Path) -> None:
        self.spark, self.work, self.contender = spark, work, share.contender
        self.source, self.store = folder / "source", share.store
        root = share.store or str(folder)
        self.checkpoint, self.table = f"{root}/checkpoint", f"{root}/estimates"
        self.source.mkdir(parents=True)
        self.seconds: list[float] = []
        self.state_bytes: list[int] = []

    def run(self, files: Sequence[Path], measured: int) -> None:
        """Process these files, and keep the times of the last `measured` micro-batches."""
        set_codegen_for(self.spark, self.work.batch_rows)  # as the stream's own sink does
        for file in files:
            os.link(file, self.source / file.name)
        schema = self.spark.read.parquet(str(self.source)).schema
        reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", FILES)
        estimates = self.contender.build(reader.parquet(str(self.source)), self.work)
        mode = "update" if self.contender.name == "floor" else "append"
        writer = estimates.writeStream.outputMode(mode).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", self.checkpoint)
        if self.contender.into is not None:
            query = writer.foreachBatch(
                self.contender.into(self.spark, self.work, self.source, self.table)
            ).start()
        elif self.work.sink == "noop":
            query = writer.format("noop").start()
        else:
            query = writer.format(self.work.sink).start(self.table)
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
            self.state_bytes += [self._changed(int(one["batchId"])) for one in progress[-measured:]]

    def _changed(self, batch_id: int) -> int:
        """Return the bytes of a micro-batch's state changes in all partitions; 0 if they are in a store."""
        if self.store is not None:
            return 0
        changes = Path(self.checkpoint).glob(f"state/*/*/{batch_id + 1}.changelog")
        return sum(one.stat().st_size for one in changes)


def compare(
    spark: SparkSession,
    work: Work,
    shares: Sequence[Share],
    rounds: int,
    folder: Path,
) -> dict[str, Measured]:
    """Run a work by several contenders in turn.

    Each first makes its state, from one row a key. A round of a contender is a start from its checkpoint, an unmeasured
    micro-batch (it loads the state and warms up), and the measured ones.

    Args:
        spark: the session.
        work: the micro-batches to run.
        shares: the contenders and their shares.
        rounds: their number.
        folder: for data and checkpoints; emptied at the end.

    Returns:
        The measurements, by contender.
    """
    data = folder / "data"
    fill(work, data)
    lanes = [(Lane(spark, work, share, folder / share.contender.name), share) for share in shares]
    numbers = {share.contender.name: 1 for share in shares}
    made: set[int] = set()
    for lane, _ in lanes:
        lane.run(_files(data, 0), 0)
    for round_ in range(rounds):
        for lane, share in lanes:
            if share.rounds is not None and round_ >= share.rounds:
                continue
            first = numbers[lane.contender.name]
            wanted = range(first, first + share.measured + share.warm)
            numbers[lane.contender.name] = wanted.stop
            for number in wanted:
                if number not in made:
                    batch(work, data, number)
                    made.add(number)
            lane.run([file for number in wanted for file in _files(data, number)], share.measured)
    shutil.rmtree(folder)
    return {
        lane.contender.name: Measured(lane.seconds, work.batch_rows, lane.state_bytes) for lane, _ in lanes
    }


def _files(data: Path, number: int) -> list[Path]:
    return sorted(data.glob(f"{number:05d}-*.parquet"))
