"""Values that are not finite, on one rank of two: all ranks decide alike, and nothing good is lost."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.system.jobs import ENDLESS, Job
from unilab_fabric.checkpoints import whole_checkpoints

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
LENGTH = "--training.max_env_steps=1600"  # 100 ticks
OFTEN = ("--devices=2", "--checkpoint.every=20", "--training.replica_check_every=10")


def faulty(folder, fault, *more):
    return Job(folder, *OFTEN, "--learner=tests.system.learners.Faulty", f"--learner.fault={fault}", *more)


def dumps(job):
    return [json.loads(path.read_text()) for path in sorted((job.run / "nonfinite").glob("*.json"))]


def assert_saved_state_is_finite(job):
    for path in whole_checkpoints(job.run):
        state = torch.load(path / "replicated.pt", weights_only=True)["learner"]
        assert all(tensor.isfinite().all() for tensor in state.values() if tensor.is_floating_point())


def test_a_gradient_that_is_not_finite_is_left_out_by_all_and_noted(tmp_path):
    with faulty(tmp_path, "gradient", LENGTH) as job:
        assert job.wait() == 0, job.text()  # the replica check has compared the ranks nine times since
        assert job.summary()["skipped_updates"] == 1
        (dump,) = dumps(job)
        assert (dump["kind"], dump["rank"]) == ("gradient", 1)
        assert dump["tick"] >= 30
        assert dump["replicated_state"] == dump["replay"] == []  # there was nothing to find any more
        assert "warning: tick " in job.text()
        assert "not finite on rank 1" in job.text()
        assert_saved_state_is_finite(job)
        assert len(whole_checkpoints(job.run)) >= 2


def test_too_many_gradients_in_a_row_end_the_job(tmp_path):
    with faulty(tmp_path, "every gradient", ENDLESS, "--training.max_skipped_updates=25") as job:
        assert job.wait() == 1
        assert job.all_gone(1)
        reason = job.failure()["reason"]
        assert "on rank 1; " in reason
        assert "steps of the critic in a row, and training.max_skipped_updates is 25" in reason
        assert_saved_state_is_finite(job)
        assert whole_checkpoints(job.run)


def test_a_parameter_that_is_not_finite_ends_the_job_and_is_never_saved(tmp_path):
    with faulty(tmp_path, "parameter", ENDLESS) as job:
        assert job.wait() == 1
        assert job.all_gone(1)
        assert job.failure()["rank"] == 1
        assert "replicated state" in job.failure()["reason"]
        assert "critic" in job.failure()["reason"]
        assert "rank 1" in job.failure()["reason"]
        assert_saved_state_is_finite(job)
        assert whole_checkpoints(job.run)


def test_one_flipped_bit_is_found_and_named(tmp_path):
    with faulty(tmp_path, "bit", ENDLESS) as job:
        assert job.wait() == 1
        assert job.all_gone(1)
        assert "replicated state differs from rank 0's: critic on rank 1" in job.failure()["reason"]
        assert whole_checkpoints(job.run)


@pytest.mark.parametrize(
    ("poison", "tag", "named"),
    [
        ("actor", "Env/nonfinite_observation", ["actor observation[0]"]),
        ("critic", "Env/nonfinite_observation", ["critic observation[0]"]),
        ("reward", "Env/nonfinite_reward", ["pole_up", "reward"]),
    ],
)
def test_an_environment_s_value_ends_its_episode_alone(tmp_path, poison, tag, named):
    task = ("--task=tests.system.tasks.Poisoned", f"--task.poison={poison}")
    with Job(tmp_path, *OFTEN, LENGTH, *task) as job:
        assert job.wait() == 0, job.text()
        metrics = job.summary()["metrics"]
        assert metrics[tag] == 1
        assert sum(value for name, value in metrics.items() if name.startswith("Env/")) == 1
        (dump,) = dumps(job)
        assert (dump["tick"], dump["rank"], dump["environment"], dump["episode_step"]) == (30, 1, 3, 30)
        assert (dump["kind"], dump["nonfinite"]) == (tag.removeprefix("Env/"), named)
        assert job.summary()["skipped_updates"] == 0
        assert math.isfinite(metrics["Loss/critic"])
        assert_saved_state_is_finite(job)


def test_an_action_that_is_not_finite_ends_one_episode_and_reaches_no_replay(tmp_path):
    with faulty(tmp_path, "action", LENGTH) as job:
        assert job.wait() == 0, job.text()
        metrics = job.summary()["metrics"]
        assert metrics["Env/nonfinite_action"] == 1
        assert job.summary()["skipped_updates"] == 0
        (dump,) = dumps(job)
        assert (dump["kind"], dump["rank"], dump["environment"]) == ("nonfinite_action", 1, 3)
        assert dump["values"] == {"action": ["nan"]}
        assert_saved_state_is_finite(job)
