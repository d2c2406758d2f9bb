"""Find where a landed file goes on: the end of the former content that the present content begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from jobs.core.input_files import open_input
from jobs.landing.csv_parquet import begins_record
from jobs.landing.json_rows import is_array, is_json
from jobs.landing.key_from_name import salt_of
from jobs.landing.text_lines import is_text
from jobs.specs.model_spec import ModelSpec


def can_be_appended_to(path: Path) -> bool:
    """Tell if a file's format allows to add rows at its end: CSV, JSON or text line by line, not compressed."""
    name = path.name.lower()
    return (
        path.is_file()
        and (name.endswith(".csv") or is_text(path) or is_json(path) and not is_array(path))
        and name[-3:] != ".gz"
    )


def end_of(spec: ModelSpec, path: Path, digests: Iterable[str]) -> int | None:
    """Return the end, in bytes, of the longest of these contents that a file begins with, as whole rows; else None.

    A last row without a line break is whole if the line break follows now.
    """
    wanted = {bytes.fromhex(one) for one in digests if one}
    found: list[int] = []
    digest, place = hashlib.sha256(salt_of(spec, path)), 0
    with open_input(path) as file:
        for line in file:
            row = line.rstrip(b"\r\n")
            bare = digest.copy()
            bare.update(row)
            digest.update(line)
            place += len(line)
            if digest.digest() in wanted or bare.digest() in wanted:
                found.append(place)
    whole = reversed(found)
    if is_json(path) or is_text(path):
        return next(whole, None)
    return next((end for end in whole if begins_record(path, end, spec.file_columns, spec.files)), None)
