"""Write the report on two generations beside the tables: HTML and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jobs.core.report import plain
from jobs.lineage.start_point import origin
from jobs.specs.model_spec import ModelSpec
from jobs.upgrades.comparison.content import gather
from jobs.upgrades.comparison.decision import Comparison
from jobs.upgrades.comparison.page import page
from jobs.warehouse.delta import Warehouse
from jobs.warehouse.files import hadoop_files

if TYPE_CHECKING:
    from jobs.lineage.generations import Generation
    from jobs.upgrades.comparison.content import Content
    from jobs.warehouse.files import Files

FOLDER = "reports"


def written(
    warehouse: Warehouse, spec: ModelSpec, old: Generation, new: Generation
) -> tuple[Comparison, str]:
    """Compare two generations, write the report, and return what was found and where the page is."""
    content = gather(warehouse, _spec_of(warehouse, spec, new), old, new, first_batch(old, new))
    return content.found, write(warehouse, content)


def first_batch(old: Generation, new: Generation) -> int:
    """Return the first micro-batch of the old generation whose rows the new one has too."""
    return new.parent_batch + 1 if new.parent == old.generation and new.parent_batch is not None else 0


def write(warehouse: Warehouse, content: Content) -> str:
    """Write both files, each whole or not at all, and return the page's place."""
    files, (data_name, page_name) = files_of(warehouse, content.model, content.new["generation"])
    data = json.dumps(plain(content.data()), indent=2, allow_nan=False)
    files.write(data_name, data.encode())
    files.write(page_name, page(content).encode())
    return f"{warehouse.path(FOLDER)}/{content.model}/{page_name}"


def files_of(warehouse: Warehouse, model: str, generation: str) -> tuple[Files, tuple[str, str]]:
    """Return the folder of a model's reports, and the names of the two files on a generation: data and page."""
    return hadoop_files(warehouse, f"{FOLDER}/{model}"), (f"{generation}.json", f"{generation}.html")


def _spec_of(warehouse: Warehouse, spec: ModelSpec, new: Generation) -> ModelSpec:
    """Return the spec that the new generation's estimates mean: the deployed one, or that of its snapshot."""
    return spec if new.fingerprint == spec.fingerprint() else origin(warehouse, new).model_spec(spec.folder)
