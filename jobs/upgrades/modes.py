"""The modes of an upgrade, by name."""

from __future__ import annotations

from collections.abc import Callable

from jobs.upgrades.blue_green import blue_green
from jobs.upgrades.context import (
    BLUE_GREEN,
    REPARTITION,
    RETRAIN,
    STATELESS,
    STOP_START,
    Outcome,
    UpgradeContext,
)
from jobs.upgrades.repartition import repartition
from jobs.upgrades.replace import retrain, start_stateless, stop_start

MODES: dict[str, Callable[[UpgradeContext], Outcome]] = {
    BLUE_GREEN: blue_green,
    STOP_START: stop_start,
    RETRAIN: retrain,
    STATELESS: start_stateless,
    REPARTITION: repartition,
}
