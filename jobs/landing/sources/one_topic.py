"""Land one topic in the measurements table, from which `pretrain` reads what the stream reads from the topic itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from jobs.landing.messages import key_types
from jobs.landing.sources.landing import Reader, SourceLanding, run
from jobs.landing.target_table import prepare
from jobs.landing.topic_start import (
    TopicStart,
    accept_loss,
    landing_detail,
    source_of,
    start_of,
    way_out,
)
from jobs.landing.topics import messages_after
from jobs.landing.written_pieces import ORIGIN, SOURCE
from jobs.spark.kafka import TopicWatch
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.measurements_table import OFFSET, PARTITION, TOPIC, TOPIC_ID
from jobs.storage.positions import offsets_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class TopicReader(Reader):
    """Reads a topic from where it has landed up to."""

    unit = "message"

    def __init__(self, warehouse: Warehouse, spec: ModelSpec) -> None:
        """Open the topic at its position; the first time, record it.

        Raises:
            UserError: there is no such topic, or the brokers do not answer.
        """
        self._warehouse, self._spec = warehouse, spec
        types = key_types(source_of(spec), spec.naming_columns)
        self._types = prepare(warehouse, spec, types, messages=True)
        self._start: TopicStart = start_of(warehouse, spec)
        self.checkpoint = Checkpoint(warehouse, self._start.checkpoint)

    def rows(self) -> DataFrame:
        """Return the messages after the position as a stream of checked rows."""
        reader = f"`ingest --model {self._spec.name}`"
        return messages_after(
            self._warehouse, self._spec, self.checkpoint, self._start.position, self._types, reader
        )

    def reached(self, batch: int) -> dict[str, Any]:
        """Return the position at the end of a micro-batch."""
        start = self._start
        return landing_detail(start, offsets_of(self.checkpoint.position(batch, start.position)))

    def check(self) -> None:
        """Check that the topic is the one that was read before."""
        topic = source_of(self._spec).topic
        with TopicWatch(self._warehouse.spark, topic, self._start.topic_id, way_out(self._spec)) as watch:
            watch.check()

    def placed(self, rows: DataFrame) -> DataFrame:
        """Return rows with the places of their messages."""
        topic = source_of(self._spec).topic
        source = F.lit(f"kafka:{topic}")
        return rows.withColumns(
            {
                ORIGIN: F.concat_ws("/", source, PARTITION, OFFSET),
                SOURCE: source,
                TOPIC: F.lit(topic),
                TOPIC_ID: F.lit(self._start.topic_id).cast("string"),
            }
        )

    def place(self) -> tuple[str, dict[str, Any]]:
        """Return up to where the topic has landed."""
        offsets = sorted(start_of(self._warehouse, self._spec).offsets.items())
        text = ", ".join(f"{number}:{offset}" for number, offset in offsets)
        found = {str(number): offset for number, offset in offsets}
        return f", up to {text}", {"topic": source_of(self._spec).topic, "offsets": found}


def open_topic(warehouse: Warehouse, spec: ModelSpec, lossy: bool) -> tuple[Reader, str | None]:
    """Return the reader of a topic; lossy: continue with what it has now (`topic_start.accept_loss`).

    Raises:
        UserError: messages that have not landed are no longer in the topic, or the brokers do not answer.
    """
    note = accept_loss(warehouse, spec) if lossy else None
    return TopicReader(warehouse, spec), note


def land_present(
    warehouse: Warehouse, spec: ModelSpec, on_progress: Callable[[SourceLanding], None] = lambda landing: None
) -> None:
    """Land what a topic has now, within another command.

    Raises:
        UserError: as of `open_topic`.
    """
    run(SourceLanding(warehouse, spec, TopicReader(warehouse, spec), on_progress), None, threading.Event())
