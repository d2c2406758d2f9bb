"""The names of process structures in textbooks and other libraries, and the project's structures for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Meaning(NamedTuple):
    """The project's structure for a textbook's name: `kind`, textbook names of its fields, and implied fields."""

    kind: str
    fields: Mapping[str, str] = {}
    implied: Mapping[str, Any] = {}


_LEVEL = Meaning(
    "random_walk", {"level_variance": "variance", "sigma2_level": "variance", "sigma2": "variance"}
)
_SMOOTH = Meaning("local_linear_trend", {"variance": "slope_variance"}, {"level_variance": 0.0})
_VELOCITY = Meaning("constant_velocity", {"variance": "acceleration_variance"})
_ACCELERATION = Meaning("constant_acceleration", {"variance": "jerk_variance"})
_REVERTING = Meaning("ornstein_uhlenbeck", {"theta": "rate", "mu": "mean"})
_WAVES = Meaning("seasonal_trigonometric")

NAMES: Mapping[str, Meaning] = {
    # Harvey (1989), Durbin and Koopman (2012), and statsmodels' UnobservedComponents
    "local_level": _LEVEL,
    "level": _LEVEL,
    "random_walk_plus_noise": _LEVEL,
    "brownian_motion": _LEVEL,
    "wiener_process": _LEVEL,
    "smooth_trend": _SMOOTH,
    "integrated_random_walk": _SMOOTH,
    "local_trend": Meaning("local_linear_trend"),
    "linear_trend": Meaning("local_linear_trend"),
    "damped_local_linear_trend": Meaning("damped_trend"),
    "trigonometric_seasonal": _WAVES,
    "fourier_seasonal": _WAVES,
    "seasonal_fourier": _WAVES,
    "dummy_seasonal": Meaning("seasonal_dummy"),
    # Bar-Shalom, Li and Kirubarajan (2001)
    "nearly_constant_velocity": _VELOCITY,
    "white_noise_acceleration": _VELOCITY,
    "nearly_constant_acceleration": _ACCELERATION,
    "wiener_process_acceleration": _ACCELERATION,
    # Gardiner (2009), Särkkä and Solin (2019)
    "mean_reverting": _REVERTING,
    "vasicek": _REVERTING,
    "gauss_markov": _REVERTING,
    "linear_sde": Meaning("continuous"),
    "matrices": Meaning("explicit"),
}


def replace_textbook_names(process: Any) -> Any:
    """Return a process, and its parts, with the project's names in place of a textbook's; other values are unchanged.

    Case does not matter, and blanks and hyphens are underscores: `Local Level` is `local_level`.
    """
    if not isinstance(process, Mapping):
        return process
    result = dict(process)
    kind = result.get("kind")
    if isinstance(kind, str):
        plain = "_".join(kind.casefold().replace("-", " ").replace("_", " ").split())
        meaning = NAMES.get(plain, Meaning(plain))
        renamed = {meaning.fields.get(name, name): value for name, value in result.items()}
        if len(renamed) == len(result):  # else a field has both names, which the structure refuses
            result = renamed
        result = {**meaning.implied, **result, "kind": meaning.kind}
    if isinstance(result.get("parts"), list):
        result["parts"] = [replace_textbook_names(part) for part in result["parts"]]
    return result
