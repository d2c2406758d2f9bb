"""Fixed-interval smoothing: every row's state given all rows of its key."""

import numpy as np

from kalman.run import KeyStates, Outputs, SortedRows, allocate_outputs
from kalman.smoothers.pieces import ROOM, ObserverMaker, Pieces, Smoothed
from kalman.types import Array, Filter


def smooth(
    model: Filter, states: KeyStates, rows: SortedRows, unit: float, room: float = ROOM
) -> tuple[KeyStates, Outputs, Smoothed]:
    """Return the results of `run`, and each row's state given all rows of its key.

    The result is exact for the linear filter, with any time steps, control, missing components and diffuse start. For
    other filters it is as approximate as the filter. Needs `room` bytes beside its arguments and results
    (`kalman.smoothers.pieces`, which also gives the results in pieces).
    Raises ModelError where the filter cannot be smoothed.

    References: Durbin and Koopman (2012), chapters 4 and 5; Rauch, Tung and Striebel (1965); for several models see
    `kalman.smoothers.modes`.
    """
    return smooth_observed(model, states, rows, unit, None, room)[:3]


def smooth_observed(
    model: Filter,
    states: KeyStates,
    rows: SortedRows,
    unit: float,
    observer: ObserverMaker | None,
    room: float = ROOM,
) -> tuple[KeyStates, Outputs, Smoothed, dict[str, Array]]:
    """Return the results of `smooth`, and an `observer`'s figures of the rows, name -> (d, N)."""
    pieces = Pieces(model, states, rows, unit, observer, room)
    outputs, smoothed = allocate_outputs(model, len(rows.key)), pieces.nothing(len(rows.key))
    found = {name: np.empty((width, len(rows.key))) for name, width in pieces.observed.items()}
    for piece in pieces:
        for whole, part in zip(outputs[:-1], piece.outputs[:-1], strict=True):
            whole[..., piece.rows] = part
        smoothed.mean[:, piece.rows], smoothed.covariance[:, piece.rows] = piece.smoothed[:2]
        for into, given in (
            (outputs.extra, piece.outputs.extra),
            (smoothed.extra, piece.smoothed.extra),
            (found, piece.found),
        ):
            for name, values in given.items():
                into[name][:, piece.rows] = values
    return pieces.states, outputs, smoothed, found
