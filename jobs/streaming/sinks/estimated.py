"""The estimates of a micro-batch, as its sinks take them: from packets here, from files in `written_files`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pyspark.sql import functions as F

from jobs.encoding.estimates import EstimateFormat, last_of_keys, unpack_estimates
from jobs.encoding.packet_kinds import OutputPacket
from jobs.encoding.rows import Packer
from jobs.lineage.generations import Generation, marked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Estimated(Protocol):
    """The estimates of a micro-batch."""

    def rows(self) -> DataFrame:
        """Return all rows, marked with generation and micro-batch, in the same partitions and order each time."""
        ...

    def last_rows(self, corrections: bool) -> DataFrame:
        """Return the last estimate, or the last correction, of each run of rows of a key."""
        ...


@dataclass(frozen=True)
class PacketEstimates:
    """The estimates in packets of the operator.

    packets: of the kinds `ESTIMATES` and `CORRECTION`; corrects: rows have a column that marks corrections; around:
    wraps the function that unpacks, for a profile.
    """

    packets: DataFrame
    estimates: EstimateFormat
    generation: Generation
    corrects: bool
    batch_id: int
    around: Callable[[Packer], Packer] = lambda unpack: unpack

    def rows(self) -> DataFrame:
        """Return all rows."""
        rows = self._unpacked(OutputPacket.ESTIMATES)
        if self.corrects:
            again = self._unpacked(OutputPacket.CORRECTION)
            rows = rows.withColumn("correction", F.lit(False))
            rows = rows.unionByName(again.withColumn("correction", F.lit(True)))
        return marked(rows, self.generation, self.batch_id)

    def last_rows(self, corrections: bool) -> DataFrame:
        """Return the last row of each run of rows of a key."""
        some = self._of(OutputPacket.CORRECTION if corrections else OutputPacket.ESTIMATES)
        return unpack_estimates(last_of_keys(some, self.estimates), self.estimates)

    def _unpacked(self, kind: OutputPacket) -> DataFrame:
        return unpack_estimates(self._of(kind), self.estimates, self.batch_id, self.around)

    def _of(self, kind: OutputPacket) -> DataFrame:
        return self.packets.filter(F.col("kind") == kind)
