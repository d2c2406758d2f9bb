"""Build linear filters in any form, and extended, unscented and cubature filters, from definitions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kalman.filters.gaussian import FORMS, GaussianFilter
from kalman.filters.linear import LinearFilter, build_linear
from kalman.filters.sigma_points import PointRule, build_cubature_rule, build_unscented_rule
from kalman.models import checks, columns
from kalman.models import definition as definitions
from kalman.models.angles import parse_wrap
from kalman.models.columns import Cell, Cells
from kalman.models.definition import Definition
from kalman.models.functions import (
    FunctionObservation,
    FunctionProcess,
    check_observation,
    check_process,
    compute_deviations,
    parse_observation,
    parse_observation_offset,
    parse_process,
)
from kalman.models.inputs import noise_scale
from kalman.models.structures import Structure
from kalman.types import ModelError


def build_any_linear(definition: Definition, learned: Mapping[str, Any]) -> LinearFilter | GaussianFilter:
    """Return the linear filter of a definition, in its form. Raises ModelError."""
    form = _parse_form("linear", definition)
    linear = build_linear(definition, learned)
    if form == "covariance":
        return linear
    if linear.diffuse:
        raise ModelError(
            "initial.diffuse",
            f"the form {form} needs a covariance to start from",
            "use form: covariance, or a wide covariance",
        )
    return _check_information_noise(
        GaussianFilter(
            linear.states,
            linear.measurements,
            linear.controls,
            linear.process,
            linear.H,
            None,
            form,
            linear.parameters,
            linear.mean,
            linear.covariance,
            linear.own,
            linear.offset,
            linear.noise_scale,
            own_start=linear.own_start,
        )
    )


def build_extended(definition: Definition, learned: Mapping[str, Any]) -> GaussianFilter:
    """Return the extended filter of a definition. Raises ModelError."""
    return _build("extended", definition, learned)


def build_unscented(definition: Definition, learned: Mapping[str, Any]) -> GaussianFilter:
    """Return the unscented filter of a definition. Raises ModelError."""
    return _build("unscented", definition, learned)


def build_cubature(definition: Definition, learned: Mapping[str, Any]) -> GaussianFilter:
    """Return the cubature filter of a definition. Raises ModelError."""
    return _build("cubature", definition, learned)


def _build(kind: str, definition: Definition, learned: Mapping[str, Any]) -> GaussianFilter:
    states = definitions.parse_names("states", definition.get("states"))
    measurement = definitions.parse_names("measurement", definition.get("measurement"))
    controls = definitions.parse_names("control", definition.get("control") or (), empty=True)
    n, measurements = len(states), len(measurement)
    periods = parse_wrap(definition.get("observation"), measurement)
    process, seen = _parse_model_parts(definition, n, measurements, controls, periods)
    drawn = 0
    if isinstance(process, FunctionProcess) and process.noise_inside:
        _check_inside(kind, definition, process)
        drawn = n + process.noise_size
    observation = seen.H
    parameters = definitions.build_parameters(definition, process, seen.R, learned)
    names, scope = definitions.learn_request(definition, parameters)
    own = names if scope != "pooled" else ()
    (mean, covariance, diffuse), own_start = definitions.start(definition, n, controls)
    if diffuse:
        raise ModelError(
            "initial.diffuse",
            f"the {kind} filter needs a distribution to start from",
            "write a mean, and a covariance as wide as what is known",
        )
    disturbed = 0
    if isinstance(observation, FunctionObservation) and observation.noise_inside:
        _check_disturbed(kind, definition, observation)
        disturbed = n + observation.noise_size
    form, rule = _parse_form(kind, definition), _build_rule(kind, definition, n)
    spread = compute_deviations(covariance, n)
    if isinstance(process, FunctionProcess):
        check_process(process, mean, spread, len(controls), own_start is None)
    if isinstance(observation, FunctionObservation):
        check_observation(observation, mean, spread, len(controls), own_start is None)
    return _check_information_noise(
        GaussianFilter(
            states,
            measurements,
            len(controls),
            process,
            observation,
            rule,
            form,
            parameters,
            mean,
            covariance,
            own,
            seen.offset,
            seen.noise_scale,
            periods,
            _build_rule(kind, definition, drawn) if drawn else None,
            own_start,
            _build_rule(kind, definition, disturbed) if disturbed else None,
        )
    )


class ParsedObservation(NamedTuple):
    """The observation of a definition, as `definition.Observation`; H may be a function."""

    H: Cells | FunctionObservation
    R: tuple[Cell, ...]
    offset: tuple[Cell, ...]
    noise_scale: Cell


def _parse_model_parts(
    definition: Definition,
    n: int,
    measurements: int,
    controls: tuple[str, ...],
    periods: tuple[float, ...],
) -> tuple[Structure | FunctionProcess, ParsedObservation]:
    """Return process and observation."""
    written, seen, folder = definition.get("process"), definition.get("observation"), definition.get("folder")
    if isinstance(written, Mapping) and written.get("kind") == "function":
        process: Any = parse_process(written, n, controls, folder)
    else:
        process = None
    if isinstance(seen, Mapping) and seen.get("h") is not None:
        if seen.get("H") is not None:
            raise ModelError("observation.h", "is given beside H", "keep one of them")
        h = parse_observation(seen, n, measurements, periods, folder)
        if process is None:
            process = definitions.parse_process(definition, n, controls, all_used=h.controlled)
        R = checks.require_key("observation", seen, "R")
        R = columns.parse_covariance_cells("observation.R", R, h.noise_size, controls)
        offset = parse_observation_offset(seen, measurements, controls)
        return process, ParsedObservation(h, R, offset, noise_scale("observation", seen, controls))
    if process is None:
        process = definitions.parse_process(definition, n, controls)
    if periods and isinstance(seen, Mapping):
        seen = {name: value for name, value in seen.items() if name != "wrap"}
    return process, ParsedObservation(*definitions.parse_observation(seen, process, measurements, controls))


def _check_inside(kind: str, definition: Definition, process: FunctionProcess) -> None:
    """Refuse options that do not work when the process's function takes its noise as an argument."""
    _check_drawn(kind, "process", process.noise_jacobian)
    remedy = "remove it, or let f take x, dt and u, and add the noise"
    _check_absent(definition, ("robust.fading", "adaptive.Q"), (None, 1.0), "process", remedy)


