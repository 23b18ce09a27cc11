"""Policies that leave the trainer, run as a robot's program would: from the files alone."""

import dataclasses
import json

import mujoco
import numpy as np
import onnxruntime
import pytest
import torch

from tests.offpolicy.runs import SMALL, run
from unilab_fabric import exporting
from unilab_fabric.checkpoints import saved_config, whole_checkpoints
from unilab_fabric.cli import main
from unilab_fabric.config import resolve_run, to_plain
from unilab_fabric.envs.registry import make_task
from unilab_fabric.envs.robots import g1, go2
from unilab_fabric.errors import UserError
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.policies import trained_learner

LEARNERS = {
    "FastSAC": SMALL,
    "FlashSAC": FlashSAC(actor_width=16, critic_width=16, blocks=1, batch_size=32, replay_ticks=100, learning_starts=4),
    "PPO": PPO(actor_hidden=(32, 16), critic_hidden=(16,), num_steps_per_env=6, init_std=0.3),
}
ROBOTS = {"Go2JoystickFlat": go2, "G1WalkFlat": g1}


def checkpoint(folder, learner, task="Go2JoystickFlat"):
    """A checkpoint of a few ticks, as `fit` leaves it."""
    settings = LEARNERS[learner]
    init_args = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
    section = {"class_path": learner, "init_args": init_args}
    config = {"task": {"class_path": task, "init_args": {"num_envs": 8}}, "learner": section}
    manifest = {"config": to_plain(resolve_run(config))}
    run(folder, 12, task=task, init_args={"num_envs": 8}, learner=settings, manifest=manifest)
    return whole_checkpoints(folder)[-1]


@pytest.fixture(scope="module", params=list(LEARNERS))
def exported(request, tmp_path_factory):
    """Of each learner: a checkpoint, the folder of its files and its contract."""
    folder = tmp_path_factory.mktemp(request.param)
    path = checkpoint(folder / "run", request.param)
    contract = exporting.export(path, folder / "out")
    assert contract == json.loads((folder / "out" / exporting.CONTRACT).read_text())
    return path, folder / "out", contract


def trained_policy(path):
    config = resolve_run(saved_config(path))
    task = make_task(config.task.class_path, config.task.init_args, seed=1, num_threads=1)
    return trained_learner(path, config, task.task_spec()).policy().eval()


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_both_files_compute_what_the_policy_does_for_any_number_of_rows(exported, rows):
    path, folder, contract = exported
    assert sorted(file.name for file in folder.iterdir()) == ["policy.json", "policy.onnx", "policy.pt"]
    observation = 2.0 * torch.randn(rows, contract["policy"]["input"]["shape"][1]) + 0.3
    with torch.no_grad():
        expected = trained_policy(path)(observation)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    (action,) = session.run(["action"], {"observation": observation.numpy()})
    np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.jit.load(folder / "policy.pt")(observation), expected, rtol=1e-5, atol=1e-5)
    assert expected.abs().max() > 1e-3  # it is not a policy of zeros


def test_the_normaliser_is_inside(exported):
    path, _, contract = exported
    if contract["learner"] == "FlashSAC":
        pytest.skip("its statistics are those of its first BatchNorm")
    policy = trained_policy(path)
    moved = policy.normaliser
    shift = moved.shift if contract["learner"] == "FastSAC" else moved._mean
    assert shift.abs().max() > 1e-3


class Robot:
    """A robot in plain MuJoCo, run by the contract: nothing of our environments is used."""

    def __init__(self, contract, model, folder):
        self.contract, self.model, self.data = contract, model, mujoco.MjData(model)
        self.session = onnxruntime.InferenceSession(folder / "policy.onnx")
        self.stand = np.array(contract["joints"]["default_rad"])
        self.action = np.zeros(contract["action"]["size"], np.float32)
        self.substeps = round(contract["control"]["step_s"] / contract["control"]["physics_step_s"])

    def observation(self, command, phase):
        body = "torso_link" if self.contract["robot"].startswith("unitree_g1") else "base"
        mujoco.mj_forward(self.model, self.data)
        spin = np.zeros(6)
        mujoco.mj_objectVelocity(self.model, self.data, mujoco.mjtObj.mjOBJ_XBODY, self.model.body(body).id, spin, 1)
        rotation = self.data.body(body).xmat.reshape(3, 3)
        values = {
            "angular_velocity": spin[:3],
            "projected_gravity": rotation.T @ [0, 0, -1],
            "joint_angle_minus_default": self.data.qpos[7:] - self.stand,
            "joint_rate": self.data.qvel[6:],
            "last_action": self.action,
            "command": command,
            "gait_phase": phase,
        }
        terms = self.contract["observation"]
        return np.concatenate([term["scale"] * values[term["name"]] for term in terms]).astype(np.float32)

    def step(self, observation):
        (action,) = self.session.run(["action"], {"observation": observation[None]})
        self.action = action[0]
        self.data.ctrl[:] = self.stand + self.contract["action"]["scale_rad"] * self.action
        for _ in range(self.substeps):
            mujoco.mj_step(self.model, self.data)


