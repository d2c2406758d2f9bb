"""The measurements table that a model's rows land in, whichever source they come from."""

from __future__ import annotations

import pyarrow as pa

from jobs.landing.checking import typed_columns
from jobs.specs.model_spec import ModelSpec
from jobs.storage.columns import schema_of
from jobs.storage.measurements_table import MEASUREMENT_PROPERTIES, PLACES, KeyTypes, key_types_in
from jobs.storage.table_log import FileTable
from jobs.storage.tables import measurements
from jobs.storage.warehouse import Tables


def prepare(warehouse: Tables, spec: ModelSpec, types: KeyTypes, messages: bool = False) -> KeyTypes:
    """Create a model's measurements table if it does not exist, and return the types of its key and id columns.

    Args:
        warehouse: where the table is.
        spec: the model.
        types: of the key and id columns of a new table; a table that exists keeps its own.
        messages: the rows are messages of topics, so a new table also has the columns of their places.

    Raises:
        UserError: the table exists, and a column of the spec is missing.
    """
    table = measurements(spec.name)
    if warehouse.exists(table):
        return key_types_in(warehouse, spec)
    columns = f"{typed_columns(spec, types)}, _origin string, _landed_at timestamp"
    if messages:
        columns += f", {PLACES}"
    warehouse.create(table, columns, properties=MEASUREMENT_PROPERTIES)
    return types


def accepted_schema(table: FileTable, spec: ModelSpec, messages: bool = False) -> pa.Schema:
    """Return the columns of accepted rows as a measurements table has them, in its order.

    messages: the rows are messages of topics: columns of their places that the table lacks follow.
    """
    more = ["_origin", "_landed_at"]
    places = pa.schema(schema_of(PLACES).to_arrow() if messages else [])
    wanted = {name.casefold() for name in (*spec.columns, *more, *places.names)}
    found = [one for one in table.columns() if one.name.casefold() in wanted]
    have = {one.name for one in found}
    return pa.schema([*found, *(one for one in places if one.name not in have)])
