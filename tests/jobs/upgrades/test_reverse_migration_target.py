"""The target of a roll-back with the last state, from the generations' parents and versions."""

from __future__ import annotations

import pytest

from jobs.core.errors import UserError
from jobs.lineage.generations import LIVE, REMOVED, RETIRED, SHADOW, Generation
from jobs.upgrades.reverse_migration import find_target


def lineage(*ones: tuple[int, int | None, str]) -> list[Generation]:
    """Return generations 1, 2, ... with these versions, numbers of parents, and statuses."""
    return [
        Generation(
            generation=f"m-g{number:04d}",
            model="m",
            model_version=version,
            fingerprint=f"meaning {version}",
            snapshot_id="s",
            checkpoint="c",
            start_position={"source": "delta", "version": 0},
            partitions=1,
            blocks=1,
            status=status,
            parent=None if parent is None else f"m-g{parent:04d}",
            parent_batch=None if parent is None else 0,
        )
        for number, (version, parent, status) in enumerate(ones, 1)
    ]


def target(known: list[Generation], name: str | None = None) -> str | None:
    live = next(one for one in known if one.status == LIVE)
    found = find_target(known, live, name)
    return found and found.generation


def test_the_default_is_the_nearest_ancestor_of_another_version() -> None:
    assert target(lineage((1, None, RETIRED), (2, 1, LIVE))) == "m-g0001"
    # Another layout is still the same version; a removed generation will do, as no checkpoint is needed.
    laid_out_anew = lineage((1, None, REMOVED), (2, 1, RETIRED), (2, 2, LIVE))
    assert target(laid_out_anew) == "m-g0001"
    three = lineage((1, None, RETIRED), (2, 1, RETIRED), (3, 2, LIVE))
    assert (target(three), target(three, "m-g0001")) == ("m-g0002", "m-g0001")


def test_after_a_roll_back_only_a_named_generation_is_a_target() -> None:
    gone_back = lineage((1, None, RETIRED), (2, 1, RETIRED), (3, 2, RETIRED), (2, 3, LIVE))
    assert target(gone_back) is None
    assert target(gone_back, "m-g0002") is None and target(gone_back, "m-g0004") is None
    assert target(gone_back, "m-g0001") == "m-g0001"
    forward_again = lineage((1, None, RETIRED), (2, 1, RETIRED), (1, 2, RETIRED), (2, 3, LIVE))
    assert target(forward_again) == "m-g0003"


@pytest.mark.parametrize(
    ("known", "name", "message"),
    [
        (lineage((1, None, LIVE)), None, "came from no other version than its own, 1"),
        (lineage((1, 2, RETIRED), (1, 1, LIVE)), None, "came from no other version"),  # whatever the table says
        (lineage((1, None, RETIRED), (2, 1, LIVE)), "m-g0009", r"no generation m-g0009 \(it has m-g0001, m-g0002\)"),
        (lineage((1, None, LIVE), (2, 1, SHADOW)), "m-g0002", "m-g0002 is shadow, not retired"),
        (lineage((1, None, LIVE), (2, 1, RETIRED)), "m-g0002", "go there with `kalman-pipeline upgrade"),
    ],
)  # fmt: skip
def test_an_impossible_target_is_refused_with_the_reason(
    known: list[Generation], name: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        target(known, name)
