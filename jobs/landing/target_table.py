"""The measurements table that a model's rows land in, whichever source they come from."""

from __future__ import annotations

from jobs.landing.checking import typed_columns
from jobs.specs.model_spec import ModelSpec
from jobs.storage.measurements_table import MEASUREMENT_PROPERTIES, PLACES, KeyTypes, key_types_in
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
