"""Packets that cross Spark: their kinds, their columns, and the state variables of the stateful operator."""

from __future__ import annotations

from enum import IntEnum, StrEnum, unique

import numpy as np
import pyarrow as pa

MEASURED, STATE_INDEX = "measured", "state_index"
"""Names of two extras of an estimate: the row's measurement, and the number of the key's rows in its state."""
CONTROL = "control"
"""Name of an extra of an estimate: the row's controls and the inputs of its key."""

NEVER = np.iinfo(np.int64).min
"""An event time before all others: the watermark before the first row."""

ROW_PACKETS = "bucket int, payload binary"
"""Columns of the input packets of an operator that takes only rows."""

TYPED_ROW_PACKETS = "bucket int, kind int, payload binary"
"""Columns of the input packets of an operator that takes more than rows; `kind` is a `RowPacket`."""

OUTPUT_PACKETS = "kind int, rows bigint, payload binary"
"""Columns of an operator's output packets; `kind` is an `OutputPacket`."""


@unique
class RowPacket(IntEnum):
    """Kind of an input packet of the operator."""

    MAX_EVENT_TIME = 0
    """The maximum event time of an Arrow batch; every bucket gets it."""
    ROWS = 1
    """Measurement rows; in the initial state, the rows that wait for the watermark."""
    STATES = 2
    """States of keys: the initial state, or states of new keys while the stream runs."""
    ROW_IDS = 3
    """Row ids of the initial state, for the detection of duplicates."""


@unique
class OutputPacket(IntEnum):
    """Kind of an output packet of the operator. Unless noted otherwise, the payload holds measurement rows."""

    ESTIMATES = 0
    """Estimates of accepted rows."""
    LATE = 1
    """Rows older than their key's state."""
    BAD_STATE = 2
    """Rows of a key whose state is not a number; such a key must not end the stream for all other keys."""
    LATE_BY_WATERMARK = 3
    WAITING = 4
    """The number of rows in the reorder buffer, without a payload."""
    DUPLICATE = 5
    """Rows with the key and time of another row."""
    DROPPED = 6
    """The number of dropped duplicates, without a payload."""
    EXPIRED = 7
    """Last states of expired keys."""
    BEYOND_REPLAY_WINDOW = 8
    """Rows older than the rows kept for replay."""
    REJECTED_MESSAGES = 9
    """Messages that do not fit the measurements table, as an Arrow stream."""
    CORRECTION = 10
    """Estimates that replace earlier estimates."""
    WATERMARK = 11
    """The watermark in place of the number of rows, without a payload."""
    MISSING_INPUTS = 12
    """Rows whose key has no inputs."""
    DUPLICATE_ID = 13
    """Rows with the key and id of another row."""
    KEYS_TAKEN = 14
    """The number of offered keys that were new, without a payload."""
    KEYS_HELD = 15
    """The number of offered keys that already had a state, without a payload."""
    ESTIMATES_FILE = 16
    """Estimates of accepted rows, written to a file of their table; the payload is the file's name."""
    CORRECTION_FILE = 17
    """Estimates that replace earlier estimates, in a file of their table; the payload is the file's name."""


REJECTED_MESSAGES, MISSING_INPUTS = -1, -2
"""Buckets of packets that pass the operator unchanged; the filter's buckets are not negative."""


class StateVariable(StrEnum):
    """Name of a state variable of the operator. Checkpoints hold these names."""

    STATES = "blocks"
    WAITING_ROWS = "waiting"
    CLOCK = "clock"
    ENDED = "ended"
    REPLAY_ROWS = "ring"
    REPLAY_BASE = "base"
    LAST_SEEN = "seen"
    ROW_IDS = "remembered"


STATES_BY_BLOCK = ("block", "states")
"""Columns of a state variable that holds blocks of states."""


def build_packet_batch(buckets: pa.Array, payloads: pa.Array, kind: RowPacket | None) -> pa.RecordBatch:
    """Return packets with the columns of `TYPED_ROW_PACKETS`, or of `ROW_PACKETS` if the kind is None."""
    if kind is None:
        return pa.RecordBatch.from_arrays([buckets, payloads], ["bucket", "payload"])
    kinds = pa.array(np.full(len(buckets), kind, np.int32))
    return pa.RecordBatch.from_arrays([buckets, kinds, payloads], ["bucket", "kind", "payload"])
