"""Convert rule states to table rows, and rows back to the states of rules that may have changed since. No Spark.

A row has the state of one key: the time of its newest reading, and the fields of all rules by `RULE.FIELD`. Numbers and
integers are in separate columns, so that both are exact. The fields of a built-in rule are named as in
`rules.RuleStates`, those of a function as in its rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.core.errors import RUN_FAILED, UserError
from jobs.downstream.rule_functions import NEVER, Field
from jobs.downstream.rule_operator import RulePlan
from jobs.specs.monitor import Rule
from jobs.state.encoding.packets import Records

STATES = (
    "key string, event_time timestamp, numbers map<string,array<double>>, integers map<string,array<bigint>>"
)
"""Columns of a rule state, as DDL."""
_COUNTS = ("run", "since", "calm", "active")
_LAST = "last"


class Changes(NamedTuple):
    """Mapping from the states of former rules to the states of other rules.

    kept: names of rules that continue. again: names of rules that differ; they keep alerts and last readings, but count
    from zero. fresh: names of rules that begin anew. dropped: names of rules that no longer exist. fields: names of
    functions' fields that begin anew.
    """

    kept: tuple[str, ...]
    again: tuple[str, ...]
    fresh: tuple[str, ...]
    dropped: tuple[str, ...]
    fields: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the changes as lines for a user."""
        said = (
            ("continue with their states", self.kept),
            ("differ: their alerts continue, their counts of readings begin again", self.again),
            ("are new: they begin without states", self.fresh),
            ("are no more, and their states are left out", self.dropped),
        )
        lines = [f"rules that {what}: {', '.join(names)}" for what, names in said if names]
        if self.fields:
            lines.append(
                f"fields that begin anew, as they are new or of another type: {', '.join(self.fields)}"
            )
        return lines


def compare_rules(former: Sequence[Rule], rules: Sequence[Rule]) -> Changes:
    """Compare former rules with these rules by name, and the state of functions by field."""
    known, kept, again, fresh, fields = {rule.name: rule for rule in former}, [], [], [], []
    for rule in rules:
        was = known.get(rule.name)
        if (
            was is None
            or was.kind != rule.kind
            or _find_built_in_reading(was) != _find_built_in_reading(rule)
        ):
            fresh.append(rule.name)
        elif rule.function is not None:
            kept.append(rule.name)
            fields += [
                f"{rule.name}.{field}" for field, kind in rule.keeps.items() if was.keeps.get(field) != kind
            ]
        else:
            (kept if was == rule else again).append(rule.name)
    dropped = [name for name in known if name not in {rule.name for rule in rules}]
    return Changes(tuple(kept), tuple(again), tuple(fresh), tuple(dropped), tuple(fields))


def _find_built_in_reading(rule: Rule) -> Any:
    """Return the reading of a built-in rule, or None: a function's readings may change, its fields stay."""
    return None if rule.function is not None else (rule.state, rule.measurement)


def build_rule_state_rows(plan: RulePlan, rules: Sequence[Rule], records: Records) -> pa.RecordBatch:
    """Return a bucket's states as rows (`STATES`)."""
    numbers: dict[str, NDArray] = {}
    integers: dict[str, NDArray] = {}
    functions = {rule.name: rule for rule in plan.functions}
    for place, rule in enumerate(rules):
        own = functions.get(rule.name)
        if own is None:
            for name in _COUNTS:
                integers[f"{rule.name}.{name}"] = records.arrays[name][place]
            numbers[f"{rule.name}.{_LAST}"] = records.arrays[_LAST][place]
            continue
        for field in own.fields:
            into = numbers if field.type == "float64" else integers
            into[own.place(field)] = records.arrays[own.place(field)]
    assert records.text is not None
    time = records.arrays["time"]
    at = pa.array(time, pa.timestamp("us", "UTC"), mask=time == NEVER)
    size = records.size
    maps = [_build_maps(numbers, size, pa.float64()), _build_maps(integers, size, pa.int64())]
    return pa.RecordBatch.from_arrays(
        [records.text.cast(pa.string()), at, *maps], ["key", "event_time", "numbers", "integers"]
    )


def _build_maps(fields: Mapping[str, NDArray], size: int, kind: pa.DataType) -> pa.Array:
    """Return fields (N,) or (width, N) as a map of each of the N keys."""
    tables = [np.atleast_2d(values) for values in fields.values()]
    widths = np.tile([len(one) for one in tables], size)
    values = np.concatenate(tables).T.ravel() if tables else np.zeros(0)
    ends = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    items = pa.ListArray.from_arrays(pa.array(ends), pa.array(values, kind))
    names = pa.array(list(fields) * size, pa.string())
    return pa.MapArray.from_arrays(
        pa.array(np.arange(size + 1, dtype=np.int32) * np.int32(len(fields))), names, items
    )


def parse_rule_state_rows(
    plan: RulePlan, rules: Sequence[Rule], changes: Changes, batch: pa.RecordBatch, identity: dict[str, Any]
) -> Records:
    """Return rows (`STATES`) as the states of a plan's rules.

    Args:
        plan, rules: plan and definitions of these rules.
        changes: changes since the rules of the rows (`changes_of`).
        batch: rows to convert.
        identity: arrays that identify the keys, such as `route`.

    Raises:
        UserError: the rows lack a field.
    """
    size = batch.num_rows
    arrays = plan.fresh(size)
    time = batch.column("event_time").cast(pa.timestamp("us")).cast(pa.int64())
    arrays["time"] = np.asarray(pc.fill_null(time, NEVER), np.int64)
    functions = {rule.name: rule for rule in plan.functions}
    for place, rule in enumerate(rules):
        own = functions.get(rule.name)
        if own is not None:
            known = [] if rule.name in changes.fresh else own.fields
            for field in known:
                if own.place(field) not in changes.fields:
                    arrays[own.place(field)] = _read_field(batch, own.place(field), field)
        elif rule.name not in changes.fresh:
            names = ("active",) if rule.name in changes.again else _COUNTS
            for name in names:
                kind = "bool" if name == "active" else "int64"
                arrays[name][place] = _read_field(batch, f"{rule.name}.{name}", Field(name, kind))
            arrays[_LAST][place] = _read_field(batch, f"{rule.name}.{_LAST}", Field(_LAST, "float64"))
    return Records({**identity, **arrays}, batch.column("key"))


def _read_field(batch: pa.RecordBatch, name: str, field: Field) -> NDArray:
    """Return a state field of the rows, (N,) or (width, N)."""
    lookup: Any = pc.map_lookup  # type: ignore[attr-defined]
    maps = batch.column("numbers" if field.type == "float64" else "integers")
    values = lookup(maps, pa.scalar(name), "first")
    flat, width = values.flatten(), field.width or 1
    if values.null_count or len(flat) != batch.num_rows * width:
        raise UserError(f"the exported states of rules lack {name}, or have another number of it", RUN_FAILED)
    table = np.array(flat.to_numpy(zero_copy_only=False)).reshape(batch.num_rows, width).T
    if field.type == "bool":
        table = table.astype(np.uint8)
    return np.ascontiguousarray(table if field.width is not None else table[0])
