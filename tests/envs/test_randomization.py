import numpy as np

from unilab_fabric.envs import randomization


def rng():
    return np.random.default_rng(0)


def test_gains_are_drawn_for_each_servo_apart():
    gains = randomization.servo_gain(rng(), (50, 12), (31.5, 38.5))
    assert gains.shape == (50, 12)
    assert len(np.unique(gains)) == 600
    assert 31.5 <= gains.min() < 32
    assert 38 < gains.max() <= 38.5


def test_loads_and_shifts_are_added_to_the_nominal_value():
    masses = randomization.body_mass(rng(), 500, 7.0, (-1.5, 1.5))
    assert masses.shape == (500,)
    assert 5.5 <= masses.min() < 5.6 < 8.4 < masses.max() <= 8.5
    shifts = randomization.body_com_x(rng(), 500, 0.02, (-0.05, 0.05))
    assert -0.03 <= shifts.min() < -0.029 < 0.069 < shifts.max() <= 0.07


def test_friction_is_one_value_per_environment():
    friction = randomization.sliding_friction(rng(), 500, (0.3, 1.2))
    assert friction.shape == (500,)
    assert 0.3 <= friction.min() < 0.31 < 1.19 < friction.max() <= 1.2


def test_pushes_come_every_interval_on_average():
    generator = rng()
    pushes = sum(randomization.is_pushed(generator, 1000, 0.02, 5.0).sum() for _ in range(500))
    np.testing.assert_allclose(pushes, 1000 * 500 * 0.02 / 5.0, rtol=0.1)


def test_a_push_has_its_own_bounds_along_and_up():
    push = randomization.push_velocity(rng(), 2000, 1.0, 0.5)
    assert push.shape == (2000, 3)
    assert (np.abs(push).max(axis=0) <= [1, 1, 0.5]).all()
    assert (np.abs(push).max(axis=0) > [0.99, 0.99, 0.49]).all()
