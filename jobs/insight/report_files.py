"""Where the reports on a model's generations are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.storage.files import Files
    from jobs.storage.warehouse import Tables

FOLDER = "reports"


def report_files(warehouse: Tables, model: str, generation: str) -> tuple[Files, tuple[str, str]]:
    """Return the folder of a model's reports, and the names of a generation's two files: data and page."""
    return warehouse.files(f"{FOLDER}/{model}"), (f"{generation}.json", f"{generation}.html")
