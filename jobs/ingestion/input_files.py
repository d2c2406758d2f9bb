"""Find the files that an input names. No Spark."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

from jobs.core.errors import UserError


def find_files(inputs: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Return the absolute paths of the files that `inputs` (files, folders, globs) name, sorted within each input.

    Raises:
        UserError: an input names no file with one of the suffixes.
    """
    found: list[str] = []
    endings = tuple(suffixes)
    for text in inputs:
        path = Path(text).expanduser()
        if "://" in text:
            raise UserError(f"{text}: only files on a local or mounted file system can be read")
        if path.is_dir():
            names = sorted(
                str(p) for p in path.iterdir() if p.name.endswith(endings) and p.name[0] not in "._"
            )
        elif path.is_file():
            names = [str(path)]
        else:
            names = sorted(glob.glob(str(path)))
        if not names:
            raise UserError(f"{text}: no such file, or no {', '.join(endings)} file in that folder")
        for name in names:
            if not name.lower().endswith(endings):
                raise UserError(f"{name}: unknown file format; give {', '.join(endings)}")
        found += names
    return list(dict.fromkeys(str(Path(name).absolute()) for name in found))
