"""Print the JSON schema of model specs, by which editors complete and check them."""

from __future__ import annotations

import json

from jobs.core.command import answer
from jobs.core.report import Report
from jobs.core.settings import Settings


def format_schema() -> str:
    """Return the content of docs/model.schema.json."""
    from jobs.specs.loading import build_json_schema

    return json.dumps(build_json_schema(), indent=2, ensure_ascii=False) + "\n"


@answer
def run(settings: Settings) -> Report:
    """Print the JSON schema of model specs."""
    from jobs.specs.loading import build_json_schema

    return Report(lines=format_schema().splitlines(), data=build_json_schema())


if __name__ == "__main__":
    run.main()
