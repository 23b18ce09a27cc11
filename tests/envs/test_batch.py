import subprocess
import sys

import mujoco
import numpy as np
import pytest

from unilab_fabric.envs.batch import (
    Simulations,
    lever_matrix,
    point_velocity_b,
    rotation_matrix,
)

# A floating body with an off-centre site and all the sensors that its state should agree with.
FLOATING = """
<mujoco>
  <option gravity="0 0 -9.81"/>
  <worldbody>
    <body pos="0 0 1">
      <freejoint/>
      <geom type="box" size="0.1 0.2 0.3" pos="0.05 0 0.1"/>
      <site name="point" pos="0.1 -0.2 0.3"/>
      <body pos="0.2 0 0">
        <joint name="wheel" axis="0 1 0"/>
        <geom size="0.1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor name="wheel" joint="wheel"/></actuator>
  <sensor>
    <gyro name="gyro" site="point"/>
    <velocimeter name="velocity" site="point"/>
    <framepos name="position" objtype="site" objname="point"/>
  </sensor>
</mujoco>
"""


@pytest.fixture
def model():
    return mujoco.MjModel.from_xml_string(FLOATING)


def random_motion(model, n, seed=0):
    rng = np.random.default_rng(seed)
    motion = rng.normal(size=(n, model.nq + model.nv))
    motion[:, 3:7] /= np.linalg.norm(motion[:, 3:7], axis=1, keepdims=True)
    return motion


def test_base_quantities_agree_with_mujocos_sensors_for_any_pose(model):
    motion = random_motion(model, 20)
    state = motion.T.astype(np.float32)
    rotation = rotation_matrix(state[3:7])
    velocity = point_velocity_b(rotation, state[8:11], state[11:14], lever_matrix((0.1, -0.2, 0.3)))
    data = mujoco.MjData(model)
    for i in range(20):
        data.qpos[:], data.qvel[:] = np.split(motion[i], [model.nq])
        mujoco.mj_forward(model, data)
        body = data.xmat[1].reshape(3, 3)
        np.testing.assert_allclose(rotation[:, :, i], body, atol=1e-5)
        np.testing.assert_allclose(-rotation[2, :, i], body.T @ [0, 0, -1], atol=1e-5)
        np.testing.assert_allclose(state[11:14, i], data.sensor("gyro").data, atol=1e-5)
        np.testing.assert_allclose(velocity[:, i], data.sensor("velocity").data, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_is_that_many_mj_steps_bit_for_bit(model, threads):
    motion = random_motion(model, 7)
    sims = Simulations(model, 7, substeps=3, num_threads=threads)
    sims.place(np.arange(7), motion)
    sims.ctrl[:] = np.arange(7)[:, None]
    readings = sims.sensors(["velocity", "position"])
    sims.step()
    for i in range(7):
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = np.split(motion[i], [model.nq])
        data.ctrl[:] = i
        for _ in range(3):
            mujoco.mj_step(model, data)
        assert sims.qpos[i].tolist() == data.qpos.tolist()
        assert sims.qvel[i].tolist() == data.qvel.tolist()
        assert sims.motion[i].tolist() == [*data.qpos, *data.qvel]
        np.testing.assert_array_equal(readings[i], data.sensordata[3:].astype(np.float32))


def test_sensors_are_one_physics_step_old(model):
    sims = Simulations(model, 1, substeps=1, num_threads=1)
    motion = random_motion(model, 1)
    sims.place(np.arange(1), motion)
    position = sims.sensors(["position"])
    sims.step()
    data = mujoco.MjData(model)
    data.qpos[:] = motion[0, : model.nq]
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(position[0], data.sensor("position").data, rtol=1e-6)


def test_placing_some_leaves_the_others_and_forgets_what_was(model):
    sims = Simulations(model, 3, substeps=1, num_threads=1)
    sims.ctrl[:] = 5
    sims.step()
    before = sims.state.copy()
    motion = random_motion(model, 1)
    sims.place(np.array([1]), motion)
    fresh = Simulations(model, 1, substeps=1, num_threads=1)
    fresh.place(np.array([0]), motion)
    assert sims.state[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert sims.state[1].tolist() == fresh.state[0].tolist()
    assert sims.qpos[1].tolist() == motion[0, : model.nq].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e12])
@pytest.mark.parametrize("column", [2, 9])  # a position, a velocity
def test_a_diverged_simulation_is_reported_once_and_alone(model, value, column):
    sims = Simulations(model, 3, substeps=2, num_threads=1)
    assert sims.step() is None
    sims.motion[1, column] = value
    assert sims.step().tolist() == [False, True, False]
    assert np.isfinite(sims.motion).all()
    assert sims.step() is None
    sims.motion[1, column] = value
    assert sims.step().tolist() == [False, True, False]


def test_divergence_writes_no_file_and_nothing_on_the_terminal(tmp_path):
    script = f"""
import mujoco, numpy as np
from unilab_fabric.envs.batch import Simulations
sims = Simulations(mujoco.MjModel.from_xml_string('''{FLOATING}'''), 2, substeps=1, num_threads=1)
sims.qpos[:] = np.nan
assert sims.step().all()
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_field_of_each_simulation_counts_for_it_alone(model):
    sims = Simulations(model, 2, substeps=1, num_threads=1)
    sims.per_simulation("body_mass")[1, 1] *= 2
    sims.derive_constants(np.arange(2))
    sims.place(np.arange(2), np.concatenate([model.qpos0, np.zeros(model.nv)]))
    sims.ctrl[:] = 1
    sims.step()
    assert sims.qvel[0].tolist() != sims.qvel[1].tolist()
    assert sims.mutable["physics/body_mass"][:, 1].tolist() == [model.body_mass[1], 2 * model.body_mass[1]]


def test_no_more_threads_than_the_cores_this_process_may_use():
    script = f"""
import os
os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[0]])
import mujoco
from unilab_fabric.envs.batch import Simulations
model = mujoco.MjModel.from_xml_string('''{FLOATING}''')
print(*(Simulations(model, 4, substeps=1, num_threads=n).num_threads for n in (0, 3)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["1", "3"]
