"""Build a mixture from a model definition, whose components are written, learned, or still to be learned."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kalman.linalg.packing import unpack_symmetric
from kalman.mixtures.categorical import Categorical
from kalman.mixtures.components import Components, predict_moments, unpack_components
from kalman.mixtures.families import Bernoulli, Family, Gaussian, Poisson
from kalman.mixtures.online import MixtureFilter
from kalman.mixtures.starts import MixtureStart, list_start_controls, replace_column_names
from kalman.models import checks, columns, definition
from kalman.models.columns import Cell, Column
from kalman.models.definition import Definition
from kalman.models.structures import Parameter
from kalman.types import ModelError

FAMILIES: dict[str, Family] = {
    "gaussian_mixture": Gaussian(),
    "poisson_mixture": Poisson(),
    "bernoulli_mixture": Bernoulli(),
    "categorical_mixture": Categorical(()),
}
"""Family of each kind of filter; the family of categories is completed with the numbers of categories."""
MOST = 50
"""Maximum number of components."""
MOST_CATEGORIES = 64
"""Maximum number of categories of all measurements together."""
OFFSET = 20.0
"""Weight of the start as a number of steps; with 20, each of a key's first rows moves the mixture by about a sixth."""
FLOORS = {**dict.fromkeys(FAMILIES, 1e-9), "gaussian_mixture": 1e-6}


class Steps(NamedTuple):
    """The step options of a `MixtureFilter`, which are numbers or columns."""

    decay: Cell = 0.6
    offset: Cell = OFFSET
    minimum: Cell = 0.0
    batch: int | Column = 1


class Request(NamedTuple):
    """The mixture that a definition requests.

    m       number of measurements
    states  names of the entries of a component's mean
    count   number of components
    start   the components as flat numbers; () before learning
    floor   factor of the lower bounds that keep components from degenerating
    learn   names of the parameters to learn
    scope   pooled or key
    starts  number of starts of the learning
    holdout fraction of the rows that is used to choose one of the starts
    own_start  a key's start from columns; `start` is then a placeholder
    steps   step options of the online mixture
    """

    family: Family
    m: int
    states: tuple[str, ...]
    count: int
    start: tuple[float, ...]
    floor: float
    learn: tuple[str, ...]
    scope: str
    starts: int
    holdout: float
    controls: int = 0
    own_start: MixtureStart | None = None
    steps: Steps = Steps()

    @property
    def n(self) -> int:
        """Return the number of entries of a component's mean."""
        return len(self.states)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of a mixture's parameters."""
        return list_parameter_names(self.family)


def list_parameter_names(family: Family) -> tuple[str, ...]:
    """Return the names of a mixture's parameters, which are the weights and the parameters of its components."""
    return ("weights", family.mean, *((family.spread,) if family.spread else ()))


def build_mixture(given: Definition, learned: Mapping[str, Any]) -> MixtureFilter:
    """Return the online mixture of a definition. Raises ModelError."""
    asked = request(given, learned)
    options, steps = _parse_options(given), asked.steps
    return MixtureFilter(
        asked.states,
        asked.m,
        asked.controls,
        asked.family,
        asked.count,
        steps.decay,
        steps.offset,
        steps.minimum,
        steps.batch,
        compute_least_bounds(asked, asked.start) if asked.start else (0.0,) * asked.n,
        asked.start,
        checks.parse_integer("mixture.warm_up", options.get("warm_up", 0), 0, 1_000_000),
        asked.own_start,
    )


def request(given: Definition, learned: Mapping[str, Any] | None = None) -> Request:
    """Return the mixture of a definition, with learned parameters in place of written parameters."""
    kind = given["filter"]
    for section in ("process", "observation", "initial"):
        if given.get(section) is not None:
            raise ModelError(section, f"a {kind} has none", "remove it; the components are in mixture")
    measurement = definition.parse_names("measurement", given.get("measurement"))
    controls = definition.parse_names("control", given.get("control") or (), empty=True)
    options = _parse_options(given)
    family, default = _parse_family(kind, options, measurement)
    states = _list_states(given, default, measurement)
    names = list_parameter_names(family)
    for name in learned or {}:
        if name not in names:
            raise ModelError(
                f"parameters.{name}", "the model has no such parameter", f"it has {', '.join(names)}"
            )
    wanted, scope = definition.learn_request(given, tuple(Parameter(n, "number", ()) for n in names))
    if scope == "group":
        raise ModelError("learn.scope", f"a {kind} is not learned by group", "choose pooled or key")
    if (given.get("learn") or {}).get("by"):
        raise ModelError("learn.by", f"the keys of a {kind} lean on all keys", "remove it")
    written = {name: options[name] for name in names if name in options} | dict(learned or {})
    count = _count(options, written)
    written, own_start = replace_column_names(family, count, len(measurement), written, controls)
    steps = _parse_steps(options, controls)
    definition.check_controls(controls, list_start_controls(own_start) | columns.find_columns(steps))
    _check_own_start(given, own_start)
    start = _start(family, count, len(measurement), written, learned or {})
    if not start:
        for name in names:
            if name not in wanted and name != "weights":
                remedy = f"write it, or let pretrain learn it: learn: {{parameters: [{', '.join(names)}]}}"
                raise ModelError(f"mixture.{name}", "is missing", remedy)
    floor = checks.parse_positive("mixture.floor", options.get("floor", FLOORS[kind]))
    if family.mean == "probabilities" and floor >= 1.0 / max(getattr(family, "categories", (2,))):
        raise ModelError("mixture.floor", f"{floor!r} is too large a floor", "write less than 0.5")
    starts = checks.parse_integer("mixture.starts", options.get("starts", 5), 1, 100)
    holdout = checks.parse_positive("mixture.holdout", options.get("holdout", 0.1), zero=True)
    if holdout > 0.5:
        raise ModelError("mixture.holdout", f"{holdout!r} is more than half", "write 0.5 or less")
    return Request(
        family,
        len(measurement),
        states,
        count,
        start,
        floor,
        wanted,
        scope,
        starts,
        holdout,
        len(controls),
        own_start,
        steps,
    )


