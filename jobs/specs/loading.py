"""Find and load model specs, and write their JSON schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from jobs.core.errors import extract_first_line
from jobs.core.input_files import UnfitFile, read_regular
from jobs.core.redaction import show_name
from jobs.specs import yaml_text
from jobs.specs.model_spec import EARLIER, LONGEST_NAME, ModelSpec, is_model_name
from jobs.specs.problems import Problem, SpecError, convert_to_problem, suggest_word
from jobs.specs.sections import describe_fields

LARGEST = 256 * 1024
"""Maximum bytes of a spec. They suffice for the maximum count of numbers and as many words."""


def load_spec(name_or_path: str | Path, models_dir: str | Path | None = None) -> ModelSpec:
    """Load a spec by the name of its model (`nile` means `<models_dir>/nile.yaml`) or by the path of its file.

    Args:
        name_or_path: name or path; a text that contains / or ends in .yaml or .yml is a path.
        models_dir: folder of specs; by default `models`.

    Raises:
        SpecError: the file is missing, is not YAML, or is not a valid spec; the message has one line for each problem.
    """
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")) or "/" in text or isinstance(name_or_path, Path):
        return _load(Path(os.path.expanduser(text)))
    folder = Path(models_dir or "models")
    if len(text) > LONGEST_NAME:
        raise SpecError(
            Problem(
                str(folder),
                "",
                f"the name of a model has up to {LONGEST_NAME} characters, and '{show_name(text)}' has {len(text):,}",
                "give the name of a file in this folder",
            )
        )
    path = folder / f"{text}.yaml"
    if not os.path.isfile(path):
        if os.path.lexists(path):
            return _load(path)  # raises an error with the reason
        known = [file.stem for file in list_spec_files(folder)] if folder.is_dir() else []
        hint = suggest_word(text, known) or (
            f"models there are {', '.join(known)}" if known else "there are no models there"
        )
        raise SpecError(Problem(str(path), "", f"there is no model '{text}'", hint))
    spec = _load(path)
    _check_stem(spec, path)
    return spec


def find_deployed_spec(
    name_or_path: str | Path, models_dir: str | Path | None = None
) -> tuple[str, ModelSpec | None]:
    """Return the name of a model and its deployed spec; None if its file is missing or broken.

    The warehouse has the specs of what is live, so its pages do without this file.

    Raises:
        SpecError: there is no such spec, and the name cannot be the name of a model.
    """
    try:
        spec = load_spec(name_or_path, models_dir)
    except SpecError:
        if not is_model_name(str(name_or_path)):
            raise
        return str(name_or_path), None
    return spec.name, spec


def describe_broken_spec(
    model: str, found: ModelSpec | None, models_dir: str | Path | None = None
) -> str | None:
    """Return why the spec of a model was not `found` (`find_deployed_spec`); None if it was, or if it has no file."""
    if found is None and os.path.lexists(Path(models_dir or "models") / f"{model}.yaml"):
        try:
            load_spec(model, models_dir)
        except SpecError as error:
            return f"the spec of {model} cannot be read: {extract_first_line(error)}"
    return None


def list_spec_files(models_dir: str | Path) -> list[Path]:
    """Return the spec files of a folder, sorted by name.

    Raises:
        SpecError: the folder does not exist, or cannot be read.
    """
    folder = Path(models_dir)
    try:
        paths = sorted(folder.iterdir())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None)
        gone = why is None or isinstance(error, FileNotFoundError | NotADirectoryError)
        problem = "there is no such folder of models" if gone else f"cannot be read ({why})"
        raise SpecError(Problem(str(folder), "", problem, "set --models or KALMAN_MODELS")) from error
    return [path for path in paths if path.suffix in (".yaml", ".yml") and not path.name.startswith(".")]


def list_model_names(models_dir: str | Path) -> list[str]:
    """Return the names of a folder's models; an empty list if the folder cannot be read.

    A missing folder is no error, because a warehouse may contain models without specs. A file with a name that no model
    can have is left out.
    """
    try:
        return [path.stem for path in list_spec_files(models_dir) if is_model_name(path.stem)]
    except SpecError:
        return []


def load_all(models_dir: str | Path) -> list[ModelSpec]:
    """Load every spec of a folder, sorted by file name.

    Raises:
        SpecError: a spec is not valid; the error has the problems of all files.
    """
    specs: list[ModelSpec] = []
    problems: list[Problem] = []
    for path in list_spec_files(models_dir):
        try:
            spec = _load(path)
            _check_stem(spec, path)
            specs.append(spec)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return specs


def build_json_schema() -> dict[str, Any]:
    """Return the JSON schema of a spec, with the description of each field."""
    fields = ModelSpec.model_json_schema()
    fields["required"].remove("states")  # a mixture needs no states, as they follow from its measurements
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **fields,
        "title": "kalman-pipeline model spec",
    }


def _load(path: Path) -> ModelSpec:
    try:
        return _load_checked(path)
    except SpecError:
        raise
    except Exception as error:
        # One faulty spec must not break the pages and DAGs of other models, whatever the fault is.
        problem = f"cannot be understood ({type(error).__name__}: {extract_first_line(error, 100)})"
        raise SpecError(Problem(str(path), "", problem, "compare it with docs/models.md")) from error


def _load_checked(path: Path) -> ModelSpec:
    file, document = str(path), _read_document(path)
    if not isinstance(document.value, dict):
        raise SpecError(Problem(file, "", "must be a mapping of fields", "begin with `name: ...`"))
    try:
        spec = ModelSpec.model_validate(document.value)
    except ValidationError as error:
        names, describe = _describe_fields()
        found = [convert_to_problem(one, file, names, describe, document.lines) for one in error.errors()]
        raise SpecError(sorted(found, key=lambda problem: problem.line)) from error
    spec._source, spec._folder, spec._lines = path, _find_models_folder(path), document.lines
    refused = spec.find_refused_functions()
    if refused:
        raise SpecError(refused)
    return spec


def _read_document(path: Path) -> yaml_text.Document:
    file = str(path)
    try:
        return yaml_text.parse(read_regular(path, LARGEST).decode("utf-8-sig"))
    except UnfitFile as error:
        raise SpecError(Problem(file, "", str(error), "a spec is a text file of a few kilobytes")) from error
    except UnicodeDecodeError as error:
        raise SpecError(Problem(file, "", "is not UTF-8 text", "save it as UTF-8")) from error
    except FileNotFoundError as error:
        raise SpecError(
            Problem(file, "", "there is no such file", "give a model's name or the path of a spec")
        ) from error
    except OSError as error:
        raise SpecError(
            Problem(file, "", f"cannot be read ({error.strerror})", "give the path of a readable file")
        ) from error
    except yaml_text.YamlError as error:
        place = f"{file}:{error.line}" + (f":{error.column}" if error.column else "")
        field = ".".join(str(part) for part in error.path)
        remedy = (
            "each field is given once"
            if "twice" in error.problem
            else "check indentation, brackets and quotes there"
        )
        field = field if len(field) <= 100 else f"{field[:97]}..."
        problem = error.problem if field else f"is not valid YAML: {error.problem}"
        raise SpecError(Problem(place, field, problem, remedy)) from error


def _find_models_folder(path: Path) -> str:
    """Return the folder of models to which a spec's file belongs; it may be in the subfolder of earlier versions."""
    parent = path.resolve().parent
    return str(parent.parent if parent.name == EARLIER else parent)


def _check_stem(spec: ModelSpec, path: Path) -> None:
    # The name of a model must be the name of its file, so that two files cannot define the same model.
    if spec.name != path.stem:
        raise SpecError(
            spec.problem(
                "name", f"'{spec.name}' differs from its file's name", f"name the file {spec.name}.yaml"
            )
        )


def _describe_fields() -> tuple[dict[tuple[str, ...], list[str]], dict[str, str]]:
    """Return the names of each section's fields, by the section's path, and the description of each field."""
    names: dict[tuple[str, ...], list[str]] = {}
    describe: dict[str, str] = {}

    def walk(model: type[BaseModel], path: tuple[str, ...]) -> None:
        names[path] = [field.alias or name for name, field in model.model_fields.items()]
        texts = describe_fields(model)
        for name, (known, field) in zip(names[path], model.model_fields.items(), strict=True):
            describe[".".join((*path, name))] = texts.get(known, field.description or "")
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    walk(kind, (*path, name))

    walk(ModelSpec, ())
    return names, describe
