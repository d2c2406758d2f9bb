"""The same filter in the style of Spark's guide: one state a key, the rows of a key in a Python loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

OUTPUT = (
    "id {key}, event_time timestamp, mean array<double>, covariance array<double>, "
    "log_likelihood double, nis double"
)
STATE = "at bigint, mean array<double>, covariance array<double>"
FLAT = "at bigint, m0 double, m1 double, p00 double, p01 double, p10 double, p11 double"
"""The same without lists, which the state of `applyInPandasWithState` cannot hold."""
LEVEL_VARIANCE, SLOPE_VARIANCE, NOISE = 0.5, 0.01, 1.0
"""The numbers of `models/trend.yaml`."""
PRIOR_MEAN, PRIOR_COVARIANCE = (0.0, 0.0), ((10.0, 0.0), (0.0, 1.0))
H, R = np.array([[1.0, 0.0]]), np.array([[NOISE]])


def process(minutes: float) -> tuple[np.ndarray, np.ndarray]:
    """Return F and Q of a local linear trend over some minutes (Harvey 1989, section 9.1)."""
    d = minutes
    slope = SLOPE_VARIANCE
    Q = np.array(
        [[LEVEL_VARIANCE * d + slope * d**3 / 3, slope * d**2 / 2], [slope * d**2 / 2, slope * d]],
    )
    return np.array([[1.0, d], [0.0, 1.0]]), Q


class RowProcessor(StatefulProcessor):
    """A Kalman filter with the matrices of a textbook, one key at a time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state of a key."""
        self.state = handle.getValueState("filter", STATE)

    def handleInputRows(self, key: Any, rows: Iterable[Row], timerValues: Any) -> Iterator[Row]:  # noqa: N802
        """Filter the key's rows in the order of their times."""
        held = self.state.get()
        before = None if held is None else held[0]
        mean = np.array(PRIOR_MEAN if held is None else held[1])
        covariance = np.array(PRIOR_COVARIANCE if held is None else held[2]).reshape(2, 2)
        for row in sorted(rows, key=lambda one: one["time"]):
            if before is not None:
                F, Q = process((row["time"] - before) / 60e6)
                mean, covariance = F @ mean, F @ covariance @ F.T + Q
            before = row["time"]
            innovation = np.array([row["y"]]) - H @ mean
            S = H @ covariance @ H.T + R
            inverse = np.linalg.inv(S)
            gain = covariance @ H.T @ inverse
            mean = mean + gain @ innovation
            factor = np.eye(2) - gain @ H
            covariance = factor @ covariance @ factor.T + gain @ R @ gain.T
            nis = float(innovation @ inverse @ innovation)
            likelihood = -0.5 * (np.log(2 * np.pi * S[0, 0]) + nis)
            yield Row(
                id=key[0],
                event_time=row["at"],
                mean=mean.tolist(),
                covariance=covariance.ravel().tolist(),
                log_likelihood=float(likelihood),
                nis=nis,
            )
        self.state.update((before, mean.tolist(), covariance.ravel().tolist()))

    def close(self) -> None:
        """Do nothing: no resource is open."""


def filterpy_rows(
    key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Filter a key's rows with filterpy's `KalmanFilter`, its state in a `GroupState`."""
    from filterpy.kalman import KalmanFilter

    one = KalmanFilter(dim_x=2, dim_z=1)
    one.H, one.R = H, R
    before = None
    one.x, one.P = np.array(PRIOR_MEAN)[:, None], np.array(PRIOR_COVARIANCE)
    if state.exists:
        before, *numbers = state.get
        one.x, one.P = np.array(numbers[:2])[:, None], np.array(numbers[2:]).reshape(2, 2)
    rows = pd.concat(list(frames)).sort_values("time")
    found: dict[str, list[Any]] = {name: [] for name in ("mean", "covariance", "log_likelihood", "nis")}
    for time, y in zip(rows["time"], rows["y"], strict=True):
        if before is not None:
            F, Q = process((time - before) / 60e6)
            one.predict(F=F, Q=Q)
        before = int(time)
        one.update(y)
        found["mean"].append(one.x.ravel().tolist())
        found["covariance"].append(one.P.ravel().tolist())
        found["log_likelihood"].append(float(one.log_likelihood))
        found["nis"].append(float(one.mahalanobis) ** 2)
    state.update((before, *one.x.ravel().tolist(), *one.P.ravel().tolist()))
    yield pd.DataFrame({"id": key[0], "event_time": rows["at"].to_numpy(), **found})
