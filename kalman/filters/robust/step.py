"""Parts of a robust step, shared by the linear and Gaussian filters: gating, scores, and noise adaptation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kalman.filters.recursions import choose
from kalman.filters.robust import adaptive, updates
from kalman.filters.robust.adaptive import Adaptive
from kalman.filters.robust.updates import Gate, Huber, Innovation, Noise, Robust
from kalman.linalg.entries import Entry, Matrix, Vector, minus, plus, times
from kalman.linalg.packing import packed_index
from kalman.models import definition as definitions
from kalman.models.columns import Cell
from kalman.models.structure import Parameter, Values
from kalman.types import Array, ModelError


class RowView(NamedTuple):
    """A row's innovation v with covariance C + R, the measurement matrix H, and masks of keys.

    R: noise covariance, already weighted by w; w: weights of the components, empty without weights
    undetermined: mask (K,) of diffuse keys, None for no keys
    first: mask (K,) of keys at their first row; False means no keys, True means all keys
    """

    v: Vector
    C: Vector
    H: Callable[[], Matrix]
    R: Vector
    w: Vector
    presents: Sequence[Any]
    undetermined: Any
    first: Any


class Noisy(Protocol):
    """The attributes of a model that determine its noise."""

    @property
    def states(self) -> tuple[str, ...]: ...
    @property
    def process(self) -> Any: ...
    @property
    def noise_scale(self) -> Cell: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...


def locate_key_parameters(
    parameters: Sequence[Parameter], own: Sequence[str], start: int
) -> dict[str, slice]:
    """Return the slice of each key-specific parameter in a state; the first parameter begins at row `start`."""
    found: dict[str, slice] = {}
    for p in parameters:
        if p.name in own:
            found[p.name] = slice(start, start + len(p.value))
            start = found[p.name].stop
    return found


def gate_rows(
    gate: Gate,
    counters: Sequence[Entry],
    nis: Entry,
    presents: Sequence[Any],
    undetermined: Any,
    u: Vector,
) -> tuple[Any, list[Entry]]:
    """Return a mask of keys whose row (with controls u) is gated, and the two counters after the row."""
    total, run = counters
    observed = updates.count(presents)
    outside = updates.is_beyond_limit(gate.limits(u), nis, observed)
    if undetermined is not None:
        outside = outside & ~undetermined
    if gate.limit is not None:
        outside = outside & np.less(run, float(gate.limit))
    # a row without a measurement does not count, and does not end a run of gated rows
    quiet = 0.0 if isinstance(observed, float) else np.where(np.greater(observed, 0.0), 0.0, run)
    return outside, [np.where(outside, total + 1.0, total), np.where(outside, run + 1.0, quiet)]


def score_innovation(noise: Noise, innovation: Innovation, presents: Sequence[Any]) -> list[Entry]:
    """Return log-likelihood and NIS of an innovation under heavy-tailed noise; the NIS is NaN without a measurement."""
    nis = updates.sum_entries(updates.square_innovation(innovation))
    if presents[0] is not None:
        nis = np.where(np.greater(updates.count(presents), 0.0), nis, np.nan)
    return [updates.log_density(noise, innovation, presents), nis]


def mask_weights(weights: Vector, presents: Sequence[Any]) -> list[Entry]:
    """Return the weights with NaN for missing components."""
    return [a if has is None else np.where(has, a, np.nan) for a, has in zip(weights, presents, strict=False)]


def adapt_noise(
    options: Adaptive,
    model: Noisy,
    values: Values,
    view: RowView,
    innovation: Innovation,
    Q: Callable[[], Vector],
    dt: Array,
    u: Vector,
) -> dict[str, list[Entry]]:
    """Return the adapted noise parameters by name, moved towards the row's estimate of the noise.

    innovation: computed with the weighted R; Q: returns the process noise of this row's prediction, which is needed if
    the parameter Q is adapted.
    """
    v, C, H, R, w, presents, undetermined, first = view
    found: dict[str, list[Entry]] = {}
    if options.R is not None:
        m = len(v)
        identity = [[1.0 if i == j else 0.0 for j in range(m)] for i in range(m)]
        noise = adaptive.condition_noise(R, identity, C, v, presents)
        scale, still = adaptive.invert_scale(model.noise_scale, u, undetermined)
        roots = [np.sqrt(times(a, scale)) for a in w or [1.0] * m]
        found["R"] = adaptive.move_noise(values["R"], roots, noise, options.R, still)
    if options.Q is None or first is True:
        return found
    still = undetermined  # a first row has no prediction, and so no process noise
    if first is not False:
        still = first if still is None else still | first
    seen_by = H()
    if options.whole:
        n = len(model.states)
        here = Q()
        _, own = updates.predict_measurement([0.0] * n, here, seen_by)
        rest = [minus(plus(c, r), q) for c, r, q in zip(C, R, own, strict=True)]
        noise = adaptive.condition_noise(here, seen_by, rest, v, presents)
        scale, unmoved = adaptive.invert_scale(getattr(model.process, "scale", 1.0), u, still)
        roots = [np.sqrt(scale)] * n
        found["Q"] = adaptive.move_noise(values["Q"], roots, noise, options.Q, unmoved)
    surplus = updates.compute_surplus(innovation, presents)
    seen = adaptive.whiten_rows(innovation, seen_by)
    parameters = {p.name: p for p in model.parameters}
    for part in options.scaled:
        spread = adaptive.compute_noise_part(model.process, parameters[part.name], dt, u, values)
        growth = adaptive.compute_growth(spread, part.rank, seen, surplus, options.Q)
        entries = [times(a, growth) for a in values[part.name]]
        found[part.name] = entries if still is None else choose(still, values[part.name], entries)
    return found


def put(after: list[Entry], rows: slice, entries: Vector) -> None:
    """Write entries into the rows of a state, except structural zeros, whose rows are unchanged."""
    for row, entry in zip(range(rows.start, rows.stop), entries, strict=True):
        if type(entry) is not float:
            after[row] = entry


def parse_options(
    definition: Mapping[str, Any], model: Noisy, measurements: int, controls: int
) -> tuple[Robust, Adaptive]:
    """Return the sections `robust` and `adaptive` of a definition for a model. Raises ModelError."""
    names = definitions.parse_names("control", definition.get("control") or (), empty=True)
    options = updates.parse(definition.get("robust"), measurements, names)
    R = next(p for p in model.parameters if p.name == "R")
    if isinstance(options.noise, Huber):
        for i in range(measurements):
            if R.value[packed_index(i, i)] == 0.0 or model.noise_scale == 0.0:
                raise ModelError(
                    f"observation.R[{i}][{i}]",
                    "a component without noise has no outliers to weigh",
                    "write a positive variance, or remove robust.huber",
                )
    moving = adaptive.parse(definition.get("adaptive"), model.process, R, controls)
    for field, scale, rate in (
        ("observation", model.noise_scale, moving.R),
        ("process", getattr(model.process, "scale", 1.0), moving.Q),
    ):
        if rate is not None and scale == 0.0:
            raise ModelError(f"{field}.noise_scale", "there is no noise to adapt", "write a positive number")
    return options, moving
