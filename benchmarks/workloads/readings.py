"""Write files of readings: sensor, time, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray


def write_readings(
    path: Path, sensors: pa.Array, seconds: NDArray[Any], numbers: Mapping[str, NDArray[Any]]
) -> None:
    """Write rows as CSV, with times as text, or as Parquet, by the file's ending.

    Args:
        path: the file.
        sensors: key of each row.
        seconds: time of each row, as datetime64.
        numbers: the other columns.
    """
    columns = {name: pa.array(values) for name, values in numbers.items()}
    if path.suffix == ".parquet":
        times = pa.array(seconds.astype("datetime64[us]"), pa.timestamp("us", "UTC"))
        pq.write_table(pa.table({"sensor": sensors, "at": times, **columns}), path)
        return
    # A column has few different times: text is made once for each.
    distinct, places = np.unique(seconds.astype("datetime64[s]"), return_inverse=True)
    times = pa.array(np.char.add(distinct.astype(str), "Z")).take(pa.array(places))
    pyarrow.csv.write_csv(pa.table({"sensor": sensors, "at": times, **columns}), path)
