"""Each term on numbers small enough to work out by hand; columns are environments."""

import numpy as np

from unilab_fabric.envs import rewards


def columns(*rows):
    return np.array(rows, np.float32)


def check(term, *arguments, expected):
    out = np.full(len(expected), 99, np.float32)
    assert term(*arguments, out=out) is out
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_tracking_terms_fall_with_the_squared_error_over_sigma():
    planar = columns([0.0, 0.3], [0.0, -0.4])
    check(rewards.tracking_lin_vel, planar, 0.5, expected=[1, np.exp(-(0.09 + 0.16) / 0.5)])
    check(rewards.tracking_ang_vel, columns([0.0, -0.6])[0], 0.5, expected=[1, np.exp(-0.36 / 0.5)])


def test_vertical_velocity_counts_in_both_directions_and_nothing_else_does():
    check(rewards.lin_vel_z, columns([9, 9], [9, 9], [2, -3]), expected=[4, 9])


def test_roll_and_pitch_rates_count_and_yaw_does_not():
    check(rewards.ang_vel_xy, columns([1, 0], [2, -3], [9, 9]), expected=[5, 9])


def test_height_counts_as_the_squared_distance_from_the_target():
    check(rewards.base_height, columns([0.5, 0.25])[0], 0.5, expected=[0, 0.0625])


def test_action_rate_is_the_squared_change_over_all_actions():
    check(rewards.action_rate, columns([1, 0], [3, -2]), expected=[1 + 9, 4])


def test_distance_from_the_default_pose_counts_without_sign():
    check(rewards.similar_to_default, columns([1, 0], [-2, 0.5]), expected=[3, 0.5])


def test_contact_counts_the_feet_that_do_what_the_clock_wants():
    touches = np.array([[True, False], [True, False], [False, False], [False, False]])
    in_swing = np.array([[False, False], [True, False], [True, False], [False, False]])
    check(rewards.contact, touches, in_swing, expected=[0.5, 0])


def test_swing_height_counts_only_in_swing_and_is_averaged_over_all_feet():
    height = columns([0.1, 0.1], [0.2, 0.1], [0.1, 0.1], [0.1, 0.1])
    in_swing = np.array([[True, False], [True, False], [False, False], [False, True]])
    check(rewards.swing_feet_z, height, in_swing, 0.1, 0.01, expected=[(1 + np.exp(-1)) / 4, 1 / 4])


def test_terms_leave_their_inputs_alone():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 7)).astype(np.float32)
    before, flags, out = x.copy(), x > 0, np.empty(7, np.float32)
    rewards.tracking_lin_vel(x[:2], 0.5, out)
    rewards.tracking_ang_vel(x[2], 0.5, out)
    rewards.lin_vel_z(x, out)
    rewards.ang_vel_xy(x, out)
    rewards.base_height(x[0], 0.3, out)
    rewards.action_rate(x, out)
    rewards.similar_to_default(x, out)
    rewards.contact(flags, ~flags, out)
    rewards.swing_feet_z(x, flags, 0.1, 0.01, out)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(flags, x > 0)