def test_the_contract_alone_drives_500_steps_as_our_environment_does(exported):
    _, folder, contract = exported
    task = make_task("Go2JoystickFlat", {"num_envs": 1, "episode_s": 100.0}, seed=3, num_threads=1)
    task.reset(seed=3)
    robot = Robot(contract, go2.load("fast"), folder)
    robot.data.qpos[:], robot.data.qvel[:] = task.sims.qpos[0], task.sims.qvel[0]
    ours = task.observation["actor"][0]
    names = [term["name"] for term in contract["observation"]]
    starts = {term["name"]: term["start"] for term in contract["observation"]}
    assert names[-1] == "gait_phase"
    command, clock = ours[starts["command"] :][:3].copy(), float(ours[starts["gait_phase"]])
    offsets, rate = np.array(contract["gait"]["offsets"]), contract["gait"]["rate_hz"]
    for step in range(500):
        phase = (clock + offsets + step * rate * contract["control"]["step_s"]) % 1.0
        observation = robot.observation(command, phase)
        difference = np.abs(observation - ours)
        turned = difference[starts["gait_phase"] :]
        np.minimum(turned, 1 - turned, out=turned)  # 0.999 is next to 0
        assert difference.max() < 2e-3, (step, int(difference.argmax()))
        robot.step(observation)
        task.advance(robot.action[None].copy())
        assert not task.terminated[0], step
    np.testing.assert_allclose(robot.data.qpos, task.sims.qpos[0], atol=1e-3)


def test_the_contract_of_the_g1_describes_what_its_policy_sees(tmp_path):
    path = checkpoint(tmp_path / "run", "PPO", task="G1WalkFlat")
    contract = exporting.export(path, tmp_path / "out")
    task = make_task("G1WalkFlat", {"num_envs": 1, "max_tilt": 179.0, "min_height": 0.0}, seed=3, num_threads=1)
    task.reset(seed=3)
    robot = Robot(contract, g1.load("fast"), tmp_path / "out")
    starts = {term["name"]: term["start"] for term in contract["observation"]}
    for _ in range(30):
        robot.data.qpos[:], robot.data.qvel[:] = task.sims.qpos[0], task.sims.qvel[0]
        ours = task.observation["actor"][0]
        observation = robot.observation(ours[starts["command"] :][:3], ours[starts["gait_phase"] :])
        np.testing.assert_allclose(observation, ours, atol=1e-4)
        robot.step(observation)
        task.advance(robot.action[None].copy())
    assert contract["control"]["rate_hz"] == 50
    assert contract["control"]["physics_step_s"] == pytest.approx(1 / 150)


@pytest.mark.parametrize("task", ROBOTS)
def test_a_contract_tells_joints_gains_and_limits_of_the_robot(task):
    made = make_task(task, {"num_envs": 1}, seed=1, num_threads=1)
    contract, robot = made.contract(), ROBOTS[task]
    joints = contract["joints"]
    assert tuple(joints["names"]) == robot.JOINTS
    assert tuple(joints["default_rad"]) == robot.STAND_JOINTS
    model = robot.load("faithful")
    for i, name in enumerate(robot.JOINTS):
        servo = model.actuator(i)
        assert joints["kp"][i] == servo.gainprm[0]
        assert joints["kd"][i] == pytest.approx(-servo.biasprm[2] + model.joint(name).damping[0])
        assert joints["torque_limit_nm"][i] == servo.forcerange[1]
        assert [joints["lower_rad"][i], joints["upper_rad"][i]] == model.joint(name).range.tolist()
    sizes = [term["size"] for term in contract["observation"]]
    assert sum(sizes) == made.task_spec().actor_size
    assert [term["start"] for term in contract["observation"]] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert json.loads(json.dumps(contract)) == contract


def test_a_task_without_a_contract_is_refused_in_one_line(tmp_path, capsys):
    section = {"class_path": "FastSAC", "init_args": dataclasses.asdict(SMALL)}
    config = {"task": {"class_path": "CartpoleSwingup", "init_args": {"num_envs": 8}}, "learner": section}
    run(tmp_path, 6, manifest={"config": to_plain(resolve_run(config))})
    with pytest.raises(UserError, match="it has no contract for a robot's program"):
        exporting.export(whole_checkpoints(tmp_path)[-1], tmp_path / "out")
    assert main(["export", f"--ckpt_path={tmp_path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path, capsys):
    path = checkpoint(tmp_path / "run", "FastSAC")
    assert main(["export", f"--ckpt_path={path}"]) == 0
    assert (tmp_path / "run" / "export" / "policy.onnx").is_file()
    assert "FastSAC for unitree_go2 at 50 Hz" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["export", f"--ckpt_path={path}", f"--output={tmp_path / 'file'}"]) == 2
    assert "allowed: a folder" in capsys.readouterr().err


def test_missing_packages_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"pip install 'unilab-fabric\[export\]'"):
        exporting.export(tmp_path, tmp_path)
