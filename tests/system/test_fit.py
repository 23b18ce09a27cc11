"""`fit` as a user runs it, on one rank and on two."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.system.jobs import Job
from unilab_fabric.checkpoints import whole_checkpoints
from unilab_fabric.config import load_run_config
from unilab_fabric.loop.phases import PHASES
from unilab_fabric.reporting.runs import read_run

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
SHARED_MEMORY = Path("/dev/shm")
EVERY_20 = "--checkpoint.every=20"


@pytest.fixture(autouse=True)
def no_segment_is_left():
    before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    yield
    after = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.is_dir() else set()
    assert after <= before


def replicated(job):
    return torch.load(whole_checkpoints(job.run)[-1] / "replicated.pt", weights_only=True)["learner"]


def test_all_spellings_of_one_device_give_the_same_bits(tmp_path):
    found = []
    for devices in ("null", "[]", "[0]", "1"):
        folder = tmp_path / f"devices {devices}"
        folder.mkdir()
        with Job(folder, f"--devices={devices}", "--training.max_env_steps=400") as job:
            assert job.wait() == 0, job.text()
            assert job.summary()["world_size"] == 1
            assert "no process group" in job.text()
            found.append(replicated(job))
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_two_ranks_train_log_checkpoint_and_resume(tmp_path):
    with Job(tmp_path, "--devices=2", "--training.max_env_steps=1600", EVERY_20) as job:
        assert job.wait() == 0, job.text()
        summary = job.summary()
        assert summary["status"] == "completed"
        assert summary["world_size"] == 2
        assert summary["env_steps"] == 1600
        assert [rank["env_steps"] for rank in summary["ranks"]] == [800, 800]
        assert all(rank["env_steps_per_sec"] > 0 for rank in summary["ranks"])
        assert summary["env_steps_per_sec"] == pytest.approx(sum(r["env_steps_per_sec"] for r in summary["ranks"]))
        assert {"mean_reward", "wall_s", "first_tick_s", "versions", "topology"} <= summary.keys()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    assert len(list(job.run.glob("events.out.tfevents*"))) == 1
    for rank in read_run(job.run).ranks:
        assert all(rank.phase_s[phase] > 0 for phase in PHASES)
        assert rank.stepping_s < rank.tick_s
        assert sum(rank.learner_s.values()) == pytest.approx(rank.tick_s, rel=0.01)
    assert load_run_config(job.run / "config.yaml").training.devices == 2
    events = EventAccumulator(str(job.run))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"Perf/{phase}_ms" for phase in PHASES} <= tags
    assert {"Perf/env_steps_per_sec", "Loss/critic", "Loss/actor", "Policy/temperature"} <= tags
    steps = [event.step for event in events.Scalars("Perf/env_steps_per_sec")]
    assert steps == list(range(160, 1601, 160))

    with Job(tmp_path, "--devices=2", "--training.max_env_steps=2400", EVERY_20, "--ckpt_path=last") as job:
        assert job.wait() == 0, job.text()
        assert job.summary()["env_steps"] == 2400
        assert [rank["env_steps"] for rank in job.summary()["ranks"]] == [400, 400]  # of this process
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    events = EventAccumulator(str(job.run))
    events.Reload()
    steps = [event.step for event in events.Scalars("Perf/env_steps_per_sec")]
    assert steps == list(range(160, 2401, 160))


def test_with_sizes_of_the_job_two_ranks_go_on_with_all_that_one_had(tmp_path):
    job_sizes = ["--training.batch=job", EVERY_20]
    with Job(tmp_path, *job_sizes, "--training.max_env_steps=800") as job:
        assert job.wait() == 0, job.text()
        assert job.summary()["ticks"] == 100
    with Job(tmp_path, *job_sizes, "--devices=2", "--training.max_env_steps=1600", "--ckpt_path=last") as job:
        assert job.wait() == 0, job.text()
        assert job.summary()["ticks"] == 200
        assert [rank["env_steps"] for rank in job.summary()["ranks"]] == [400, 400]
        assert "replicated state and replay continue" in job.text()
    plain = load_run_config(job.run / "config.yaml")
    assert (plain.task.init_args["num_envs"], plain.learner.init_args["batch_size"]) == (8, 32)


def test_a_gymnasium_environment_trains(tmp_path):
    with Job(tmp_path, "--task=gymnasium:Pendulum-v1", "--task.num_envs=8", "--training.max_env_steps=4000") as job:
        assert job.wait() == 0, job.text()
        summary = job.summary()
    assert summary["mean_episode_length"] == 200  # Pendulum's time limit
    assert -1800 < summary["mean_reward"] < 0
