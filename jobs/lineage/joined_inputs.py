"""Join rows with their keys' inputs before packing, by a NumPy lookup over a whole batch on the executors.

The table of inputs is a packet in a file that every worker maps into memory. The driver sets the file of a micro-batch
as a local property of the micro-batch's jobs (`PROPERTY`), so a retried task reads the same file. Each worker keeps a
copy of a packet in S3 in an unnamed temporary file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark import TaskContext

from jobs.state.encoding.keys import KeyKind, build_identity_arrays, match
from jobs.state.encoding.packets import (
    MISSING_INPUTS,
    Layout,
    PacketColumn,
    Records,
    RowPacket,
    build_packet_batch,
)
from jobs.state.encoding.rows import INPUT_IDENTITY, Packer, RowFormat, parse_records
from jobs.storage.object_files import ObjectFiles
from jobs.storage.settings import is_in_s3

PROPERTY = "kalman.inputs"
"""Local property of a job that has the name of the file."""
KEPT = 2
"""Number of files that a worker keeps open: the files of the last two micro-batches, whose stages may overlap."""

_open: dict[str, Records] = {}


class Join(NamedTuple):
    """A model's join: the format of rows without inputs, and the default inputs (c,) of keys without a row, or None."""

    rows: RowFormat
    defaults: tuple[float, ...] | None

    @property
    def layout(self) -> Layout:
        """Return the layout of the packet with the table of inputs, which is ordered by route."""
        return build_inputs_layout(self.rows.inputs_key or self.rows.kind, self.rows.inputs)


def build_inputs_layout(kind: KeyKind, inputs: int) -> Layout:
    """Return the layout of a packet of inputs."""
    return Layout((*kind.identity_columns, PacketColumn("u", "<f8", inputs)), text=False)


def join_inputs(packer: Packer, join: Join, typed: bool) -> Packer:
    """Return a function that joins batches of `rows.select_columns` with inputs, and packs them by `packer`.

    The rows whose key has no inputs become packets of the bucket `MISSING_INPUTS`.

    Args:
        packer: function that packs rows in which the inputs are the last numbers.
        join: the model's join.
        typed: whether the packets of the packer have a kind.
    """
    first = len(join.rows.numbers)

    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        table: Records | None = None
        for batch in batches:
            if batch.num_rows == 0:
                continue
            if table is None:
                table = _load_job_inputs(join.layout)
            u, known = look_up(table, _build_identities(batch, join.rows), join.defaults)
            names = [*batch.schema.names, *(f"n{first + i}" for i in range(len(u)))]
            whole = pa.RecordBatch.from_arrays([*batch.columns, *(pa.array(row) for row in u)], names)
            if not known.all():
                yield _pack_without_inputs(whole.filter(pa.array(~known)), join.rows, typed)
                whole = whole.filter(pa.array(known))
            yield from packer(iter([whole]))

    return pack


def look_up(
    table: Records, keys: Records, defaults: tuple[float, ...] | None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the inputs (c, N) of N keys, and a mask (N,) of the keys with inputs, which is all True with defaults."""
    # A search in the order of the table reads each page once, and takes a quarter of the time.
    order = np.argsort(keys.arrays["route"])
    at = np.empty(len(order), np.int64)
    at[order] = match(table, keys.take(order))
    found = at >= 0
    u = np.full((table.arrays["u"].shape[0], len(at)), np.nan)
    u[:, found] = table.arrays["u"][:, at[found]]
    if defaults is not None:
        u[:, ~found] = np.array(defaults)[:, None]
        found = np.ones(len(at), bool)
    return u, found


def _build_identities(batch: pa.RecordBatch, fmt: RowFormat) -> Records:
    by, names = fmt.inputs_key or fmt.kind, ("identity", "check")
    given = names if by == fmt.kind else INPUT_IDENTITY
    arrays = {
        name: batch.column(one).to_numpy()
        for name, one in list(zip(names, given, strict=True))[: 1 if by.integer else 2]
    }
    return Records(build_identity_arrays(arrays), None)


def _pack_without_inputs(rows: pa.RecordBatch, fmt: RowFormat, typed: bool) -> pa.RecordBatch:
    payload = pa.array([fmt.layout.encode(parse_records(rows, fmt))], pa.binary())
    bucket = pa.array([MISSING_INPUTS], pa.int32())
    return build_packet_batch(bucket, payload, RowPacket.ROWS if typed else None)


def _load_job_inputs(layout: Layout) -> Records:
    """Return the table that the driver has pinned for this task's micro-batch."""
    context = TaskContext.get()
    path = None if context is None else context.getLocalProperty(PROPERTY)
    if path is None:
        raise RuntimeError("no table of inputs has been pinned for this micro-batch")
    if path not in _open:
        while len(_open) >= KEPT:
            _open.pop(next(iter(_open)))
        _open[path] = read_copied_records(path, layout) if is_in_s3(path) else map_records(Path(path), layout)
    return _open[path]


def read_copied_records(path: str, layout: Layout) -> Records:
    """Return the records of a packet in S3 as views of a temporary copy, which is removed together with the records.

    Raises:
        UserError: the packet cannot be read from the store.
    """
    folder, _, name = path.rpartition("/")
    content = ObjectFiles(folder).read(name)
    if content is None:
        raise RuntimeError(f"{path}: the table of inputs that was pinned for this micro-batch is gone")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return layout.decode(np.memmap(file, np.uint8, "r").data)


def map_records(path: Path, layout: Layout) -> Records:
    """Return the records of a packet in a file as memory-mapped views, so the workers of a machine share the memory."""
    return layout.decode(np.memmap(path, np.uint8, "r").data)
