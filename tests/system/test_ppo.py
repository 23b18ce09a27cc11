"""PPO as a user runs it: ranks, reports, resume, RSL-RL's files, faults."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.system.jobs import ENDLESS, Job
from unilab_fabric.checkpoints import whole_checkpoints
from unilab_fabric.cli import main

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")

SMALL = [
    "--task=CartpoleSwingup",
    "--learner=PPO",
    "--task.num_envs=8",
    "--learner.num_steps_per_env=10",
    "--learner.actor_hidden=[16]",
    "--learner.critic_hidden=[16]",
    "--training.run_name=run",
    "--training.log_every=20",
    "--training.accelerator=cpu",
]


def test_two_ranks_train_report_resume_and_give_rsl_rl_s_file(tmp_path, capsys):
    with Job(tmp_path, "--devices=2", "--training.max_env_steps=1600", "--checkpoint.every=40", small=SMALL) as job:
        assert job.wait() == 0, job.text()
        summary = job.summary()
        assert (summary["status"], summary["world_size"], summary["env_steps"]) == ("completed", 2, 1600)
        assert "an iteration is 10 of them, and 20 optimiser steps" in job.text()
    events = EventAccumulator(str(job.run))
    events.Reload()
    tags = {"Loss/value", "Loss/surrogate", "Loss/entropy", "Loss/learning_rate", "Policy/mean_std"}
    assert tags <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("Loss/value")] == list(range(320, 1601, 320))

    with Job(tmp_path, "--devices=2", "--training.max_env_steps=2400", "--ckpt_path=last", small=SMALL) as job:
        assert job.wait() == 0, job.text()
        assert job.summary()["env_steps"] == 2400
    with contextlib.chdir(tmp_path):
        assert main(["evaluate", "--ckpt_path=last", "--episodes=4", "--episode_s=0.5"]) == 0
        assert main(["rsl_rl", "--ckpt_path=last", "--output=model_15.pt"]) == 0
    assert "model_15.pt: iteration 15 of runs/run/checkpoints/tick-000000150" in capsys.readouterr().out
    saved = torch.load(tmp_path / "model_15.pt", weights_only=True)
    assert saved["iter"] == 15
    ours = torch.load(whole_checkpoints(job.run)[-1] / "replicated.pt", weights_only=True)["learner"]
    assert torch.equal(saved["actor_state_dict"]["mlp.0.weight"], ours["actor/mlp.0.weight"])

    from_file = [*SMALL, "--learner.start_from=model_15.pt", "--training.run_name=second"]
    with Job(tmp_path, "--training.max_env_steps=80", small=from_file) as job:
        assert job.wait() == 0, job.text()


def test_another_learner_s_checkpoint_has_no_rsl_rl_file(tmp_path, capsys):
    with Job(tmp_path, "--training.max_env_steps=160") as job:
        assert job.wait() == 0, job.text()
    with contextlib.chdir(tmp_path):
        assert main(["rsl_rl", "--ckpt_path=last", "--output=model.pt"]) == 2
    assert "its learner is FastSAC; allowed: a run of PPO" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, 137)])
def test_a_signal_at_a_rank_ends_the_job_with_a_whole_checkpoint(tmp_path, number, status):
    with Job(tmp_path, "--devices=2", ENDLESS, "--checkpoint.every=20", small=SMALL) as job:
        victim = job.training(2)["rank 1"]
        since = time.monotonic()
        os.kill(victim, number)
        assert job.wait(20) == status, job.text()
        assert job.all_gone()
        assert time.monotonic() - since < 10
    assert whole_checkpoints(job.run)


def test_a_stopped_rank_is_named(tmp_path):
    with Job(
        tmp_path, "--devices=2", ENDLESS, "--training.stall_timeout_s=5", "--checkpoint.every=20", small=SMALL
    ) as job:
        os.kill(job.training(2)["rank 1"], signal.SIGSTOP)
        assert job.wait(30) != 0
        assert "rank 1" in job.failure()["reason"]


def test_a_run_whose_film_cannot_be_made_completes_with_a_warning(tmp_path):
    no_graphics = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MUJOCO_GL": "nonsense"}
    arguments = ["--devices=2", "--training.max_env_steps=320", "--training.play_after=true"]
    with Job(tmp_path, *arguments, small=SMALL, environment=no_graphics) as job:
        assert job.wait() == 0, job.text()
        assert job.summary()["status"] == "completed"
        assert "warning: no film was made: " in job.text()
