"""Choose the mode of an upgrade by name."""

from __future__ import annotations

from collections.abc import Callable

from jobs.upgrades.blue_green import upgrade_blue_green
from jobs.upgrades.context import (
    BLUE_GREEN,
    REPARTITION,
    RETRAIN,
    STATELESS,
    STOP_START,
    Outcome,
    UpgradeContext,
    check_already_upgraded,
)
from jobs.upgrades.repartition import repartition
from jobs.upgrades.replace import retrain, start_stateless, stop_start

MODES: dict[str, Callable[[UpgradeContext], Outcome]] = {
    BLUE_GREEN: upgrade_blue_green,
    STOP_START: stop_start,
    RETRAIN: retrain,
    STATELESS: start_stateless,
    REPARTITION: repartition,
}


def upgrade(context: UpgradeContext, mode: str) -> Outcome:
    """Upgrade in a mode, or report that there is nothing to upgrade.

    Raises:
        UserError: the deployed version is not later than the live version, or the mode raises it.
    """
    done = None if mode == REPARTITION else check_already_upgraded(context.model.spec, context.live)
    return MODES[mode](context) if done is None else done
