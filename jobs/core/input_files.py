"""Find the files that an input names. No Spark."""

from __future__ import annotations

import glob
import stat
from collections.abc import Sequence
from pathlib import Path

from jobs.core.errors import UserError

_SHOWN = 80
NO_TEXT = "its name is not UTF-8 text, and rows are kept with the name of their file; rename it"


def find_files(inputs: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Return the absolute paths of the files that `inputs` (files, folders, globs) name, sorted within each input.

    Raises:
        UserError: an input names no file with one of the suffixes.
    """
    found: list[str] = []
    endings = tuple(suffixes)
    for text in inputs:
        if "://" in text:
            raise UserError(f"{text}: only files on a local or mounted file system can be read")
        names = _named(text, endings)
        if not names:
            raise UserError(f"{text}: no such file, or no {', '.join(endings)} file in that folder")
        for name in names:
            if not name.lower().endswith(endings):
                raise UserError(f"{name}: unknown file format; give {', '.join(endings)}")
            if not has_text_name(name):
                raise UserError(f"{name}: {NO_TEXT}")
        found += names
    return list(dict.fromkeys(str(Path(name).absolute()) for name in found))


def names_several(text: str, suffixes: Sequence[str]) -> bool:
    """Tell if an input is a folder of files or a glob, not a file; a folder with a file's ending is one file of Spark.

    Raises:
        UserError: no path can have this name.
    """
    path = path_of(text)
    if path.is_dir():
        return not path.name.lower().endswith(tuple(suffixes))
    return not path.exists() and bool(set(text) & set("*?["))


def path_of(text: str) -> Path:
    """Return a path as the user wrote it, after checking that the system can have one of this name.

    Raises:
        UserError: it is too long, has a character that no path has, or names a pipe or a device.
    """
    shown = repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
    try:
        path = Path(text).expanduser()
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise UserError(
                f"{shown}: is a pipe or a device, and no file; write its content into a file first"
            )
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError:
        raise UserError(f"{shown}: is no path: it has a character that no path has (NUL)") from None
    except RuntimeError as error:
        raise UserError(f"{shown}: {error}; write the folder's whole path") from None
    except OSError as error:
        raise UserError(f"{shown}: cannot be looked for ({error.strerror}); give another path") from None
    return path


def _named(text: str, endings: tuple[str, ...]) -> list[str]:
    path = path_of(text)
    if path.is_dir():
        some = (one for one in path.iterdir() if one.name[0] not in "._" and is_input(one))
        return sorted(str(one) for one in some if one.name.lower().endswith(endings))
    if path.is_file():
        return [str(path)]
    return sorted(one for one in glob.glob(str(path), recursive=True) if is_input(Path(one)))


def has_text_name(name: str) -> bool:
    """Tell if a file's name is text: a system may have names of any bytes."""
    return name.isascii() or not any("\ud800" <= one <= "\udfff" for one in name)


def is_input(path: Path) -> bool:
    """Tell if a path may be opened: a file, or a folder that Spark wrote; opening a pipe would wait for a writer."""
    return path.is_file() or path.is_dir()
