"""Reward terms: pure functions from a state to (n,) values without weights, n environments.

Arrays of several components are (components, n). Velocities with _b are in the base frame. A task multiplies each term
by its weight per second and by the length of its control step.
"""

import numpy as np

from unilab_fabric.envs.vector_env import Floats, Mask


def tracking_lin_vel(planar_error: Floats, sigma: float) -> Floats:
    """exp(-error^2 / sigma); error (2, n) of the velocity along base x and y [m/s], sigma [m^2/s^2]."""
    return bell(sum_of_squares(planar_error), sigma)


def tracking_ang_vel(yaw_error: Floats, sigma: float) -> Floats:
    """exp(-error^2 / sigma); error (n,) of the yaw rate [rad/s], sigma [rad^2/s^2]."""
    return bell(yaw_error**2, sigma)


def lin_vel_z(velocity_b: Floats) -> Floats:
    """Squared vertical velocity [m^2/s^2]."""
    vertical: Floats = velocity_b[2]
    return vertical**2


def ang_vel_xy(angular_velocity_b: Floats) -> Floats:
    """Squared roll and pitch rates [rad^2/s^2]."""
    return sum_of_squares(angular_velocity_b[:2])


def base_height(height: Floats, target: float) -> Floats:
    """Squared distance of the base from its target height [m^2]; height (n,)."""
    return (height - target) ** 2


def action_rate(action: Floats, previous_action: Floats) -> Floats:
    """Squared change of the action since the step before; (actions, n) each."""
    return sum_of_squares(action - previous_action)


def similar_to_default(joint_offset: Floats) -> Floats:
    """Sum of the joints' distances from their default angles [rad]; (joints, n)."""
    return total(np.abs(joint_offset))


def contact(touches: Mask, in_stance: Mask) -> Floats:
    """Share of the feet that touch the floor exactly when the gait clock wants it; (feet, n) each."""
    return total((touches == in_stance) * np.float32(1 / len(touches)))


def swing_feet_z(foot_height: Floats, in_stance: Mask, target: float, width: float) -> Floats:
    """Mean over the feet of exp(-(z - target)^2 / width) where the clock wants a swing, 0 in stance.

    Heights of the feet's centres (feet, n) [m], target [m], width [m^2].
    """
    return total(bell((foot_height - target) ** 2, width) * ~in_stance) * np.float32(1 / len(foot_height))


def bell(squared_error: Floats, width: float) -> Floats:
    """exp(-squared_error / width): 1 where there is no error."""
    values: Floats = np.exp(squared_error * np.float32(-1 / width))
    return values


def sum_of_squares(x: Floats) -> Floats:
    """(k, n) -> (n,)."""
    return total(x * x)


def total(x: Floats) -> Floats:
    """(k, n) -> (n,): the sum over the components."""
    values: Floats = np.add.reduce(x, axis=0)
    return values
