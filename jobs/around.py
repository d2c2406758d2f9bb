"""An operator around the model's own: it has no state, and hands on whatever it does not see to itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import TimerValues


class Around(StatefulProcessor):
    """Let another operator have its state, its snapshot, its rows and its timers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Let the model's operator declare its state."""
        self.inner.init(handle)

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: TimerValues) -> None:  # noqa: N802
        """Let the model's operator take over the snapshot."""
        self.inner.handleInitialState(key, initialState, timerValues)

    def handleInputRows(  # noqa: N802
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: TimerValues
    ) -> Iterator[Any]:
        """Let the model's operator take its rows."""
        yield from self.inner.handleInputRows(key, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802
        """Let the model's operator see to its timers."""
        yield from self.inner.handleExpiredTimer(key, timerValues, expiredTimerInfo)

    def close(self) -> None:
        """Close the model's operator."""
        self.inner.close()
