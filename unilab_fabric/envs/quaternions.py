"""Unit quaternions w, x, y, z along the last axis, of any number of rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def multiply(a: Floats, b: Floats) -> Floats:
    """The turn b, then a: (..., 4)."""
    w, x, y, z = (a[..., i] for i in range(4))
    p, q, r, s = (b[..., i] for i in range(4))
    parts = (
        w * p - x * q - y * r - z * s,
        w * q + x * p + y * s - z * r,
        w * r - x * s + y * p + z * q,
        w * s + x * r - y * q + z * p,
    )
    return np.stack(parts, axis=-1)


def conjugate(q: Floats) -> Floats:
    """The turn back: (..., 4)."""
    back: Floats = q * np.array([1, -1, -1, -1], q.dtype)
    return back


def rotate(q: Floats, v: Floats) -> Floats:
    """Vectors (..., 3) turned by q (..., 4)."""
    axis = q[..., 1:]
    cross = 2 * np.cross(axis, v)
    turned: Floats = v + q[..., :1] * cross + np.cross(axis, cross)
    return turned


def heading(q: Floats) -> Floats:
    """The part of a turn about z: atan2(2(wz + xy), 1 - 2(y^2 + z^2)) as a quaternion (..., 4)."""
    w, x, y, z = (q[..., i] for i in range(4))
    half = np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)) / 2
    zero = np.zeros_like(half)
    return np.stack([np.cos(half), zero, zero, np.sin(half)], axis=-1)


def angle(a: Floats, b: Floats) -> Floats:
    """The angle between two turns (...,) [rad], 0 to pi."""
    cosine = np.abs(np.sum(a * b, axis=-1))
    between: Floats = 2 * np.arccos(np.minimum(cosine, 1))
    return between


def two_columns(q: Floats) -> Floats:
    """The first two columns of the matrix, row by row: (..., 6)."""
    w, x, y, z = (q[..., i] for i in range(4))
    first = (1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y))
    second = (2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x))
    return np.stack([entry for row in zip(first, second, strict=True) for entry in row], axis=-1)


def of_roll_pitch_yaw(angles: Floats) -> Floats:
    """Turns about fixed x, then y, then z: (..., 3) [rad] -> (..., 4)."""
    turns = []
    for axis in range(3):
        turn = np.zeros((*angles.shape[:-1], 4))
        turn[..., 0], turn[..., 1 + axis] = np.cos(angles[..., axis] / 2), np.sin(angles[..., axis] / 2)
        turns.append(turn)
    return multiply(turns[2], multiply(turns[1], turns[0]))
