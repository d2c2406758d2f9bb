"""Random schedules with many deviations, from seeds: `make soak`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.protocol import scenarios
from tests.protocol.explorer import Scenario, wander

pytestmark = pytest.mark.usefixtures("simulation")


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda one: one.name.replace(" ", "-"))
def test_some_random_schedules(scenario: Scenario, record_property: Callable[[str, object], None]) -> None:
    walk(scenario, range(8), record_property)


@pytest.mark.soak
@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda one: one.name.replace(" ", "-"))
def test_many_random_schedules(scenario: Scenario, record_property: Callable[[str, object], None]) -> None:
    walk(scenario, range(1000, 4000), record_property)


def walk(scenario: Scenario, seeds: range, record_property: Callable[[str, object], None]) -> None:
    faults = steps = 0
    for seed in seeds:
        counts = wander(scenario, seed)
        faults, steps = faults + counts.faults, steps + counts.steps
    record_property(
        "protocol",
        f"{scenario.name}: seeds {seeds.start} to {seeds.stop - 1}, {faults:,} faults, {steps:,} steps",
    )
