"""Write the report on two generations of a model beside the tables: an HTML file that needs nothing else, and JSON.

They are `reports/<model>/<new generation>.html` and `.json` in the warehouse; the next report on the same generation
takes their place.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from jobs.errors import RUN_FAILED, UserError
from jobs.progress import Progress
from jobs.report import Report, plain
from jobs.settings import Settings
from jobs.spec import ModelSpec, load_spec
from jobs.tables import Warehouse, estimates
from jobs.verdict import Comparison, lines_of

if TYPE_CHECKING:
    from jobs.comparison_content import Content
    from jobs.generations import Generation
    from jobs.small_files import Files

FOLDER = "reports"


def run(settings: Settings, model: str, generation: str | None = None, against: str | None = None) -> Report:
    """Compare two generations of a model and write the report.

    Args:
        settings: of the command.
        model: name or path of its spec.
        generation: the new one; by default the newest shadow, else the live one.
        against: the old one; by default the one that the new one began behind.

    Raises:
        UserError: there are no two generations to compare.
    """
    from jobs.session import spark_session
    from jobs.spark_conf import glance_conf

    started = time.monotonic()
    spec = load_spec(model, settings.models)
    warehouse = Warehouse(spark_session(settings, f"report {spec.name}", glance_conf()), settings.warehouse)
    with Progress(f"report {spec.name}", None, quiet=settings.quiet) as progress:
        new, old = _pair(warehouse, spec.name, generation, against)
        progress.note(f"comparing {new.generation} with {old.generation}")
        found, place = written(warehouse, spec, old, new)
    seconds = time.monotonic() - started
    return Report(
        [
            f"{new.generation} (version {new.model_version}) against {old.generation} (version {old.model_version})",
            *lines_of(found),
            f"report: {place}",
            f"{seconds:.1f} s",
        ],
        {
            "model": spec.name,
            "generation": new.generation,
            "against": old.generation,
            "good": found.good,
            "reasons": found.reasons,
            "comparison": found.numbers,
            "report": place,
            "seconds": seconds,
        },
    )


def written(
    warehouse: Warehouse, spec: ModelSpec, old: Generation, new: Generation
) -> tuple[Comparison, str]:
    """Compare two generations, write the report, and return what was found and where the page is."""
    from jobs.comparison_content import gather

    content = gather(warehouse, _spec_of(warehouse, spec, new), old, new, first_batch(old, new))
    return content.found, write(warehouse, content)


def first_batch(old: Generation, new: Generation) -> int:
    """Return the first micro-batch of the old generation whose rows the new one has too."""
    return new.parent_batch + 1 if new.parent == old.generation and new.parent_batch is not None else 0


def write(warehouse: Warehouse, content: Content) -> str:
    """Write both files, each whole or not at all, and return the page's place."""
    from jobs.comparison_page import page

    files, (data_name, page_name) = files_of(warehouse, content.model, content.new["generation"])
    data = json.dumps(plain(content.data()), indent=2, allow_nan=False)
    files.write(data_name, data.encode())
    files.write(page_name, page(content).encode())
    return f"{warehouse.path(FOLDER)}/{content.model}/{page_name}"


def files_of(warehouse: Warehouse, model: str, generation: str) -> tuple[Files, tuple[str, str]]:
    """Return the folder of a model's reports, and the names of the two files on a generation: data and page."""
    from jobs.small_files import hadoop_files

    return hadoop_files(warehouse, f"{FOLDER}/{model}"), (f"{generation}.json", f"{generation}.html")


def _spec_of(warehouse: Warehouse, spec: ModelSpec, new: Generation) -> ModelSpec:
    """Return the spec that the new generation's estimates mean: the deployed one, or that of its snapshot."""
    from jobs.choice import origin

    return spec if new.fingerprint == spec.fingerprint() else origin(warehouse, new).model_spec()


def _pair(
    warehouse: Warehouse, model: str, generation: str | None, against: str | None
) -> tuple[Generation, Generation]:
    from jobs import generations

    known = generations.all_of(warehouse, model)
    if not known or not warehouse.exists(estimates(model)):
        raise UserError(
            f"model {model} has no estimates to report on: start its stream with "
            f"`kalman-pipeline stream --model {model}`",
            RUN_FAILED,
        )
    shadows = [one for one in known if one.status == generations.SHADOW]
    if generation is None and shadows:
        new = shadows[-1]
    else:
        new = generations.named(warehouse, model, generation)
    other = against or new.parent
    if other is None or other == new.generation:
        raise UserError(
            f"{new.generation} began behind no other generation of {model}: say with --against which one to compare it "
            f"with",
            RUN_FAILED,
        )
    return new, generations.named(warehouse, model, other)


if __name__ == "__main__":
    from jobs.cli import main

    main("report")
