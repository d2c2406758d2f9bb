"""Write the report on two generations beside the tables: HTML and JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jobs.core.report import plain
from jobs.insight.comparison import gather
from jobs.insight.comparison_page import page
from jobs.insight.report_files import FOLDER, report_files
from jobs.lineage.generations import origin
from jobs.specs.model_spec import ModelSpec
from jobs.storage.warehouse import Tables
from jobs.upgrades.comparison.decision import Comparison

if TYPE_CHECKING:
    from jobs.insight.comparison import Content
    from jobs.lineage.generations import Generation


def compare(warehouse: Tables, spec: ModelSpec, old: Generation, new: Generation) -> tuple[Comparison, str]:
    """Compare two generations, write the report, and return the comparison and the path of the page."""
    content = gather(warehouse, _spec_of(warehouse, spec, new), old, new, first_batch(old, new))
    return content.comparison, write(warehouse, content)


def first_batch(old: Generation, new: Generation) -> int:
    """Return the old generation's first micro-batch whose rows the new one has too."""
    return new.parent_batch + 1 if new.parent == old.generation and new.parent_batch is not None else 0


def write(warehouse: Tables, content: Content) -> str:
    """Write both files, each atomically, and return the path of the page."""
    files, (data_name, page_name) = report_files(warehouse, content.model, content.new["generation"])
    data = json.dumps(plain(content.data()), indent=2, allow_nan=False)
    files.write(data_name, data.encode())
    files.write(page_name, page(content).encode())
    return f"{warehouse.path(FOLDER)}/{content.model}/{page_name}"


def _spec_of(warehouse: Tables, spec: ModelSpec, new: Generation) -> ModelSpec:
    """Return the spec of the new generation's estimates: the deployed one, or that of its snapshot."""
    return spec if new.fingerprint == spec.fingerprint() else origin(warehouse, new).model_spec(spec.folder)
