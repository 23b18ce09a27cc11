"""Makes the shipped clips: python -m unilab_fabric.envs.clips.make [FOLDER]

A clip is written as what the feet and the centre of mass do, and what the upper body does; the legs follow by inverse
kinematics. Everything moves smoothly (a fifth-order step between two rests); a foot that carries the robot stays there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs.clips import CLIPS
from unilab_fabric.envs.motions import Motion, Poses, complete, save_motion
from unilab_fabric.envs.robots import g1

FPS = 50.0
_ROUNDS = 40
_LEG = 6  # joints


@dataclass
class Frame:
    """What the robot is to do at one moment; lengths in m, angles in rad."""

    com: NDArray[np.float64]
    """(2,), where the centre of mass is to be over the floor."""
    feet: NDArray[np.float64]
    """(2, 3), positions of the left and the right ankle."""
    drop: float = 0.0
    """How far the pelvis is below where it stands."""
    upper: dict[str, float] = field(default_factory=dict)
    """Angles of waist and arms that differ from the stand pose."""


def smooth(time_s: float, start_s: float, end_s: float) -> float:
    """From 0 at `start_s` to 1 at `end_s` [s], at rest at both ends; 10 s^3 - 15 s^4 + 6 s^5."""
    s = min(max((time_s - start_s) / (end_s - start_s), 0.0), 1.0)
    return s**3 * (10 - 15 * s + 6 * s * s)


def there_and_back(time_s: float, start_s: float, middle_s: float, end_s: float) -> float:
    """0, 1 at `middle_s`, 0 again."""
    return smooth(time_s, start_s, middle_s) - smooth(time_s, middle_s, end_s)


class Robot:
    """The G1, whose legs reach for where its feet are to be."""

    def __init__(self) -> None:
        self.model = g1.load("faithful")
        self.data = mujoco.MjData(self.model)
        self.data.qpos[2], self.data.qpos[3] = g1.STAND_HEIGHT, 1.0
        self.data.qpos[7:] = g1.STAND_JOINTS
        mujoco.mj_forward(self.model, self.data)
        self.ankles = [self.model.body(f"{side}_ankle_roll_link").id for side in g1.SIDES]
        self.feet = self.data.xpos[self.ankles].copy()
        self.com = self.data.subtree_com[0, :2].copy()
        self._jacobian = np.zeros((2, 3, self.model.nv))

    def reach(self, frame: Frame) -> NDArray[np.float64]:
        """qpos (36,) at which feet, centre of mass and upper body are as wanted; from the pose before."""
        qpos = self.data.qpos
        qpos[2] = g1.STAND_HEIGHT - frame.drop
        for part, angle in frame.upper.items():
            qpos[7 + g1.PARTS.index(part)] = angle
        for _ in range(_ROUNDS):
            mujoco.mj_kinematics(self.model, self.data)
            mujoco.mj_comPos(self.model, self.data)
            qpos[:2] += frame.com - self.data.subtree_com[0, :2]
            mujoco.mj_kinematics(self.model, self.data)
            mujoco.mj_comPos(self.model, self.data)
            for side, ankle in enumerate(self.ankles):
                self._step_leg(side, ankle, frame.feet[side])
        return np.array(qpos)

    def _step_leg(self, side: int, ankle: int, target: NDArray[np.float64]) -> None:
        """One Gauss-Newton step of a leg towards a flat foot at `target`, pointing ahead."""
        mujoco.mj_jac(self.model, self.data, self._jacobian[0], self._jacobian[1], self.data.xpos[ankle], ankle)
        columns = slice(6 + side * _LEG, 6 + (side + 1) * _LEG)
        jacobian = np.concatenate([self._jacobian[0][:, columns], self._jacobian[1][:, columns]])
        turn, tilt = np.zeros(3), self.data.xquat[ankle] * [1, -1, -1, -1]
        mujoco.mju_quat2Vel(turn, tilt, 1.0)
        error = np.concatenate([target - self.data.xpos[ankle], turn])
        damped = jacobian.T @ jacobian + 1e-6 * np.eye(_LEG)
        self.data.qpos[7 + side * _LEG : 7 + (side + 1) * _LEG] += np.linalg.solve(damped, jacobian.T @ error)


def squat_and_step(time_s: float, robot: Robot) -> Frame:
    """Squats, then steps forward with the right foot and draws the left one up; 9 s."""
    stride, lift, inward = 0.16, 0.07, 0.012
    left, right = robot.feet[0].copy(), robot.feet[1].copy()
    over_left = smooth(time_s, 3.2, 4.2) - smooth(time_s, 5.4, 6.4)
    over_right = smooth(time_s, 5.4, 6.4) - smooth(time_s, 7.6, 8.6)
    right[0] += stride * smooth(time_s, 4.3, 5.3)
    right[2] += lift * there_and_back(time_s, 4.3, 4.8, 5.3)
    left[0] += stride * smooth(time_s, 6.5, 7.5)
    left[2] += lift * there_and_back(time_s, 6.5, 7.0, 7.5)
    ahead = stride * (smooth(time_s, 5.4, 6.4))
    com = robot.com + np.array([ahead, 0.0])
    com[1] += over_left * (robot.feet[0, 1] - inward) + over_right * (robot.feet[1, 1] + inward)
    arms = there_and_back(time_s, 0.5, 1.6, 2.8)
    upper = {f"{side}_shoulder_pitch": 0.2 - 0.9 * arms for side in g1.SIDES}
    drop = 0.02 * smooth(time_s, 2.8, 3.4) * (1 - smooth(time_s, 8.2, 8.9)) + 0.14 * arms
    return Frame(com=com, feet=np.stack([left, right]), drop=drop, upper=upper)


def wave_and_turn(time_s: float, robot: Robot) -> Frame:
    """Raises the right arm and waves, then turns the trunk to one side and to the other; 8 s."""
    raised = smooth(time_s, 0.4, 1.4) - smooth(time_s, 3.6, 4.6)
    waves = raised * np.sin(2 * np.pi * 1.25 * (time_s - 1.4)) * smooth(time_s, 1.2, 1.8)
    turned = there_and_back(time_s, 4.6, 5.4, 6.2) - there_and_back(time_s, 5.9, 6.7, 7.5)
    upper = {
        "right_shoulder_pitch": 0.2 - 0.5 * raised,
        "right_shoulder_roll": -0.2 - 1.5 * raised,
        "right_elbow": 0.6 - 0.5 * raised,
        "right_shoulder_yaw": 0.45 * waves,
        "right_wrist_roll": 0.3 * waves,
        "waist_yaw": 0.8 * turned,
        "waist_roll": 0.08 * raised,
    }
    return Frame(com=robot.com.copy(), feet=robot.feet.copy(), drop=0.015 * (raised + abs(turned)), upper=upper)


LENGTHS_S: dict[str, tuple[float, Callable[[float, Robot], Frame]]] = {
    "squat_and_step": (9.2, squat_and_step),
    "wave_and_turn": (8.0, wave_and_turn),
}


def make(name: str) -> Motion:
    """The clip of that name."""
    length_s, clip = LENGTHS_S[name]
    robot = Robot()
    times = np.arange(round(length_s * FPS) + 1) / FPS
    qpos = np.stack([robot.reach(clip(float(time), robot)) for time in times])
    poses = Poses(fps=FPS, root_pos=qpos[:, :3], root_quat=qpos[:, 3:7], joint_pos=qpos[:, 7:])
    return complete(poses, robot.model)


def main(folder: Path) -> None:
    """Writes all clips."""
    for name in CLIPS:
        save_motion(make(name), folder / f"{name}.npz")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