def _check_disturbed(kind: str, definition: Definition, observation: FunctionObservation) -> None:
    """Refuse options that do not work when the observation's function takes its noise as an argument."""
    _check_drawn(kind, "observation", observation.noise_jacobian)
    remedy = "remove it, or let h take x and u, and add the noise"
    _check_absent(definition, ("robust.huber", "adaptive.R"), (None,), "observation", remedy)


def _check_drawn(kind: str, of: str, noise_jacobian: object) -> None:
    if kind != "extended" and noise_jacobian is not None:
        problem = f"the {kind} filter draws the noise at points"
        raise ModelError(f"{of}.noise_jacobian", problem, "remove it, or use filter: extended")


def _check_absent(
    definition: Definition, fields: Sequence[str], allowed: tuple[Any, ...], of: str, remedy: str
) -> None:
    for field in fields:
        section, name = field.split(".")
        written = definition.get(section)
        if isinstance(written, Mapping) and written.get(name) not in allowed:
            raise ModelError(field, f"does not go with noise inside the {of}'s function", remedy)


def _parse_form(kind: str, definition: Definition) -> str:
    form = definition.get("form") or "covariance"
    if form not in FORMS:
        raise ModelError("form", f"{form!r} is not a form", f"choose one of {', '.join(FORMS)}")
    if form == "information" and kind not in ("linear", "extended"):
        raise ModelError(
            "form", f"the {kind} filter has no information form", "choose covariance or square_root"
        )
    if definition.get("unscented") is not None and kind != "unscented":
        raise ModelError(
            "unscented", f"the {kind} filter has no such points", "remove it, or use filter: unscented"
        )
    return form


def _build_rule(kind: str, definition: Definition, n: int) -> PointRule | None:
    """Return the sigma-point rule of a kind of filter. Raises ModelError."""
    if kind == "extended":
        return None
    if kind == "cubature":
        return build_cubature_rule(n)
    section = definition.get("unscented") or {}
    checks.check_keys("unscented", section, ("alpha", "beta", "kappa"))
    alpha = checks.parse_positive("unscented.alpha", section.get("alpha", 1.0))
    beta = checks.parse_number("unscented.beta", section.get("beta", 0.0))
    kappa = checks.parse_number("unscented.kappa", section.get("kappa", 2.0))
    if n + kappa <= 0.0:
        raise ModelError(
            "unscented.kappa", f"{kappa!r} leaves no spread to {n} states", f"write a number above {-n}"
        )
    return build_unscented_rule(n, alpha, beta, kappa)


def _check_information_noise(model: GaussianFilter) -> GaussianFilter:
    """Return the filter. Raises ModelError where the information form would divide by singular noise."""
    if model.form == "information" and not model.noisy and "R" not in model.own:
        raise ModelError(
            "observation.R",
            "the information form divides by it, and it is singular or comes from a column",
            "use form: covariance",
        )
    return model
