"""Parse the parts of a definition that several kinds of filters share. Errors name the field."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from kalman.linalg.packing import packed_index, packed_size, unpack_symmetric
from kalman.models import checks, columns, structures
from kalman.models.inputs import noise_scale
from kalman.models.learned_entries import INITIAL, learn_requests, list_key_entries, parse_entry_name
from kalman.models.starts import Start, replace_columns
from kalman.models.structures import Parameter
from kalman.types import ModelError

Definition = Mapping[str, Any]


class Parametric(Protocol):
    """An object that has the parameters of a process."""

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...


def parse_process(
    definition: Definition, states: int, controls: Sequence[str], all_used: bool = False
) -> structures.Structure:
    """Return the process of a definition, checked against the number of states and the names of the controls.

    all_used: whether another part of the model uses all controls.
    """
    found = structures.parse("process", definition.get("process"), controls)
    if found.size != states:
        raise ModelError(
            "states",
            f"{states} named, but the process has {found.size}",
            f"name {checks.format_count(found.size, 'state')}",
        )
    texts = {a for name in ("observation", "robust", "initial") for a in _list_texts(definition.get(name))}
    named = {i for i, name in enumerate(controls) if name in texts}
    if not definition.get("mode"):  # a control that is unused in one mode may be used in another mode
        check_controls(() if found.controlled or all_used else controls, columns.find_columns(found) | named)
    return _with_entries(found, list_key_entries(definition, "FA"))


def _with_entries(process: structures.Structure, entries: tuple[Parameter, ...]) -> structures.Structure:
    """Return the process with these entries of its matrix as parameters."""
    if not entries:
        return process
    if isinstance(process, structures.Scaled):
        return replace(process, inner=_with_entries(process.inner, entries))
    assert isinstance(process, (structures.Explicit, structures.Continuous))  # no other kind has entries
    return replace(process, entries=entries)


def check_controls(controls: Sequence[str], used: set[int]) -> None:
    """Raise ModelError unless every control is used; used: indices of the used controls."""
    for i, name in enumerate(controls):
        if i not in used:
            raise ModelError(
                "control",
                f"the model does not use it: {name}",
                "name it as an entry of a matrix, use a process with B, or remove it from control",
            )


def build_parameters(
    definition: Definition, process: Parametric, R: tuple[columns.Cell, ...], learned: Mapping[str, Any]
) -> tuple[Parameter, ...]:
    """Return the parameters of a process, R, and entries of H, with learned values in place of written values."""
    every = (*process.parameters, Parameter("R", "covariance", R), *list_key_entries(definition, "H"))
    all_parameters = tuple(replace_value(parameter, learned) for parameter in every)
    unknown = set(learned) - {parameter.name for parameter in all_parameters}
    if unknown:
        raise ModelError(
            f"parameters.{sorted(unknown)[0]}",
            "the model has no such parameter",
            f"it has {', '.join(p.name for p in all_parameters)}",
        )
    return all_parameters


def learn_request(definition: Definition, parameters: tuple[Parameter, ...]) -> tuple[tuple[str, ...], str]:
    """Return the names to learn, in the order of the model's parameters, and the scope: pooled, group or key."""
    learn = definition.get("learn")
    if learn is None:
        return (), "pooled"
    if not isinstance(learn, Mapping):
        raise ModelError("learn", f"{learn!r} is not a mapping", "write parameters under it, or remove it")
    scope = learn.get("scope") or "pooled"
    if scope not in ("pooled", "group", "key"):
        raise ModelError("learn.scope", f"{scope!r} is not known", "choose pooled, group or key")
    if scope == "group" and not learn.get("by"):
        remedy = "write both, such as scope: group, by: [region]"
        raise ModelError("learn.by", "is missing: it names the key columns that make the groups", remedy)
    if scope == "pooled" and learn.get("by"):
        remedy = "write scope: group (one value a group) or scope: key (a population a group), or remove it"
        raise ModelError("learn.by", "goes with scope: group or key", remedy)
    known = [parameter.name for parameter in parameters]
    asked = [
        request
        for request in learn_requests(definition)
        if request.name in known or not (request.name in INITIAL or parse_entry_name(request.name))
    ]
    wanted = [request.name for request in asked]
    for name, field in zip(wanted, [request.field for request in asked], strict=True):
        if name not in known:
            raise ModelError(
                field,
                f"the model has no parameter {name!r}",
                f"choose from {', '.join(known)}",
            )
    varying = {parameter.name for parameter in parameters if columns.find_columns(parameter.value)}
    for name, field in zip(wanted, [request.field for request in asked], strict=True):
        if name in varying:
            raise ModelError(
                field,
                f"{name} comes from a column",
                "learn others, or write it as numbers and let the column be its noise_scale",
            )
    return tuple(name for name in known if name in wanted), scope


def convert_to_definition(parameter: Parameter) -> Any:
    """Return a parameter's value as a definition contains it: a number, a vector, or the rows of a matrix."""
    if parameter.kind == "covariance":
        return [
            [float(entry) for entry in row]
            for row in unpack_symmetric(columns.require_numbers(parameter.value))
        ]
    if parameter.kind == "transition":
        flat = columns.require_numbers(parameter.value)
        width = round(len(flat) ** 0.5)
        return [[float(a) for a in flat[i : i + width]] for i in range(0, len(flat), width)]
    if parameter.kind in ("vector", "chances"):
        return [float(entry) for entry in columns.require_numbers(parameter.value)]
    return float(columns.require_numbers(parameter.value)[0])


