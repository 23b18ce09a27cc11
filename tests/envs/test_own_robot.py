"""The example of a robot of one's own: it is short, behaves like every task, and trains."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.system.jobs import Job
from unilab_fabric.envs.registry import make_task

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def crawler(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    settings = {"num_envs": 4, "speed": 0.3, "rewards": {"turning": -0.5}}
    return make_task("own_robot.Crawler", settings, seed=1, num_threads=1)


def test_it_is_shorter_than_a_hundred_lines():
    assert len((DOCS / "own_robot.py").read_text().splitlines()) < 100


def test_it_stands_and_its_state_returns_bit_for_bit(crawler):
    crawler.reset(seed=2)
    for _ in range(100):
        crawler.advance(np.zeros((4, 8), np.float32))
    assert (crawler.sims.qpos[:, 2] > 0.2).all()
    assert not crawler.terminated.any()
    state, rng = crawler.get_state(), np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (30, 4, 8)).astype(np.float32)
    seen = []
    for _ in range(2):
        crawler.set_state(state)
        for action in actions:
            crawler.advance(action.copy())
        seen.append((crawler.observation["critic"].copy(), crawler.reward.copy()))
    assert np.array_equal(seen[0][0], seen[1][0])
    assert np.array_equal(seen[0][1], seen[1][1])


def test_observations_and_terms_are_what_they_say(crawler):
    crawler.reset(seed=3)
    crawler.advance(np.full((4, 8), 0.2, np.float32))
    critic = crawler.observation["critic"]
    np.testing.assert_allclose(critic[:, 3:6], [[0, 0, -1]] * 4, atol=0.1)
    np.testing.assert_allclose(critic[:, 6:14] + np.tile([0.5, -1.0], 4), crawler.sims.qpos[:, 7:], atol=1e-6)
    np.testing.assert_allclose(critic[:, 22:30], 0.2)
    velocity = critic[:, 30:33]
    expected = np.exp(-((velocity[:, 0] - 0.3) ** 2 + velocity[:, 1] ** 2) / 0.1)
    np.testing.assert_allclose(crawler.terms[0], expected, rtol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_fit_trains_it(tmp_path):
    small = ["--task=own_robot.Crawler", "--learner=PPO", "--task.num_envs=8", "--learner.num_steps_per_env=10"]
    small += ["--learner.actor_hidden=[16]", "--learner.critic_hidden=[16]", "--training.run_name=run"]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{DOCS}"}
    with Job(tmp_path, "--training.max_env_steps=400", small=small, environment=environment) as job:
        assert job.wait() == 0, job.text()
        assert job.summary()["env_steps"] == 400
