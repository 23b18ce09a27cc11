import numpy as np

from unilab_fabric.envs.observations import advance_phase, gait_phase, uniform_noise


def test_each_foot_is_its_offset_ahead_and_phases_wrap():
    phase = gait_phase(np.array([0.0, 0.75], np.float32), np.array([[0.0], [0.5]], np.float32))
    assert phase.tolist() == [[0, 0.75], [0.5, 0.25]]


def test_a_phase_just_below_a_whole_cycle_stays_below_one():
    below = np.nextafter(np.float32(1), np.float32(0))
    assert (gait_phase(np.array([below, 0.3]), np.array([[0.0], [0.5]], np.float32)) < 1).all()


def test_advancing_wraps_and_stays_close_to_the_exact_phase_for_a_whole_episode():
    phase = np.array([[0.0, 0.5]], np.float32)
    for step in range(1, 1001):
        advance_phase(phase, 0.04)
        assert ((phase >= 0) & (phase < 1)).all()
        distance = (phase.astype(float) - np.array([[0.0, 0.5]]) - 0.04 * step + 0.5) % 1 - 0.5
        assert np.abs(distance).max() < 1e-3


def test_noise_is_uniform_within_its_half_width_and_new_for_each_entry():
    rows = np.full((4000, 3), 10, np.float32)
    noisy = uniform_noise(np.random.default_rng(0), rows, np.array([0.0, 0.5, 2.0], np.float32))
    assert (rows == 10).all()
    assert (noisy[:, 0] == 10).all()
    for column, half_width in ((1, 0.5), (2, 2.0)):
        deviation = noisy[:, column] - 10
        assert np.abs(deviation).max() <= half_width * 1.0001
        assert abs(deviation.mean()) < 0.05 * half_width
        np.testing.assert_allclose(deviation.std(), half_width / np.sqrt(3), rtol=0.05)
    assert abs(np.corrcoef(noisy[:, 1], noisy[:, 2])[0, 1]) < 0.1