def replace_value(parameter: Parameter, learned: Mapping[str, Any]) -> Parameter:
    """Return the parameter with its learned value, if there is one."""
    if parameter.name not in learned:
        return parameter
    field, value = f"parameters.{parameter.name}", learned[parameter.name]
    if parameter.kind == "covariance":
        size = len(unpack_symmetric(parameter.value))
        return parameter._replace(value=checks.parse_covariance(field, value, size))
    if parameter.kind == "positive":
        return parameter._replace(value=(checks.parse_positive(field, value, zero=True),))
    return parameter._replace(value=(checks.parse_number(field, value),))


def parse_names(field: str, value: Any, *, empty: bool = False) -> tuple[str, ...]:
    """Return a list of distinct names."""
    if isinstance(value, (list, tuple)) and (value or empty) and all(isinstance(v, str) and v for v in value):
        for i, name in enumerate(value):
            if name in value[:i]:
                raise ModelError(f"{field}[{i}]", f"{name} is named twice", "name each once")
        return tuple(value)
    raise ModelError(field, f"{value!r} is not a list of names", "write a list such as [level]")


class Observation(NamedTuple):
    """The observation of a definition: H, packed R, offset (() for no offset), the scale of R."""

    H: columns.Cells
    R: tuple[columns.Cell, ...]
    offset: tuple[columns.Cell, ...]
    noise_scale: columns.Cell


def parse_observation(
    definition: Any, process: structures.Structure, measurements: int, controls: Sequence[str]
) -> Observation:
    """Return the observation of a definition; entries may be columns of the controls."""
    if isinstance(definition, Mapping) and definition.get("h") is not None:
        raise ModelError(
            "observation.h",
            "this filter takes no function",
            "write H, or choose filter: extended, unscented or cubature",
        )
    if isinstance(definition, Mapping) and definition.get("wrap") is not None:
        raise ModelError(
            "observation.wrap",
            "this filter takes no angles",
            "choose filter: extended, which is the same filter where the model is linear",
        )
    field = "observation"
    checks.check_keys(field, definition, ("H", "R", "offset", "noise_scale"))
    n = process.size
    if definition.get("H") is not None:
        H = columns.parse_matrix_cells("observation.H", definition["H"], measurements, n, controls)
    elif process.observes is not None and len(process.observes) == measurements:
        H = process.observes
    else:
        raise ModelError(
            "observation.H",
            "is missing, and the process does not tell which of its states a measurement sees",
            f"write a list of rows, {measurements} x {n}: a row a measurement, a column a state, such as "
            f"{checks.format_example(measurements, n)}",
        )
    R = columns.parse_covariance_cells(
        "observation.R", checks.require_key(field, definition, "R"), measurements, controls
    )
    offset = ()
    if definition.get("offset") is not None:
        offset = columns.parse_vector_cells(
            "observation.offset", definition["offset"], measurements, controls
        )
    return Observation(H, R, offset, noise_scale(field, definition, controls))


def start(
    definition: Definition, n: int, controls: Sequence[str]
) -> tuple[tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]], Start | None]:
    """Return the result of `parse_initial` and the start from columns. Raises ModelError.

    The result of `parse_initial` has placeholders in place of columns. Without columns, the start is None.
    """
    written = definition.get("initial")
    moments = [written.get(name) for name in ("mean", "covariance")] if isinstance(written, Mapping) else []
    if not isinstance(written, Mapping) or not any(True for _ in _list_texts(moments)):
        return parse_initial(written, n), None
    checks.check_keys("initial", written, ("mean", "covariance", "diffuse"))
    for section, problem in (
        (written.get("diffuse"), "diffuse: this state comes from a column too"),
        (definition.get("learn"), "it comes from columns, and what is learned starts from numbers"),
    ):
        if section:
            raise ModelError("initial", problem, "keep one of them")
    mean = columns.parse_vector_cells(
        "initial.mean", checks.require_key("initial", written, "mean"), n, controls
    )
    rows = checks.require_key("initial", written, "covariance")
    middle, spread = replace_columns(
        mean, columns.parse_matrix_cells("initial.covariance", rows, n, n, controls)
    )
    own = Start(mean, columns.parse_covariance_cells("initial.covariance", rows, n, controls))
    return (middle, spread, ()), own


def parse_initial(definition: Any, n: int) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return mean, packed covariance and diffuse factor of the state at a key's first row."""
    checks.check_keys("initial", definition, ("mean", "covariance", "diffuse"))
    diffuse = definition.get("diffuse")
    flags = [diffuse or False] * n if diffuse is None or isinstance(diffuse, bool) else diffuse
    if not isinstance(flags, (list, tuple)) or len(flags) != n or not all(isinstance(a, bool) for a in flags):
        raise ModelError(
            "initial.diffuse", f"{diffuse!r} is not true or false", f"write one, or a list of {n}"
        )
    if all(flags) and "mean" not in definition and "covariance" not in definition:
        mean, covariance = (0.0,) * n, (0.0,) * packed_size(n)
    else:
        mean = checks.parse_vector("initial.mean", checks.require_key("initial", definition, "mean"), n)
        covariance = checks.parse_covariance(
            "initial.covariance", checks.require_key("initial", definition, "covariance"), n
        )
    if not any(flags):
        return mean, covariance, ()
    for i in range(n):
        if flags[i] and any(covariance[packed_index(i, j)] != 0.0 for j in range(n)):
            raise ModelError(
                f"initial.covariance[{i}]",
                "this state is diffuse and has a covariance too",
                "write zeros in its row",
            )
    return mean, covariance, tuple(float(i == j) for i in range(n) for j in range(n) if flags[j])


def _list_texts(value: Any) -> Iterator[str]:
    """Yield all texts in a part of a definition."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _list_texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _list_texts(item)
