"""The sections of a model spec, each field with its description; `jobs.specs.model_spec` combines the sections."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from jobs.core.times import parse_duration_us
from jobs.specs.problems import invalid, suggest_key


class Meaning(NamedTuple):
    """The project's form of a model with a textbook name: `kind`, the textbook's field names, and implied fields."""

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
    """Return a process in which the project's names replace textbook names, also in its parts.

    All other values are unchanged. Case does not matter, and blanks and hyphens count as underscores: `Local Level` is
    the same as `local_level`.
    """
    if not isinstance(process, Mapping):
        return process
    result = dict(process)
    kind = result.get("kind")
    if isinstance(kind, str):
        plain = "_".join(kind.casefold().replace("-", " ").replace("_", " ").split())
        meaning = NAMES.get(plain, Meaning(plain))
        renamed = {meaning.fields.get(name, name): value for name, value in result.items()}
        if len(renamed) == len(result):  # else a field has both names, which later checks refuse
            result = renamed
        result = {**meaning.implied, **result, "kind": meaning.kind}
    if isinstance(result.get("parts"), list):
        result["parts"] = [replace_textbook_names(part) for part in result["parts"]]
    return result


PRETRAINED = "pretrained"

Number = Annotated[float, Field(allow_inf_nan=False)]
Names = Annotated[list[str], Field(min_length=1)]


def check_duration(text: str, field: str = "") -> str:
    """Return a text that is a duration, and refuse others with an error of `problems.invalid`."""
    try:
        parse_duration_us(text)
    except ValueError as error:
        remedy = "write a number and one of ms, s, min, h, d, w, such as 90d or 12h"
        raise invalid(str(error), remedy, field) from error
    return text


Duration = Annotated[str, AfterValidator(check_duration)]


class SpecSection(BaseModel):
    """A part of a spec, in which an unknown field or a value of a wrong type is an error.

    The docstring below a field is its description (`describe_fields`).
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in describe_fields(cls).items():
            properties[cls.model_fields[name].alias or name].setdefault("description", text)
        return schema

    def list_defaults(self, names: Iterable[str]) -> set[str]:
        """Return those of some fields that have their default values.

        Values are compared, because a spec from a manifest has every field set.
        """
        fields = type(self).model_fields
        return {
            name
            for name in names
            if getattr(self, name) == fields[name].get_default(call_default_factory=True)
        }


def describe_fields(section: type[BaseModel]) -> dict[str, str]:
    """Return the descriptions of a section's fields, by field: the docstrings below them.

    Pydantic's `use_attribute_docstrings` would read the source of every section at each import.
    """
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__[: section.__mro__.index(SpecSection)]):
        found |= _read_docstrings(kind.__module__)[kind.__name__]
    return found


@cache
def _read_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of a module's classes, by class and field."""
    return {
        kind.name: {
            ast.unparse(field.target): " ".join(str(text.value.value).split())
            for field, text in pairwise(kind.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        }
        for kind in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(kind, ast.ClassDef)
    }


class Process(SpecSection):
    """The process model: how the state moves between two rows of a key."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(
        examples=["explicit", "function", "random_walk", "local_linear_trend", "ornstein_uhlenbeck", "sum"]
    )
    """explicit (F, Q, optional B, offset; one step a row), or a structure in closed form over the time between rows:
    random_walk (variance), local_linear_trend (level_variance, slope_variance), damped_trend (level_variance,
    slope_variance, damping), constant_velocity (acceleration_variance), constant_acceleration (jerk_variance),
    ornstein_uhlenbeck (rate, variance, mean), seasonal_trigonometric (period, variance, harmonics), seasonal_dummy
    (period, variance; one step a row), continuous (A, diffusion, optional B, offset), sum (parts: a list of these);
    or function (f: module:function of x, dt, u, or of x, dt, u and the noise w; Q, or q: module:function of dt, or
    dt and u; optional jacobian, noise_jacobian, offset) for extended, unscented and cubature filters
    """

    @model_validator(mode="before")
    @classmethod
    def _by_known_name(cls, process: Any) -> Any:
        return replace_textbook_names(process)


class ObservationSection(SpecSection):
    """The observation model: how the measurement depends on the state."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "properties": {
                "H": {
                    "type": "array",
                    "description": "measurement matrix; entries are numbers or control columns",
                },
                "R": {"type": "array", "description": "covariance of the measurement noise"},
                "offset": {
                    "type": "array",
                    "description": "added to H x or h, one entry for each measurement",
                },
                "noise_scale": {"description": "a number or a control column by which R is multiplied"},
                "h": {
                    "type": "string",
                    "description": "instead of H: module:function of the state x, of x and the row's inputs u, or of "
                    "x, u and the noise v",
                },
                "jacobian": {
                    "type": "string",
                    "description": "module:function of x, or x and u: the Jacobian of h",
                },
                "noise_jacobian": {
                    "type": "string",
                    "description": "module:function, the Jacobian of h by v",
                },
                "wrap": {
                    "type": "object",
                    "description": "measured components that are angles, each with radians, degrees, or the number "
                    "after which it repeats: their innovations are taken within half a turn (extended, unscented and "
                    "cubature filters)",
                    "examples": [{"bearing": "radians"}],
                },
            }
        },
    )


