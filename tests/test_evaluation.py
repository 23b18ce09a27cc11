import numpy as np
import pytest
import torch

from tests.offpolicy.runs import SMALL, run
from unilab_fabric import cli
from unilab_fabric.checkpoints import read_manifest, whole_checkpoints
from unilab_fabric.config import resolve_run, to_plain
from unilab_fabric.envs.registry import make_task
from unilab_fabric.evaluation import changes_of, evaluate, first_episodes, format_table, wilson_interval
from unilab_fabric.parallel.reduce import Ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a cart-pole run of 60 ticks, with its configuration."""
    folder = tmp_path_factory.mktemp("run")
    config = resolve_run(
        {
            "task": {"class_path": "CartpoleSwingup", "init_args": {"num_envs": 8}},
            "learner": {"class_path": "FastSAC", "init_args": vars(SMALL)},
        }
    )
    run(folder, 60, manifest={"config": to_plain(config)})
    return whole_checkpoints(folder)[-1]


def judge(checkpoint, **options):
    return evaluate(checkpoint, **({"episodes": 6, "episode_s": 1.0, "physics": "faithful", "seed": 1} | options))


def test_an_evaluation_repeats_and_depends_on_its_seed(checkpoint):
    first = judge(checkpoint)
    assert first == judge(checkpoint)
    assert first["figures"] != judge(checkpoint, seed=2)["figures"]
    assert first["tick"] == read_manifest(checkpoint)["tick"] == 60
    assert first["figures"]["length"] == {"mean": 25, "low": 25, "high": 25}  # 1 s of steps of 0.04 s


def test_the_figures_are_those_of_the_policy_stepped_by_hand(checkpoint):
    result = judge(checkpoint)
    env = make_task("CartpoleSwingup", {"num_envs": 6, "episode_s": 1.0}, seed=1, num_threads=1)
    learner = SMALL.build(env.task_spec(), torch.device("cpu"), "32-true", ranks=Ranks(), seed=1, total_updates=1)
    saved = torch.load(checkpoint / "replicated.pt", weights_only=True)["learner"]
    for name, tensor in learner.replicated.items():
        tensor.copy_(saved[name])
    observation, _ = env.reset(seed=1)
    total = np.zeros(6)
    for _ in range(25):
        with torch.no_grad():
            action = learner.policy()(torch.from_numpy(observation["actor"])).numpy()
        observation, reward, _, _, _ = env.step(action)
        total += reward
    assert result["figures"]["return"]["mean"] == pytest.approx(total.mean(), rel=1e-5)
    half = 1.959964 * total.std(ddof=1) / 6**0.5
    assert result["figures"]["return"]["high"] == pytest.approx(total.mean() + half, rel=1e-5)


def test_only_the_first_episode_of_each_environment_counts(checkpoint):
    class Fixed:
        def policy(self):
            return torch.nn.Linear(2, 1)

    env = make_task("tests.offpolicy.counting.CountingEnv", {"num_envs": 3}, seed=1, num_threads=1)
    figures = first_episodes(env, Fixed(), seed=1)
    assert figures["l"].tolist() == [3, 4, 5]
    assert figures["r"].tolist() == [6, 10, 15]


def test_wilsons_interval_by_hand():
    low, high = wilson_interval(0, 128)
    assert low == 0
    assert high == pytest.approx(0.02914, abs=1e-5)  # z^2 / (n + z^2)
    low, high = wilson_interval(5, 10)
    assert (low, high) == (pytest.approx(0.23659, abs=1e-5), pytest.approx(0.76341, abs=1e-5))


def test_the_table_names_what_was_judged(checkpoint):
    text = format_table(judge(checkpoint))
    assert text.splitlines()[0] == "CartpoleSwingup, 6 episodes of at most 1 s, tick 60 (480 env steps)"
    go2 = format_table(judge(checkpoint) | {"task": "Go2JoystickFlat", "physics": "faithful"})
    assert go2.splitlines()[0].startswith("Go2JoystickFlat, 6 episodes of at most 1 s, faithful physics, tick 60")
    assert any(line.startswith("return") for line in text.splitlines())


def test_an_override_changes_the_task_and_is_told(checkpoint, capsys):
    result = judge(checkpoint, overrides={"episode_s": 2.0})
    assert result["changed"] == {"episode_s": [10.0, 1.0]}  # the length of the evaluation has the last word
    assert "episode_s: 10.0 in the run, 1.0 here" in format_table(result)
    arguments = ["evaluate", f"--ckpt_path={checkpoint}", "--episodes=2", "--episode_s=0.4"]
    assert cli.main([*arguments, "--task.stagger", "true"]) == 0
    assert cli.main([*arguments, "--task.nothing=1"]) == 2
    assert "task.nothing is 1" in capsys.readouterr().err


def test_of_a_section_only_what_differs_is_told():
    run = {"num_envs": 2, "terrain": {"levels": 10, "seed": 0}, "noise": None}
    here = {"num_envs": 8, "terrain": {"levels": 1, "seed": 0}, "noise": {"gyro": 0.1}}
    assert changes_of(run, here) == {"terrain.levels": [10, 1], "noise": [None, {"gyro": 0.1}]}
