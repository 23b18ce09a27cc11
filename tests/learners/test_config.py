import subprocess
import sys

import pytest

from tests.learners.problems import build, config, spec
from unilab_fabric.errors import UserErrors
from unilab_fabric.learners.fast_sac.config import FastSAC


def test_the_defaults_serve_4096_environments():
    FastSAC().check(num_envs=4096)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("actor_hidden", (), "one or more positive widths"),
        ("critic_hidden", (64, 0), "one or more positive widths"),
        ("num_critics", 0, "1 or more"),
        ("actor_every", 0, "1 or more"),
        ("critic_learning_rate", 0.0, "more than 0"),
        ("temperature", -1.0, "more than 0"),
        ("weight_decay", -0.1, "0 or more"),
        ("max_grad_norm", float("nan"), "0 or more"),
        ("random_ticks", -1, "0 or more"),
        ("atoms", 1, "2 or more"),
        ("v_min", 20.0, "less than learner.v_max = 20.0"),
        ("tau", 0.0, "more than 0, at most 1"),
        ("final_lr_fraction", 1.5, "0 to 1"),
        ("betas", (0.9, 1.0), "0 or more, less than 1"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_what_can(field, value, allowed):
    with pytest.raises(UserErrors) as caught:
        FastSAC(**{field: value}).check(num_envs=4096)
    assert str(caught.value) == f"learner.{field} is {value}; allowed: {allowed}"


def test_all_problems_come_at_once():
    with pytest.raises(UserErrors) as caught:
        FastSAC(tau=2.0, atoms=0, batch_size=100_000).check(num_envs=1024)
    assert [problem.field for problem in caught.value.problems] == [
        "learner.batch_size",
        "learner.atoms",
        "learner.tau",
    ]


def test_symmetry_needs_a_task_that_knows_its_mirror_images():
    with pytest.raises(UserErrors, match="symmetry is True; task small has no mirror images"):
        build(config(symmetry=True), spec())


def test_the_settings_load_without_torch():
    code = "import sys, unilab_fabric.learners.fast_sac.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
