"""The compiled model against tables of the robot (the CSV files beside this one), and the pose it starts in.

Lengths in m, masses in kg, angles in rad; quaternions as w, x, y, z; a vector is one cell.
"""

import csv
from pathlib import Path

import mujoco
import numpy as np
import pytest

from tests.envs.robots.test_go2 import close, numbers, same_turn
from unilab_fabric.envs.robots import g1
from unilab_fabric.errors import UserError

HERE = Path(__file__).parent
GEOM_TYPES = {
    "plane": mujoco.mjtGeom.mjGEOM_PLANE,
    "sphere": mujoco.mjtGeom.mjGEOM_SPHERE,
    "capsule": mujoco.mjtGeom.mjGEOM_CAPSULE,
}


def table(name):
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def model():
    return g1.load("faithful")


def test_counts_and_total_mass(model):
    assert (model.nq, model.nv, model.nu, model.nbody - 1, model.njnt, model.ngeom) == (36, 35, 29, 30, 30, 42)
    assert model.nexclude == 4
    assert model.nmesh == 0
    assert model.body_mass.sum() == pytest.approx(33.341142, abs=1e-9)


@pytest.mark.parametrize("row", table("g1_bodies.csv"), ids=lambda row: row["body"])
def test_body(model, row):
    body = model.body(row["body"])
    assert model.body(int(body.parentid[0])).name == row["parent"]
    close(body.pos, row["pos"])
    same_turn(body.quat, row["quat"])
    close(body.mass, row["mass"])
    close(body.ipos, row["com"])
    same_turn(body.iquat, row["inertia_axes"])
    close(body.inertia, row["inertia"])


@pytest.mark.parametrize("row", table("g1_joints.csv"), ids=lambda row: row["joint"])
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
    servo = model.actuator(row["joint"])
    kp, kd = float(row["kp"]), float(row["kd"])
    assert servo.trnid[0] == joint.id
    assert servo.gainprm[:3].tolist() == [kp, 0, 0]
    assert servo.biasprm[:3].tolist() == [0, -kp, -kd]
    assert servo.forcerange.tolist() == numbers(row["force_range"])
    assert not servo.ctrllimited[0]


@pytest.mark.parametrize("row", table("g1_geoms.csv"), ids=lambda row: row["geom"])
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
    close(geom.margin, "0")
    close(geom.solref, "0.02 1")
    close(geom.solimp, "0.9 0.95 0.001 0.5 2")


def test_joints_and_actuators_stand_in_the_same_order(model):
    assert tuple(model.joint(i).name for i in range(1, 30)) == g1.JOINTS
    assert tuple(model.actuator(i).name for i in range(29)) == g1.JOINTS
    assert [model.joint(name).qposadr[0] for name in g1.JOINTS] == list(range(7, 36))
    assert g1.PARTS[g1.FIRST_WAIST : g1.FIRST_WAIST + 3] == ("waist_yaw", "waist_roll", "waist_pitch")
    for part, axis in zip(g1.PARTS[g1.FIRST_WAIST :][:3], ([0, 0, 1], [1, 0, 0], [0, 1, 0]), strict=True):
        assert model.joint(f"{part}_joint").axis.tolist() == axis


def test_the_stand_pose_of_the_file_is_the_one_of_the_module(model):
    assert model.key_qpos[0, 7:].tolist() == list(g1.STAND_JOINTS)
    assert model.key_ctrl[0].tolist() == list(g1.STAND_JOINTS)


@pytest.mark.parametrize("physics", ["fast", "faithful"])
def test_the_soles_just_touch_the_floor_at_the_stand_height_and_nothing_else_meets(physics):
    model = g1.load(physics)
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    for height, touches in ((g1.STAND_HEIGHT - 1e-4, True), (g1.STAND_HEIGHT + 1e-4, False)):
        data.qpos[2] = height
        mujoco.mj_forward(model, data)
        assert (data.ncon > 0) is touches
        assert all("foot" in model.geom(int(contact.geom2)).name for contact in data.contact)


def test_sites_and_corners_are_as_the_task_takes_them(model):
    for name, body, point in [
        ("imu_in_pelvis", "pelvis", g1.IMU_PELVIS),
        ("left_foot", "left_ankle_roll_link", g1.FOOT_SITE),
        ("right_foot", "right_ankle_roll_link", g1.FOOT_SITE),
    ]:
        site = model.site(name)
        np.testing.assert_allclose(site.pos, point, atol=1e-12)
        assert site.quat.tolist() == [1, 0, 0, 0]
        assert model.body(int(site.bodyid[0])).name == body
    for index, name in enumerate(g1.CORNERS):
        np.testing.assert_allclose(model.geom(name).pos, g1.CORNER_POINTS[index % 4], atol=1e-12)
        assert model.geom(name).size[0] == g1.CORNER_RADIUS


OPTIONS = {"faithful": (1e-8, 100, 50, True), "fast": (1e-5, 10, 10, False)}


@pytest.mark.parametrize("physics", OPTIONS)
def test_solver_options(physics):
    tolerance, iterations, line_search, warm_start = OPTIONS[physics]
    model = g1.load(physics)
    assert model.opt.integrator == mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    assert model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    assert (model.opt.tolerance, model.opt.iterations, model.opt.ls_iterations) == (tolerance, iterations, line_search)
    assert bool(model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_WARMSTART) is not warm_start
    assert model.opt.timestep * g1.PHYSICS[physics].substeps == pytest.approx(g1.CONTROL_STEP_S)


def test_fast_physics_stands_on_the_corners_with_the_friction_that_the_soles_had():
    model = g1.load("fast")
    for name in (model.geom(i).name for i in range(model.ngeom)):
        geom = model.geom(name)
        if name in g1.CORNERS:
            assert geom.friction[0] == 1.0
        assert bool(geom.contype[0]) is not (name.endswith("collision") and "_foot" in name)


def test_it_falls_by_itself_as_the_robot_does(model):
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    while data.time < 5:
        mujoco.mj_step(model, data)
    assert data.qpos[2] < 0.3


def test_a_users_model_needs_the_same_names(tmp_path):
    own = tmp_path / "own.xml"
    own.write_text(g1.MJCF.read_text().replace('mass="7.818"', 'mass="9"'))
    assert g1.load("fast", str(own)).body("torso_link").mass[0] == 9
    own.write_text(g1.MJCF.read_text().replace("left_foot_contact_2_geom", "corner"))
    with pytest.raises(UserError, match=r"own.xml; allowed: the foot geoms left_foot_contact_0_geom"):
        g1.load("fast", str(own))
    with pytest.raises(UserError, match=r"task.physics is slow; allowed: fast, faithful"):
        g1.load("slow")
