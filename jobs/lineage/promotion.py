"""Promote a shadow generation, roll back to a retired one, or retire a shadow, each in one commit."""

from __future__ import annotations

from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage import generations
from jobs.lineage.compatibility import refuse_other_measurements
from jobs.lineage.generation_checkpoint import refuse_damaged
from jobs.lineage.generations import (
    LIVE,
    RETIRED,
    SHADOW,
    Generation,
    has_reached,
    read_origin_manifest,
    read_position,
)
from jobs.storage.positions import describe
from jobs.storage.warehouse import Tables
from jobs.supervision.driver_log import DriverLog


class ShadowLags(UserError):
    """Error: a shadow lags the live generation."""


def promote(
    warehouse: Tables, model: str, name: str | None = None, allow_lag: bool = False
) -> tuple[Generation, Generation | None]:
    """Make a shadow the live generation; return the shadow and the generation that it replaced. Idempotent.

    Args:
        warehouse: warehouse of the generations.
        model: name of the model.
        name: name of the shadow; None means the newest shadow.
        allow_lag: whether to promote a shadow that lags the live generation, so that readers see time go back.

    Raises:
        UserError: there is no such shadow, or the table no longer has the measurements that the shadow has read.
        ShadowLags: the shadow lags the live generation.
    """
    found, live, known = _select_promotable(warehouse, model, name)
    if found.status == LIVE:
        return found, None
    _refuse_other_measurements(warehouse, found)
    _refuse_lag(warehouse, found, live, allow_lag)
    return generations.switch(warehouse, model, found, known), live


def find_promotable(
    warehouse: Tables, model: str, name: str | None = None, allow_lag: bool = False
) -> tuple[Generation, Generation | None]:
    """Return the generation that `promote` would make live, and the live generation, without any change.

    This function does not compare the measurements that the generation has read with the table.

    Raises:
        UserError: there is no such shadow.
        ShadowLags: the shadow lags the live generation.
    """
    found, live, _ = _select_promotable(warehouse, model, name)
    if found.status != LIVE:
        _refuse_lag(warehouse, found, live, allow_lag)
    return found, live


def _select_promotable(
    warehouse: Tables, model: str, name: str | None
) -> tuple[Generation, Generation | None, list[Generation]]:
    """Return the generation to promote, the live generation, and all generations."""
    known = generations.read_generations(warehouse, model)
    shadows = [one for one in known if one.status == SHADOW]
    found = generations.find_named(known, name) if name else (shadows or [None])[-1]
    if found is None:
        raise UserError(f"model {model} has no {f'generation {name}' if name else 'shadow'} to promote")
    live = generations.select_live(known)
    if found.status not in (LIVE, SHADOW):
        raise UserError(f"{found.generation} is {found.status}, not a shadow: roll back to it instead")
    return found, live, known


def _refuse_other_measurements(warehouse: Tables, found: Generation) -> None:
    if found.topic is None:  # the generation's next start compares a position in a topic
        refuse_other_measurements(warehouse, found, read_origin_manifest(warehouse, found))


def _refuse_lag(warehouse: Tables, found: Generation, live: Generation | None, allow_lag: bool) -> None:
    if live is not None and not allow_lag and not has_reached(warehouse, found, live):
        raise ShadowLags(
            f"{found.generation} has reached {describe(read_position(warehouse, found))} and {live.generation} "
            f"{describe(read_position(warehouse, live))}: let it catch up first "
            f"(`kalman-pipeline stream --model {found.model} --generation {found.generation}`)",
            RUN_FAILED,
        )


def roll_back(warehouse: Tables, model: str, name: str | None = None) -> tuple[Generation, Generation | None]:
    """Make a retired generation live again; return this generation and the replaced generation. Idempotent.

    The generation resumes from its checkpoint, after the last row that it has read.

    Raises:
        UserError: there is no retired generation to roll back to, its checkpoint is damaged, or the table no longer has
            the measurements that the generation has read.
    """
    found, live, known = find_rollback_target(warehouse, model, name)
    if found.status == LIVE:
        return found, None
    refuse_damaged(warehouse, found)
    _refuse_other_measurements(warehouse, found)
    return generations.switch(warehouse, model, found, known), live


def find_rollback_target(
    warehouse: Tables, model: str, name: str | None = None
) -> tuple[Generation, Generation | None, list[Generation]]:
    """Return the generation that `roll_back` would make live, the live generation, and all generations; change nothing.

    Raises:
        UserError: there is no such generation.
    """
    known = generations.read_generations(warehouse, model)
    live = generations.select_live(known)
    to = name or (live and generations.find_predecessor(known, live))
    found = generations.find_named(known, to)
    if found is None or found.status not in (LIVE, RETIRED):
        retired = ", ".join(one.generation for one in known if one.status == RETIRED) or "none"
        raise UserError(
            f"model {model} has no {f'retired generation {name}' if name else 'generation to roll back to'} "
            f"(retired are {retired})"
        )
    return found, live, known


def find_retirable(
    warehouse: Tables, model: str, name: str | None = None
) -> tuple[Generation, list[Generation]]:
    """Return the generation that `retire` would retire or has retired, and all generations, without any change.

    Raises:
        UserError: for the same reasons as in `retire`.
    """
    known = generations.read_generations(warehouse, model)
    shadows = [one for one in known if one.status == SHADOW]
    if name is None and len(shadows) > 1:
        names = ", ".join(one.generation for one in shadows)
        raise UserError(f"model {model} has several shadows: choose one with --generation ({names})")
    found = generations.find_named(known, name) if name else (shadows or [None])[0]
    if found is None:
        raise UserError(f"model {model} has no {f'generation {name}' if name else 'shadow'} to retire")
    if found.status == LIVE:
        raise UserError(
            f"{found.generation} is the live generation of {model}, which only `promote` or `rollback` retires, for "
            f"another one; to stop its stream, run `kalman-pipeline stop --model {model}`"
        )
    return found, known


def retire(warehouse: Tables, model: str, name: str | None = None) -> tuple[Generation, bool]:
    """Retire a shadow; return the shadow, and whether this call has retired it.

    By this commit a running driver loses its lease, and a request in the log of drivers stops it after its micro-batch.
    Until it stops, the driver writes estimates of a generation that nobody reads.

    Raises:
        UserError: the generation is live, there is no such shadow, or `name` is None and there are several shadows.
    """
    found, known = find_retirable(warehouse, model, name)
    if found.status != SHADOW:
        return found, False
    generations.retire(warehouse, found, known)
    _ask_to_end(warehouse, found)
    return generations.read_named(warehouse, model, found.generation), True


def _ask_to_end(warehouse: Tables, generation: Generation) -> None:
    """Ask the driver of a generation, in the log of drivers, to stop, unless the driver has ended."""
    log = DriverLog.at(warehouse.root, generation.model)
    for drive in log.list_drivers():
        if drive.generation == generation.generation and drive.ended_at is None:
            log.ask_to_stop(drive, f"{generation.generation} was retired")
