"""Pin the version of the table of inputs that a micro-batch uses, before any of its tasks runs.

The first driver that reaches a micro-batch pins the latest version in a file in the checkpoint, which is written once.
A driver that repeats the micro-batch after a kill finds the pin and uses this version, even if the table has changed.
The version's content is kept beside the pin as a packet, as the table's old files may be gone by then.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.roots import find_local_path
from jobs.lineage.generations import Generation
from jobs.lineage.inputs_table import InputsTable, Version
from jobs.lineage.joined_inputs import PROPERTY, Join
from jobs.lineage.model import DeployedModel
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import KeyKind
from jobs.state.encoding.rows import RowFormat
from jobs.storage.files import LocalFiles
from jobs.storage.object_files import ObjectFiles
from jobs.storage.settings import is_in_s3

KEPT = 100
"""Number of micro-batches whose pins are kept; Spark keeps the state of as many micro-batches."""
FOLDER = "inputs"


class InputPins:
    """The pins of a generation, for its driver."""

    def __init__(self, model: DeployedModel[Warehouse], kind: KeyKind, generation: Generation) -> None:
        """Read the table, so that errors in it are raised before the stream starts.

        Raises:
            UserError: the table cannot be used, or the warehouse is neither a folder that workers can read nor in S3.
        """
        files = _open_pins(model.warehouse, generation)
        if files is None:
            raise UserError(
                f"{model.name}: `inputs` needs a warehouse in a folder that all workers share, or in S3, and this one "
                f"is {model.warehouse.root}: set --warehouse to one of these, or join the inputs before `ingest`"
            )
        self._spark, self._kind, self._files = model.warehouse.spark, kind, files
        self._table = InputsTable(model)
        self._meaning = _hash_meaning(self._table, kind)
        self._packet(self._table.newest())

    def take(self, batch: int) -> Version:
        """Pin a version for a micro-batch if it has no pin; set it for this thread's jobs, and return it.

        Raises:
            UserError: the latest version cannot be used.
        """
        pinned = self.find_pinned_version(batch)
        if pinned is None:
            version = self._table.newest()
            self._packet(version)
            self._files.create(_pin(batch), json.dumps(version._asdict()).encode())
            pinned = self.find_pinned_version(batch)
            assert pinned is not None
            self._forget(batch)
        path = f"{self._files.root}/{self._packet(pinned)}"
        self._spark.sparkContext.setLocalProperty(PROPERTY, path)
        return pinned

    def find_pinned_version(self, batch: int) -> Version | None:
        """Return the pinned version of a micro-batch, or None."""
        kept = self._files.read(_pin(batch))
        return None if kept is None else Version(**json.loads(kept))

    def drop(self, batch: int) -> None:
        """Remove the pin of a micro-batch that has written nothing, so that it can use a corrected table."""
        self._files.remove(_pin(batch))

    def _packet(self, version: Version) -> str:
        """Write a version's packet unless it exists; return its name."""
        name = f"{_format_prefix(version)}{self._meaning}.packet"
        if not self._files.exists(name):
            if version.id != self._table.newest().id:
                raise UserError(
                    f"{version.table} has been recreated since a micro-batch began with its version "
                    f"{version.version}, and {self._files.root}/{name} is gone: restore one of them",
                    RUN_FAILED,
                )
            self._files.write(name, self._table.packet(self._kind, version.version))
        return name

    def _forget(self, batch: int) -> None:
        """Remove old pins, and packets without a remaining pin."""
        pins = {int(name.removesuffix(".json")): name for name in self._files.names("pins")}
        for number, name in pins.items():
            if number <= batch - KEPT:
                self._files.remove(f"pins/{name}")
        kept = [self.find_pinned_version(number) for number in pins if number > batch - KEPT]
        named = tuple(_format_prefix(one) for one in kept if one is not None)
        for name in self._files.names(""):
            if name.endswith(".packet") and not name.startswith(named):
                self._files.remove(name)


def join_of(spec: ModelSpec, fmt: RowFormat) -> Join:
    """Return a model's join for the workers."""
    assert spec.inputs is not None
    defaults = spec.inputs.defaults
    return Join(fmt, None if defaults is None else tuple(defaults[name] for name in spec.input_names))


def read_pinned_version(warehouse: Warehouse, generation: Generation, batch: int) -> dict[str, Any] | None:
    """Return the pinned version of the inputs of a generation's micro-batch, or None if unknown."""
    files = _open_pins(warehouse, generation)
    kept = None if files is None else files.read(_pin(batch))
    return None if kept is None else json.loads(kept)


def _open_pins(warehouse: Warehouse, generation: Generation) -> LocalFiles | ObjectFiles | None:
    """Return the folder of a generation's pins in its checkpoint; None if the store has no exclusive creation."""
    root = warehouse.path(f"{generation.checkpoint}/{FOLDER}")
    folder = find_local_path(root)
    return LocalFiles(folder) if folder is not None else ObjectFiles(root) if is_in_s3(root) else None


def _format_prefix(version: Version) -> str:
    """Return the prefix of the names of a version's packets."""
    return f"{version.id[:8]}-{version.version}-"


def _hash_meaning(table: InputsTable, kind: KeyKind) -> str:
    """Return a short hash of the columns and keys in a packet."""
    what = [table.inputs.key, list(table.inputs.columns.values()), kind]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]


def _pin(batch: int) -> str:
    return f"pins/{batch}.json"
