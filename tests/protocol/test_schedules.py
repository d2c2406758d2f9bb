"""The promise holds in every schedule with few deviations (docs/protocol.md); what was looked at is in the summary."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.protocol import scenarios
from tests.protocol.explorer import Scenario, explore

pytestmark = pytest.mark.usefixtures("simulation")


def named(scenario: Scenario) -> str:
    return scenario.name.replace(" ", "-")


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=named)
def test_the_promise_holds(scenario: Scenario, record_property: Callable[[str, object], None]) -> None:
    counts = explore(scenario)
    record_property("protocol", counts.text())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios.ALL, ids=named)
def test_the_promise_holds_with_two_deviations(
    scenario: Scenario, record_property: Callable[[str, object], None]
) -> None:
    counts = explore(scenario, 2, most=20_000)
    record_property("protocol", counts.text())


@pytest.mark.parametrize("scenario", scenarios.HAND_OVERS, ids=named)
def test_a_hand_over_from_any_position_covers_each_row_once(scenario: Scenario) -> None:
    explore(scenario)
