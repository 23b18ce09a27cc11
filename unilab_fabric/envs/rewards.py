"""Reward terms: functions from a state to one value per environment, without weights.

Arrays of several components are (components, n), n environments; `out` (n,) is written and returned, so that a step
makes few arrays. Velocities with _b are in the base frame. A task multiplies each term by its weight per second and by
the length of its control step.
"""

import numpy as np

from unilab_fabric.envs.vector_env import Array, Floats, Mask


def tracking_lin_vel(planar_error: Floats, sigma: float, out: Array) -> Array:
    """exp(-error^2 / sigma); error (2, n) of the velocity along base x and y [m/s], sigma [m^2/s^2]."""
    return bell(sum_of_squares(planar_error, out), sigma, out)


def tracking_ang_vel(yaw_error: Floats, sigma: float, out: Array) -> Array:
    """exp(-error^2 / sigma); error (n,) of the yaw rate [rad/s], sigma [rad^2/s^2]."""
    return bell(np.multiply(yaw_error, yaw_error, out=out), sigma, out)


def lin_vel_z(velocity_b: Floats, out: Array) -> Array:
    """Squared vertical velocity [m^2/s^2]."""
    vertical: Floats = velocity_b[2]
    return np.multiply(vertical, vertical, out=out)


def ang_vel_xy(angular_velocity_b: Floats, out: Array) -> Array:
    """Squared roll and pitch rates [rad^2/s^2]."""
    return sum_of_squares(angular_velocity_b[:2], out)


def base_height(height: Floats, target: float, out: Array) -> Array:
    """Squared distance of the base from its target height [m^2]; height (n,)."""
    np.subtract(height, target, out=out)
    return np.multiply(out, out, out=out)


def action_rate(action_change: Floats, out: Array) -> Array:
    """Squared change of the action since the step before; (actions, n)."""
    return sum_of_squares(action_change, out)


def similar_to_default(joint_offset: Floats, out: Array) -> Array:
    """Sum of the joints' distances from their default angles [rad]; (joints, n)."""
    return np.add.reduce(np.abs(joint_offset), axis=0, out=out)


def contact(touches: Mask, in_swing: Mask, out: Array) -> Array:
    """Share of the feet that touch the floor in stance and are off it in swing; (feet, n) each."""
    np.add.reduce(touches != in_swing, axis=0, dtype=np.float32, out=out)
    return np.multiply(out, 1 / len(touches), out=out)


def swing_feet_z(foot_height: Floats, in_swing: Mask, target: float, width: float, out: Array) -> Array:
    """Mean over the feet of exp(-(z - target)^2 / width) in swing, 0 in stance.

    Heights of the feet's centres (feet, n) [m], target [m], width [m^2].
    """
    distance = foot_height - target
    distance *= distance
    np.add.reduce(bell(distance, width, distance) * in_swing, axis=0, out=out)
    return np.multiply(out, 1 / len(foot_height), out=out)


def feet_phase(foot_height: Floats, target: Floats, sigma: float, out: Array) -> Array:
    """exp(-sum of squared errors / sigma) of the feet's heights from their targets, (feet, n) [m] both, sigma [m^2]."""
    return bell(sum_of_squares(foot_height - target, out), sigma, out)


def feet_ori(foot_quat: Floats, out: Array) -> Array:
    """Sum over feet of (1 - cos tilt) / 2 = x^2 + y^2 of their quaternions (feet, 4, n) as w, x, y, z."""
    return np.add.reduce(np.square(foot_quat[:, 1:3]), axis=(0, 1), out=out)


def weighted_pose(joint_offset: Floats, weights: Array, out: Array) -> Array:
    """Sum of the squared distances from the default angles [rad^2], each joint with its weight (joints, 1)."""
    return np.add.reduce(weights * joint_offset * joint_offset, axis=0, out=out)


def bell(squared_error: Floats, width: float, out: Array) -> Array:
    """exp(-squared_error / width), in the shape of `out`: 1 where there is no error."""
    return np.exp(np.multiply(squared_error, -1 / width, out=out), out=out)


def sum_of_squares(x: Floats, out: Array) -> Array:
    """(k, n) -> (n,)."""
    return np.add.reduce(x * x, axis=0, out=out)
