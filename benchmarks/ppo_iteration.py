"""How fast is an iteration of PPO, rollout and updates, against RSL-RL's own runner?

Both train Go2JoystickFlat with the settings of configs/ppo.yaml, in turns, in this run: the same environment with the
same physics threads, the same networks, float32, the same number of learner threads. Each runs in a process of its own,
with the environment variables it has in practice, and stands still while the other one is measured. RSL-RL's runner
steps the environment in its own process, as its users do, and logs nothing; ours has its collector beside it.

    python benchmarks/ppo_iteration.py [--json PATH] [--quick]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner as RslRlRunner
from shared.timing import in_turn, machine, table
from tensordict import TensorDict
from torch import Tensor

from unilab_fabric.config import CheckpointConfig, TrainingConfig
from unilab_fabric.envs.registry import make_task
from unilab_fabric.hooks.hook import Hooks
from unilab_fabric.launch.preflight import NUMPY_VARIABLES, TURN_VARIABLES
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.loop.collector import Collector, CollectorConfig
from unilab_fabric.onpolicy.assemble import assemble
from unilab_fabric.onpolicy.runner import OnPolicyRunner
from unilab_fabric.parallel.reduce import Ranks

REFERENCE = "RSL-RL's runner"
PRESET = Path(__file__).parents[1] / "configs" / "ppo.yaml"
_SAME = (
    "num_learning_epochs num_mini_batches clip_param lam value_loss_coef entropy_coef learning_rate max_grad_norm "
    "use_clipped_value_loss schedule desired_kl normalize_advantage_per_mini_batch"
)


def preset() -> tuple[str, dict[str, Any], PPO]:
    """Task, its settings and the learner's."""
    tree = yaml.safe_load(PRESET.read_text())
    learner = tree["learner"]["init_args"]
    lists = {name: tuple(value) for name, value in learner.items() if isinstance(value, list)}
    return tree["task"]["class_path"], tree["task"]["init_args"], PPO(**{**learner, **lists})


class TaskVecEnv(VecEnv):  # type: ignore[misc]
    """One of our tasks as RSL-RL wants an environment."""

    def __init__(self, task: str, init_args: dict[str, Any], threads: int) -> None:
        self.task = make_task(task, init_args, seed=1, num_threads=threads)
        spec = self.task.task_spec()
        self.num_envs, self.num_actions, self.max_episode_length = spec.num_envs, spec.action_size, 1000
        self.device = "cpu"
        self.cfg: dict[str, Any] = {}
        self.episode_length_buf = torch.zeros(self.num_envs)
        self.task.reset(seed=1)

    def get_observations(self) -> TensorDict:
        copies = {name: torch.from_numpy(value.copy()) for name, value in self.task.observation.items()}
        return TensorDict(copies, [self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
        _, reward, terminated, truncated, _ = self.task.step(actions.numpy())
        dones = torch.from_numpy(np.asarray(terminated | truncated, np.float32))
        rewards = torch.from_numpy(np.array(reward, np.float32))
        return self.get_observations(), rewards, dones, {"time_outs": torch.from_numpy(truncated.copy())}


def rsl_rl_runner(task: str, init_args: dict[str, Any], settings: PPO, threads: int) -> RslRlRunner:
    """RSL-RL's own runner, with the same networks and settings."""
    model = {"class_name": "MLPModel", "activation": settings.activation, "obs_normalization": True}
    gaussian = {"class_name": "GaussianDistribution", "init_std": settings.init_std, "std_type": settings.std_type}
    return RslRlRunner(
        TaskVecEnv(task, init_args, threads),
        {
            "num_steps_per_env": settings.num_steps_per_env,
            "save_interval": 10**9,
            "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
            "actor": {**model, "hidden_dims": settings.actor_hidden, "distribution_cfg": gaussian},
            "critic": {**model, "hidden_dims": settings.critic_hidden},
            "algorithm": {
                "class_name": "PPO",
                "gamma": settings.discount,
                **{name: getattr(settings, name) for name in _SAME.split()},
            },
        },
    )


@contextlib.contextmanager
def our_runner(task: str, init_args: dict[str, Any], settings: PPO, threads: int) -> Iterator[OnPolicyRunner]:
    """A rank of ours, alone."""
    collector = Collector(
        CollectorConfig(class_path=task, init_args=init_args, seed=1, num_threads=threads), rank=0, deadline_s=60.0
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield assemble(
                settings,
                collector,
                folder=Path(folder),
                training=TrainingConfig(),
                checkpoint=CheckpointConfig(every=0),
                manifest={},
                seed=1,
                precision="32-true",
                device=torch.device("cpu"),
                ranks=Ranks(),
                hooks=Hooks([]),
            )
        finally:
            collector.close()


class Worker:
    """One candidate in a process of its own, with the variables that it is run with; waits between its turns."""

    def __init__(self, name: str, threads: int, variables: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--worker", name, "--threads", str(threads)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        environment = {**os.environ, **variables}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, env=environment)

    def iteration(self) -> None:
        """Has it do one iteration, and waits."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "done\n":
            raise RuntimeError("a worker has ended")

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def work(name: str, threads: int) -> None:
    """A worker: an iteration for each line on standard input."""
    torch.set_num_threads(threads)
    task, init_args, settings = preset()
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(sys.stderr):  # RSL-RL prints its networks
        iteration: Callable[[], None]
        if name == REFERENCE:
            iteration = partial(rsl_rl_runner(task, init_args, settings, threads).learn, 1)
        else:
            iteration = stack.enter_context(our_runner(task, init_args, settings, threads)).advance
        for _ in sys.stdin:
            iteration()
            print("done", file=sys.__stdout__, flush=True)


def measure(threads: int, repeats: int, seconds: float) -> dict[str, dict[str, float]]:
    """Prints and returns the table."""
    task, init_args, settings = preset()
    every = {"OMP_NUM_THREADS": str(threads), **NUMPY_VARIABLES}
    ours = Worker("unilab_fabric", threads, every | TURN_VARIABLES)
    theirs = Worker(REFERENCE, threads, every)
    try:
        times = in_turn({REFERENCE: theirs.iteration, "unilab_fabric": ours.iteration}, repeats, seconds)
    finally:
        ours.close()
        theirs.close()
    title = f"{task}, {init_args['num_envs']} environments, {settings.num_steps_per_env} ticks an iteration"
    numbers = table(title, times, REFERENCE)
    for own in numbers.values():
        own["env_steps_per_sec"] = 1e3 * init_args["num_envs"] * settings.num_steps_per_env / own["ms"]
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of physics and learner")
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how fast")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.threads)
        return
    torch.set_num_threads(arguments.threads)
    described = machine()
    print(f"{described['processor']}, {described['threads']} threads, torch {described['torch']}")
    print("one iteration; ratio: RSL-RL's time / own time")
    repeats, seconds = (1, 0.1) if arguments.quick else (9, 2.0)
    numbers = measure(arguments.threads, repeats, seconds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, "iteration": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
