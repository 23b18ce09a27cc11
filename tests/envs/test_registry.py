import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from tests.envs.toy import ToyTask
from tests.offpolicy.counting import CountingEnv
from unilab_fabric.envs.gymnasium_env import AdaptedTask, GymnasiumTask
from unilab_fabric.envs.registry import TASKS, describe_tasks, make_task, task_class
from unilab_fabric.envs.tasks.cartpole import CartpoleSwingup
from unilab_fabric.envs.tasks.go2_joystick import Go2JoystickFlat, Go2Rewards
from unilab_fabric.errors import UserError


def test_a_task_is_found_by_short_name_by_path_and_by_gymnasium_id():
    assert task_class("CartpoleSwingup") is CartpoleSwingup
    assert task_class("unilab_fabric.envs.tasks.cartpole.CartpoleSwingup") is CartpoleSwingup
    assert task_class("tests.offpolicy.counting.CountingEnv") is CountingEnv
    assert issubclass(task_class("gymnasium:Pendulum-v1"), GymnasiumTask)


def test_each_shipped_task_is_described_by_one_line():
    described = describe_tasks()
    assert [name for name, _ in described] == list(TASKS)
    assert all(20 < len(line) < 120 for _, line in described)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartpolSwingup", "task is CartpolSwingup; did you mean CartpoleSwingup?"),
        ("Humanoid", "task is Humanoid; allowed: CartpoleSwingup, G1MotionTracking, G1WalkFlat, Go2JoystickFlat"),
        ("nowhere.tasks.Mine", "task is nowhere.tasks.Mine; allowed: .* there is no module nowhere"),
        ("tests.envs.nowhere.Mine", "there is no module tests.envs.nowhere"),
        ("tests.envs.toy.ToyTasks", "allowed: a VectorEnv class of tests.envs.toy; did you mean ToyTask?"),
        ("unilab_fabric.config.RunConfig", "allowed: a VectorEnv class of unilab_fabric.config"),
        ("gymnasium:Pendulm-v1", "task is gymnasium:Pendulm-v1; did you mean gymnasium:Pendulum-v1?"),
        ("gymnasium:nowhere:Mine-v0", "there is no module nowhere"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_with_the_nearest(name, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        task_class(name)


@pytest.mark.parametrize(
    ("body", "error"),
    [("import not_there_either\n", ModuleNotFoundError), ("1 / 0\n", ZeroDivisionError)],
)
def test_an_error_inside_a_users_module_is_its_own(tmp_path, monkeypatch, body, error):
    (tmp_path / "their_task.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error) as raised:
        task_class("their_task.Task")
    assert raised.traceback[-1].path.name == "their_task.py"


def test_our_tasks_get_seed_and_threads_and_foreign_ones_only_what_is_theirs():
    ours = make_task("tests.envs.toy.ToyTask", {"num_envs": 2, "limit": 7}, seed=5, num_threads=1)
    assert isinstance(ours, ToyTask)
    assert ours.np_random_seed == 5
    foreign = make_task("tests.offpolicy.counting.CountingEnv", {"num_envs": 2}, seed=5, num_threads=1)
    assert isinstance(foreign, AdaptedTask)
    assert foreign.task_spec().name == "CountingEnv"


def test_plain_values_become_the_dataclasses_and_tuples_of_the_constructor():
    plain = {
        "num_envs": 2,
        "rewards": {"contact": 1.0},
        "commands": {"forward": [0.5, 0.5], "left": [0, 0], "turn": [0, 0]},
        "randomization": {"kp": [30, 40], "friction": None},
    }
    task = make_task("Go2JoystickFlat", plain, seed=0, num_threads=1)
    assert isinstance(task, Go2JoystickFlat)
    assert task.reset()[0]["actor"][:, 42:45].tolist() == [[0.5, 0, 0]] * 2
    gains = task.get_state()["physics/actuator_gainprm"][..., 0]
    assert (gains >= 30).all()
    assert len(np.unique(gains)) == 24


def test_a_dataclass_may_be_given_as_it_is():
    task = make_task("Go2JoystickFlat", {"num_envs": 1, "rewards": Go2Rewards(contact=7.0)}, seed=0, num_threads=1)
    assert isinstance(task, Go2JoystickFlat)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_env": 2}, "task.num_env is 2; did you mean num_envs?"),
        ({"num_envs": 2, "rewards": {"contacts": 1.0}}, "task.rewards.contacts is 1.0; did you mean contact?"),
        ({"num_envs": 2, "physics": "quick"}, "task.physics is quick; allowed: fast, faithful"),
        ({"num_envs": 2, "episode_s": 0.0}, "task.episode_s is 0.0; allowed: 0.02 s"),
        ({"num_envs": 2, "action_scale": -1.0}, "task.action_scale is -1.0; allowed: more than 0"),
        ({"num_envs": 2, "commands": {"turn": [1, 0]}}, r"task.commands.turn is \[1, 0\]; allowed: two finite numbers"),
        ({"num_envs": 2, "pushes": {"interval_s": 0.0}}, "task.pushes.interval_s is 0.0; allowed: 0.02 s or more"),
        ({"num_envs": 2, "mjcf": "/nowhere.xml"}, "task.mjcf is /nowhere.xml; allowed: an MJCF file that compiles"),
    ],
)
def test_a_wrong_argument_is_told_by_name(arguments, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        make_task("Go2JoystickFlat", arguments, seed=0, num_threads=1)


def test_negative_threads_are_refused():
    with pytest.raises(UserError, match=r"task.num_threads is -1; allowed: 0 \(all allowed cores\) or more"):
        make_task("CartpoleSwingup", {"num_envs": 2}, seed=0, num_threads=-1)


def test_shipped_tasks_stand_in_gymnasiums_registry():
    assert {f"unilab_fabric/{name}-v0" for name in TASKS} <= set(gymnasium.registry)


LIGHT = """
import sys
from unilab_fabric.envs.registry import describe_tasks, make_task
describe_tasks()
task = make_task("Go2JoystickFlat", {"num_envs": 2}, seed=0, num_threads=1)
task.reset()
task.advance(task.action_space.sample())
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "lightning", "lightning_fabric", "tensorboard"}))
"""


def test_a_bare_interpreter_runs_go2_without_torch_and_lightning():
    out = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
