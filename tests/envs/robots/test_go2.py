"""The compiled model against tables of the robot (the CSV files beside this one), and the pose it starts in.

Lengths in m, masses in kg, angles in rad; quaternions as w, x, y, z; a vector is one cell.
"""

import csv
from pathlib import Path

import mujoco
import numpy as np
import pytest

from unilab_fabric.envs.robots import go2
from unilab_fabric.errors import UserError

HERE = Path(__file__).parent
GEOM_TYPES = {
    "plane": mujoco.mjtGeom.mjGEOM_PLANE,
    "box": mujoco.mjtGeom.mjGEOM_BOX,
    "cylinder": mujoco.mjtGeom.mjGEOM_CYLINDER,
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
}


def table(name):
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


def numbers(cell):
    return [float(number) for number in cell.split()]


def close(actual, cell):
    np.testing.assert_allclose(actual, numbers(cell), atol=1e-8)


def same_turn(actual, cell):
    assert abs(np.dot(actual, numbers(cell))) == pytest.approx(1, abs=1e-8)


@pytest.fixture(scope="module")
def model():
    return go2.load("faithful")


@pytest.fixture(scope="module")
def standing(model):
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_forward(model, data)
    return data


def test_counts_and_total_mass(model):
    assert (model.nq, model.nv, model.nu, model.nbody - 1, model.njnt, model.ngeom) == (19, 18, 12, 13, 13, 24)
    assert model.body_mass.sum() == pytest.approx(15.206408, abs=1e-9)
    assert model.nmesh == 0


@pytest.mark.parametrize("row", table("go2_bodies.csv"), ids=lambda row: row["body"])
def test_body(model, row):
    body = model.body(row["body"])
    assert model.body(int(body.parentid[0])).name == row["parent"]
    close(body.pos, row["pos"])
    same_turn(body.quat, "1 0 0 0")
    close(body.mass, row["mass"])
    close(body.ipos, row["com"])
    same_turn(body.iquat, row["inertia_axes"])
    close(body.inertia, row["inertia"])


@pytest.mark.parametrize("row", table("go2_joints.csv"), ids=lambda row: row["joint"])
def test_joint_and_its_servo(model, row):
    joint = model.joint(row["joint"])
    assert model.body(int(joint.bodyid[0])).name == row["body"]
    close(joint.axis, row["axis"])
    close(joint.pos, "0 0 0")
    close(joint.range, row["range"])
    assert joint.limited[0]
    close(joint.armature, row["armature"])
    close(joint.damping, row["damping"])
    close(joint.frictionloss, row["friction_loss"])
    assert joint.stiffness[0] == 0
    servo = model.actuator(row["joint"].removesuffix("_joint"))
    kp, kd, torque = float(row["kp"]), float(row["kd"]), float(row["torque"])
    assert servo.trnid[0] == joint.id
    assert servo.gainprm[:3].tolist() == [kp, 0, 0]
    assert servo.biasprm[:3].tolist() == [0, -kp, -kd]
    assert servo.forcerange.tolist() == [-torque, torque]
    assert not servo.ctrllimited[0]
    assert servo.gear.tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("row", table("go2_geoms.csv"), ids=lambda row: row["geom"])
def test_geom(model, row):
    geom = model.geom(row["geom"])
    assert model.body(int(geom.bodyid[0])).name == row["body"]
    assert geom.type[0] == GEOM_TYPES[row["type"]]
    size = numbers(row["size"])
    np.testing.assert_allclose(geom.size[: len(size)], size, atol=1e-8)
    close(geom.pos, row["pos"])
    same_turn(geom.quat, row["quat"])
    close(geom.friction, row["friction"])
    for column in ("condim", "contype", "conaffinity", "priority"):
        assert getattr(geom, column)[0] == int(row[column])
    close(geom.margin, row["margin"])
    close(geom.solref, "0.02 1")
    close(geom.solimp, "0.9 0.95 0.001 0.5 2")


def test_the_base_floats_freely(model):
    joint = model.joint(0)
    assert joint.type[0] == mujoco.mjtJoint.mjJNT_FREE
    for values in (model.dof_armature[:6], model.dof_damping[:6], model.dof_frictionloss[:6]):
        assert not values.any()


def test_joints_and_actuators_stand_in_the_same_order(model):
    assert tuple(model.joint(i).name for i in range(1, 13)) == go2.JOINTS
    assert tuple(model.actuator(i).name for i in range(12)) == go2.ACTUATORS
    assert model.actuator_trnid[:, 0].tolist() == list(range(1, 13))
    assert [model.joint(name).qposadr[0] for name in go2.JOINTS] == list(range(7, 19))
    assert [model.joint(name).dofadr[0] for name in go2.JOINTS] == list(range(6, 18))