def _list_states(
    given: Definition, default: tuple[str, ...], measurement: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the states; the default is the names of the measurements or of their categories."""
    states = definition.parse_names("states", given.get("states") or default)
    if len(states) != len(default):
        one, all_of = (
            ("category", "categories") if default != measurement else ("measurement", "measurements")
        )
        remedy = f"name a state for each {one}, in the same order, or leave states out"
        raise ModelError("states", f"{len(states)} named for {len(default)} {all_of}", remedy)
    return states


def _parse_steps(options: Mapping[str, Any], controls: Sequence[str]) -> Steps:
    """Return the step options of a mixture."""
    step = options.get("step") or {}
    checks.check_keys("mixture.step", step, ("decay", "offset", "minimum"))

    def given(name: str, default: float) -> Cell:
        field, value = f"mixture.step.{name}", step.get(name, default)
        if isinstance(value, str):
            return columns.parse_cell(field, value, controls)
        return checks.parse_positive(field, value, zero=name == "minimum")

    steps = Steps(given("decay", 0.6), given("offset", OFFSET), given("minimum", 0.0))
    for name in ("decay", "minimum"):
        value = getattr(steps, name)
        if not isinstance(value, Column) and value > 1.0:
            raise ModelError(f"mixture.step.{name}", f"{value!r} is above one", "write 1.0 or less")
    batch = options.get("batch", 1)
    if isinstance(batch, str):
        found = columns.parse_cell("mixture.batch", batch, controls)
        assert isinstance(found, Column)
        return steps._replace(batch=found)
    return steps._replace(batch=checks.parse_integer("mixture.batch", batch, 1, 1_000_000))


def _check_own_start(given: Definition, own_start: MixtureStart | None) -> None:
    if own_start is not None and given.get("learn") is not None:
        problem = "components come from columns, and what is learned is the same for all keys"
        raise ModelError("learn", problem, "keep one of them")


def compute_least_bounds(asked: Request, start: Any) -> tuple[float, ...]:
    """Return the lower bounds that keep components from degenerating, given the flat components `start`."""
    mixture = split(asked, start)
    _, covariance = predict_moments(asked.family, mixture)
    full = unpack_symmetric(covariance)
    return asked.family.least(asked.floor, [float(full[i][i]) for i in range(asked.n)])


def split(asked: Request, flat: Any) -> Components:
    """Return the components from a flat sequence of their numbers."""
    return unpack_components(flat, asked.count, asked.n, asked.family.spreads(asked.m))


def _parse_options(given: Definition) -> dict[str, Any]:
    known = (
        *("components", "step", "batch", "warm_up", "floor", "starts", "holdout", "weights", "categories"),
        *(name for family in FAMILIES.values() for name in list_parameter_names(family)[1:]),
    )
    found = given.get("mixture")
    if found is None:
        raise ModelError("mixture", "is missing", "add mixture: {components: 2, ...}")
    checks.check_keys("mixture", found, known)
    allowed = list_parameter_names(FAMILIES[given["filter"]])
    for family in FAMILIES.values():
        for name in list_parameter_names(family):
            if found.get(name) is not None and name not in allowed:
                remedy = f"write {', '.join(allowed)}"
                raise ModelError(f"mixture.{name}", f"a {given['filter']} has none", remedy)
    return {name: value for name, value in found.items() if value is not None}


def _parse_family(
    kind: str, options: Mapping[str, Any], measurement: tuple[str, ...]
) -> tuple[Family, tuple[str, ...]]:
    """Return the family of a kind of filter, and the default names of the states."""
    given = options.get("categories")
    if kind != "categorical_mixture":
        if given is not None:
            raise ModelError("mixture.categories", f"a {kind} has none", "remove it")
        return FAMILIES[kind], measurement
    if given is None:
        raise ModelError("mixture.categories", "is missing", "write how many each measurement has, such as 3")
    each = [given] * len(measurement) if isinstance(given, int) else given
    if not isinstance(each, (list, tuple)) or len(each) != len(measurement):
        raise ModelError(
            "mixture.categories",
            "is not one number for each measurement",
            f"write a list of {len(measurement)}",
        )
    counts = tuple(checks.parse_integer("mixture.categories", count, 2, MOST_CATEGORIES) for count in each)
    if sum(counts) > MOST_CATEGORIES:
        remedy = f"keep to {MOST_CATEGORIES}: put rare categories together"
        raise ModelError(
            "mixture.categories", f"all measurements together have {sum(counts)} categories", remedy
        )
    pairs = zip(measurement, counts, strict=True)
    return Categorical(counts), tuple(f"{name}_{code}" for name, count in pairs for code in range(count))


def _count(options: Mapping[str, Any], written: Mapping[str, Any]) -> int:
    lengths = [len(a) for a in written.values() if isinstance(a, (list, tuple))]
    if "components" not in options and not lengths:
        raise ModelError("mixture.components", "is missing", "write how many there are, such as 2")
    return checks.parse_integer("mixture.components", options.get("components", (lengths or [1])[0]), 1, MOST)


def _start(
    family: Family, count: int, m: int, written: Mapping[str, Any], learned: Mapping[str, Any]
) -> tuple[float, ...]:
    """Return the components as flat numbers; () before learning."""
    if family.mean not in written:
        left = [name for name in (family.spread, "weights") if name in written]
        if left:
            field = f"mixture.{left[0]}"
            raise ModelError(field, f"is given without {family.mean}", f"write {family.mean} too")
        return ()

    def place(name: str) -> str:
        return f"parameters.{name}" if name in learned else f"mixture.{name}"

    weights = _parse_weights(place("weights"), written.get("weights"), count)
    means = _parse_means(place(family.mean), written[family.mean], count, family.entries(m))
    for k, mean in enumerate(means):
        for value in mean:
            if family.mean == "rates":
                checks.parse_positive(f"{place(family.mean)}[{k}]", value)
            if family.mean == "probabilities" and not 0.0 < value < 1.0:
                remedy = "write a number between 0 and 1"
                raise ModelError(f"{place(family.mean)}[{k}]", f"{value!r} is not between them", remedy)
        if isinstance(family, Categorical):
            means[k] = _sum_to_one(f"{place(family.mean)}[{k}]", family, mean)
    flat = [*weights, *(a for mean in means for a in mean)]
    if family.spread:
        name = family.spread
        given = checks.require_key(place(name).partition(".")[0], written, name)
        if not isinstance(given, (list, tuple)) or len(given) != count:
            raise ModelError(place(name), "is not one for each component", f"write a list of {count}")
        for k, value in enumerate(given):
            packed = checks.parse_covariance(f"{place(name)}[{k}]", value, m)
            if np.linalg.eigvalsh(np.array(unpack_symmetric(packed))).min() <= 0.0:
                remedy = "write a positive definite one"
                raise ModelError(f"{place(name)}[{k}]", "it is singular", remedy)
            flat += packed
    return tuple(float(a) for a in flat)


def _sum_to_one(field: str, family: Categorical, mean: tuple[float, ...]) -> tuple[float, ...]:
    """Return the probabilities, normalised to sum to 1 for each measurement."""
    result: list[float] = []
    for part in family.parts():
        total = sum(mean[i] for i in part)
        if abs(total - 1.0) > 1e-6:
            remedy = "write those of each measurement's categories, one measurement after the other"
            raise ModelError(field, f"those of a measurement sum to {total:g}", remedy)
        result += [mean[i] / total for i in part]
    return tuple(result)


def _parse_weights(field: str, value: Any, count: int) -> list[float]:
    if value is None:
        return [1.0 / count] * count
    weights = [checks.parse_positive(field, a) for a in checks.parse_vector(field, value, count)]
    if abs(sum(weights) - 1.0) > 1e-6:
        raise ModelError(field, f"they sum to {sum(weights):g}", "write weights that sum to 1")
    return [a / sum(weights) for a in weights]


def _parse_means(field: str, value: Any, count: int, m: int) -> list[tuple[float, ...]]:
    """Return a vector for each component; with one measurement, a number may be written in place of a vector."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise ModelError(field, "is not one for each component", f"write a list of {count}")
    rows = [[a] if m == 1 and not isinstance(a, (list, tuple)) else a for a in value]
    return [checks.parse_vector(f"{field}[{k}]", row, m) for k, row in enumerate(rows)]