class Initial(SpecSection):
    """The state's distribution at a key's first row, before that row's measurement."""

    mean: list[Number | str] | None = None
    """one number for each state, or a column of the key's first row"""
    covariance: list[list[Number | str]] | None = None
    """one row for each state; symmetric; numbers, or columns of the key's first row"""
    diffuse: bool | list[bool] | None = None
    """true: nothing is known of the state before the first row; a list gives it for each state, with zeros in the
    covariance's rows of the diffuse ones
    """
    mode_probabilities: list[Number] | None = None
    """with filter: imm or mmae, probabilities of the modes at the first row; null: equal"""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.diffuse is True:
            if self.mean is not None or self.covariance is not None:
                raise invalid("gives both `diffuse: true` and a mean or covariance", "keep one of them")
        elif self.covariance is not None and self.mean is None:
            raise invalid("is incomplete", "give `mean` and `covariance`, or `diffuse: true`")
        return self


class Unscented(SpecSection):
    """The sigma points of the unscented filter and their weights: lambda = alpha^2 (n + kappa) - n."""

    alpha: Number = Field(default=1.0, gt=0.0)
    """spread of the points"""
    beta: Number = 0.0
    """prior knowledge of the kurtosis; 2 suits a Gaussian and small alpha"""
    kappa: Number = 2.0
    """secondary spread, and the weight of the centre; above minus n"""


class LearnedParameter(SpecSection):
    """A field that `pretrain` learns, with constraints on its values."""

    name: str
    """name of the field, such as Q, or an entry such as F[0][1], A[0][1] or H[0][1]"""
    form: Literal["full", "diagonal"] | None = None
    """structure of a covariance; null: zeros stay zero"""
    bounds: Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None = None
    """bounds of a number: [lowest, highest], null for none"""


class Learn(SpecSection):
    """The parameters that `pretrain` learns before it filters; all other parameters stay as in the spec."""

    parameters: list[str | LearnedParameter] = []
    """names of the fields to learn, such as R, variance, F[0][1], initial.mean; or {name, form, bounds}"""
    prior: bool = False
    """also learn the initial distribution of a key, from all keys"""
    scope: Literal["pooled", "group", "key"] = "pooled"
    """one value for all keys, for each group of keys, or for each key"""
    by: list[str] = []
    """with scope: group, the key columns that define the groups; with scope: key, those of the groups whose keys lean
    on each other
    """
    window: Duration | None = None
    """learn from this long before the position's last event time, such as 90d"""
    max_iterations: int = Field(default=100, ge=1)
    """most iterations of the optimiser"""
    sample_keys: int | None = Field(default=None, ge=1)
    """learn from about this many keys instead of all"""
    method: Literal["mle", "em"] = "mle"
    """maximum likelihood by scoring, or expectation maximisation (noise, entries of F and H and the initial
    distribution of a linear filter, in every scope; mixtures always)
    """

    @property
    def left_out(self) -> set[str]:
        """Return the fields with default values, which ids omit because ids of earlier releases lack these fields."""
        return self.list_defaults(("prior", "method", "by"))

    def definition(self) -> dict[str, Any]:
        """Return the argument of `kalman.build` and `kalman.learning.build_linear_learner`, as plain Python."""
        result = self.model_dump(include={"parameters", "scope"}, exclude_none=True)
        for position, item in enumerate(self.parameters):
            if isinstance(item, LearnedParameter) and item.bounds is not None:
                result["parameters"][position]["bounds"] = item.bounds  # a null in the bounds means no bound
        return {**result, **self.model_dump(include={"prior", "method", "by"} - self.left_out)}

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.parameters and not self.prior:
            problem = "is empty" if "parameters" in self.model_fields_set else "is missing"
            raise invalid(problem, "list names of fields to learn, such as R", "parameters")
        return self

    @property
    def window_us(self) -> int | None:
        """Return the length of the window in microseconds."""
        return None if self.window is None else parse_duration_us(self.window)