def test_all_four_feet_touch_the_floor_in_the_stand_pose(model, standing):
    heights = [standing.geom(leg).xpos[2] for leg in go2.LEGS]
    np.testing.assert_allclose(heights, go2.FOOT_RADIUS, atol=1e-9)
    touching = {model.geom(int(contact.geom2)).name for contact in standing.contact}
    assert touching == set(go2.LEGS)


def test_the_stand_pose_of_the_file_is_the_one_that_is_computed(model, standing):
    assert standing.qpos[2] == pytest.approx(go2.STAND_HEIGHT, abs=1e-9)
    pitch = [np.cos(go2.STAND_PITCH / 2), 0, np.sin(go2.STAND_PITCH / 2), 0]
    np.testing.assert_allclose(standing.qpos[3:7], pitch, atol=1e-9)
    assert standing.qpos[7:].tolist() == list(go2.STAND_JOINTS)
    assert standing.ctrl.tolist() == list(go2.STAND_JOINTS)


def test_the_inertial_unit_sits_where_velocities_are_taken(model):
    site = model.site("imu")
    np.testing.assert_allclose(site.pos, go2.IMU_B, atol=1e-12)
    assert site.quat.tolist() == [1, 0, 0, 0]
    assert model.body(int(site.bodyid[0])).name == "base"


def test_feet_and_margins_are_as_the_task_takes_them(model):
    for leg in go2.LEGS:
        assert model.geom(leg).size[0] == go2.FOOT_RADIUS
        assert model.geom(leg).margin[0] == go2.CONTACT_MARGIN


OPTIONS = {
    # cone, impratio, step, substeps, tolerance, iterations, line search, warm start, dimensions of a foot's contact
    "faithful": (mujoco.mjtCone.mjCONE_ELLIPTIC, 100, 0.005, 4, 1e-8, 100, 50, True, 6),
    "fast": (mujoco.mjtCone.mjCONE_PYRAMIDAL, 1, 0.01, 2, 1e-5, 10, 10, False, 3),
}


@pytest.mark.parametrize("physics", OPTIONS)
def test_solver_options(physics):
    cone, impratio, step, substeps, tolerance, iterations, line_search, warm_start, dimensions = OPTIONS[physics]
    model = go2.load(physics)
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_EULER
    assert model.opt.solver == mujoco.mjtSolver.mjSOL_NEWTON
    assert model.opt.gravity.tolist() == [0, 0, -9.81]
    assert (model.opt.cone, model.opt.impratio, model.opt.timestep) == (cone, impratio, step)
    assert (model.opt.tolerance, model.opt.iterations, model.opt.ls_iterations) == (tolerance, iterations, line_search)
    assert bool(model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_WARMSTART) is not warm_start
    assert {model.geom(leg).condim[0] for leg in go2.LEGS} == {dimensions}
    assert go2.PHYSICS[physics].substeps == substeps
    assert step * substeps == pytest.approx(0.02)


@pytest.mark.parametrize("physics", OPTIONS)
def test_it_stands_for_five_seconds_and_the_floor_carries_its_weight(physics):
    model = go2.load(physics)
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    lowest = np.inf
    forces = []
    while data.time < 5:
        mujoco.mj_step(model, data)
        lowest = min(lowest, data.qpos[2])
        if data.time > 4:
            each = np.zeros((data.ncon, 6))
            for i in range(data.ncon):
                mujoco.mj_contactForce(model, data, i, each[i])
            forces.append(each[:, 0].sum())
    assert lowest > 0.28
    assert data.body("base").xmat[8] > np.cos(0.05)
    assert np.mean(forces) == pytest.approx(model.body_mass.sum() * 9.81, rel=0.02)


def test_a_users_model_needs_the_same_names(tmp_path):
    text = go2.MJCF.read_text()
    own = tmp_path / "own.xml"
    own.write_text(text.replace('mass="6.921"', 'mass="8"'))
    assert go2.load("fast", str(own)).body("base").mass[0] == 8
    own.write_text(text.replace('name="FL_hip_joint"', 'name="left"').replace('joint="FL_hip_joint"', 'joint="left"'))
    with pytest.raises(UserError, match=r"task.mjcf is .*own.xml; allowed: .*joints FL_hip_joint.*it has left, FL_th"):
        go2.load("fast", str(own))
    lines = text.splitlines(keepends=True)
    servos = [i for i, line in enumerate(lines) if "<position name=" in line]
    lines[servos[0]], lines[servos[1]] = lines[servos[1]], lines[servos[0]]
    own.write_text("".join(lines))
    with pytest.raises(UserError, match=r"allowed: the actuators FL_hip, FL_thigh.*it has FL_thigh, FL_hip"):
        go2.load("fast", str(own))
    own.write_text("<mujoco><worldbody><body/></worldbody></mujoco")
    with pytest.raises(UserError, match=r"own.xml; allowed: an MJCF file that compiles; [^\n]*$"):
        go2.load("fast", str(own))
