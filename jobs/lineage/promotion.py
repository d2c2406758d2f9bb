"""Make another generation the live one, in one commit: forwards (promote) or back (roll back)."""

from __future__ import annotations

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage import generations
from jobs.lineage.damage import refuse_damaged
from jobs.lineage.generations import LIVE, RETIRED, SHADOW, Generation, position_of, progress_rank
from jobs.supervision.driver_log import DriverLog
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.positions import describe


class ShadowLags(UserError):
    """A shadow has not come as far as the live generation."""


def promote(
    warehouse: Warehouse, model: str, name: str | None = None, allow_lag: bool = False
) -> tuple[Generation, Generation | None]:
    """Make a shadow the live generation; return it and the one that it replaced. Again it changes nothing.

    Args:
        warehouse: where.
        model: whose.
        name: the shadow; by default the newest.
        allow_lag: allow a shadow that has not come as far as the live one, so that readers see time go back.

    Raises:
        UserError: there is no such shadow; `ShadowLags`: it has not come as far as the live one.
    """
    known = generations.all_of(warehouse, model)
    shadows = [one for one in known if one.status == SHADOW]
    found = next((one for one in known if one.generation == name), None) if name else (shadows or [None])[-1]
    if found is None:
        raise UserError(f"model {model} has no {f'generation {name}' if name else 'shadow'} to promote")
    live = next((one for one in known if one.status == LIVE), None)
    if found.status == LIVE:
        return found, None
    if found.status != SHADOW:
        raise UserError(f"{found.generation} is {found.status}, not a shadow: roll back to it instead")
    if live is not None and not allow_lag:
        have, want = progress_rank(warehouse, found), progress_rank(warehouse, live)
        if have < want:
            raise ShadowLags(
                f"{found.generation} has come to {describe(position_of(warehouse, found))} and {live.generation} to "
                f"{describe(position_of(warehouse, live))}: let it catch up first "
                f"(kalman-pipeline stream --model {model} --generation {found.generation})",
                RUN_FAILED,
            )
    return generations.switch(warehouse, model, found, known), live


def roll_back(
    warehouse: Warehouse, model: str, name: str | None = None
) -> tuple[Generation, Generation | None]:
    """Make a retired generation the live one again; return it and the one that it replaced.

    It goes on from its own checkpoint, behind the last row that it has seen itself.

    Raises:
        UserError: there is nothing to go back to, or its checkpoint is damaged.
    """
    known = generations.all_of(warehouse, model)
    live = next((one for one in known if one.status == LIVE), None)
    to = name or (live and live.parent)
    found = next((one for one in known if one.generation == to), None)
    if found is not None and found.status == LIVE:
        return found, None
    if found is None or found.status != RETIRED:
        retired = ", ".join(one.generation for one in known if one.status == RETIRED) or "none"
        raise UserError(
            f"model {model} has no {f'retired generation {name}' if name else 'generation to go back to'} "
            f"(retired are {retired})"
        )
    refuse_damaged(warehouse, found)
    return generations.switch(warehouse, model, found, known), live


def retire(warehouse: Warehouse, model: str, name: str | None = None) -> tuple[Generation, bool]:
    """Retire a shadow that is not to take over; return it, and if that was done now.

    It is one commit, which takes the lease from a driver that runs; a request in the log of drivers lets that finish
    its micro-batch and end at once. What it writes until then are estimates of a generation that nobody reads.

    Raises:
        UserError: the generation is live, there is no such shadow, or it is not said which of several is meant.
    """
    known = generations.all_of(warehouse, model)
    shadows = [one for one in known if one.status == SHADOW]
    if name is None and len(shadows) > 1:
        names = ", ".join(one.generation for one in shadows)
        raise UserError(f"model {model} has several shadows: say which with --generation ({names})")
    wanted = name or (shadows[0].generation if shadows else None)
    found = next((one for one in known if one.generation == wanted), None)
    if found is None:
        raise UserError(f"model {model} has no {f'generation {name}' if name else 'shadow'} to retire")
    if found.status == LIVE:
        raise UserError(
            f"{found.generation} is the live generation of {model}: promote another one, or roll back, and it is "
            f"retired by that; `kalman-pipeline stop --model {model}` stops its stream"
        )
    if found.status != SHADOW:
        return found, False
    generations.retire(warehouse, found, known)
    _ask_to_end(warehouse, found)
    return generations.named(warehouse, model, found.generation), True


def _ask_to_end(warehouse: Warehouse, generation: Generation) -> None:
    """Leave a request to end for the driver of a generation, if one has said nothing of its end."""
    log = DriverLog.of(warehouse, generation.model)
    for drive in log.drivers():
        if drive.generation == generation.generation and drive.ended_at is None:
            log.ask_to_stop(drive, f"{generation.generation} was retired")