class Smoothing(SpecSection):
    """Fixed-lag smoothing: the state at each row is estimated again after a number of later rows of the key."""

    lag: int = Field(ge=1, le=500)
    """number of later rows after which a row's state is given again, in the lagged_ outputs of the last of them"""


class Storage(SpecSection):
    """The storage of a key's state."""

    dtype: Literal["float64", "float32"] = "float64"
    """float32: half the size, about seven digits; rounded after each row"""


class OutputsSection(SpecSection):
    """The contents of each estimate."""

    covariance: Literal["full", "diagonal"] = "full"
    """n*n numbers, row by row, or the n variances"""
    innovation: bool = False
    """true: also each row's normalised innovations, which a comparison of versions needs to judge bias"""
    measured: bool = False
    """true: also each row's measurement, with which forecasts are compared"""
    control: bool = False
    """true: also each row's controls, and the inputs of its key as they were used for it"""
    residual: bool = False
    """true: also each row's residual, the measurement minus its prediction, and the covariance of the prediction"""
    matrices: list[Literal["F", "H", "Q", "R"]] = []
    """system matrices of the model to put out as they were used for the row, such as [F, Q]"""
    state_index: bool = False
    """true: also the number of the key's rows that are in its state, this one included"""

    sliding_log_likelihood: int | None = Field(default=None, ge=1, le=1000)
    """also the log-likelihood of the key's newest measured rows together, this many of them; its state is kept with the
    key's, so that it changes with the model's version; null: none
    """

    @property
    def left_out(self) -> set[str]:
        """Return the fields with default values, which stored data omit because earlier releases lack these fields."""
        later = ("control", "residual", "matrices", "state_index", "sliding_log_likelihood")
        return self.list_defaults(later)

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.matrices)) != len(self.matrices):
            raise invalid("names a matrix twice", "name each once", "matrices")
        return self

    @property
    def figures(self) -> list[str]:
        """Return the names of the output columns for which the filter must predict each row a second time."""
        residual = ["residual", "residual_covariance"] if self.residual else []
        innovation = ["innovation"] if self.innovation else []
        return [*innovation, *residual, *(f"system_{name}" for name in self.matrices)]

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns that these options add to the estimates table."""
        others = [name for name in ("measured", "control", "state_index") if getattr(self, name)]
        return [*self.figures, *others]


class Stream(SpecSection):
    """The size of micro-batches and the layout of the state; of these options only `new_keys` changes results."""

    max_files_per_batch: int | None = Field(default=None, ge=1)
    """most files of the measurements table in a micro-batch"""
    max_bytes_per_batch: str | None = Field(default=None, pattern=r"^[1-9][0-9]*[kmgt]$")
    """approximate most bytes in a micro-batch, such as 512m or 1g"""
    partitions: int | None = Field(default=None, ge=1)
    """state partitions; fixed for the life of a generation"""
    keys_per_block: int = Field(default=256, ge=1)
    """keys in one stored block of state"""
    expected_keys: int | None = Field(default=None, ge=1)
    """approximate number of keys to come, for the layout of blocks"""
    new_keys: Literal["prior", "pretrained"] = "prior"
    """where a key without a state begins: prior, the model's initial distribution; pretrained, its state after the
    history that `ingest --history` has landed for it; fixed for the life of a generation
    """


CLONES = "true: the table's log may name files elsewhere, as a clone's does; else such a table is refused"


class Inputs(SpecSection):
    """A Delta table with one row for each key. The model uses the numbers in the row like control columns."""

    table: str | None = None
    """the table's path below the warehouse, or absolute (/data/sensors); null: inputs/<name>"""
    clones: bool = Field(default=False, description=CLONES)
    key: list[str] | None = Field(default=None, min_length=1)
    """key columns for whose values the table has rows; null: all of the model's"""
    columns: dict[str, str] = Field(min_length=1)
    """each input's name in the model and its column in the table, such as {noise: noise_db}"""
    defaults: dict[str, Number] | None = None
    """numbers for keys without a row in the table; null: their rows go to quarantine"""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.defaults is not None and set(self.defaults) != set(self.columns):
            raise invalid(
                "names other inputs than columns",
                f"give a default for each of {', '.join(self.columns)}",
                "defaults",
            )
        return self

    def check_names(self, key: Sequence[str]) -> None:
        """Check that the key columns belong to the model's key.

        Raises:
            ValueError: the error of `problems.invalid`.
        """
        if not key:
            remedy = "write the numbers into the entries, or name `key`"
            raise invalid("belongs to keys, and the model has no key columns", remedy, "inputs")
        for place, name in enumerate(self.key or ()):
            if name not in key:
                raise invalid(f"'{name}' is not a key column", suggest_key(key), f"inputs.key[{place}]")
