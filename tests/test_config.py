import subprocess
import sys

import pytest
import yaml

from unilab_fabric.arguments import FlagText
from unilab_fabric.config import (
    LOGGERS,
    CheckpointConfig,
    TrainingConfig,
    build_learner_config,
    dump_run_config,
    load_run_config,
    read_config_file,
    resolve_run,
    save_run_config,
    section_class,
    to_plain,
)
from unilab_fabric.errors import UserError, UserErrors
from unilab_fabric.learners.fast_sac.config import FastSAC

CARTPOLE = {"class_path": "CartpoleSwingup", "init_args": {"num_envs": 4}}


def problems_of(**tree):
    with pytest.raises(UserErrors) as caught:
        resolve_run(tree)
    return [str(problem) for problem in caught.value.problems]


def test_a_run_needs_no_more_than_a_task():
    config = resolve_run({"task": CARTPOLE})
    assert config.seed == 1
    assert config.training == TrainingConfig()
    assert config.checkpoint == CheckpointConfig()
    assert config.learner.class_path == "FastSAC"
    assert config.logger.class_path == "lightning.fabric.loggers.TensorBoardLogger"
    assert config.task.init_args == {"num_envs": 4, "episode_s": 10.0, "stagger": False}


@pytest.mark.parametrize(
    "task", [CARTPOLE, {"class_path": "gymnasium:Pendulum-v1", "init_args": {"num_envs": 2, "env_kwargs": {"g": 9.0}}}]
)
def test_a_saved_run_reloads_to_an_equal_object(tmp_path, task):
    config = resolve_run(
        {
            "seed": 7,
            "task": task,
            "learner": {"class_path": "FastSAC", "init_args": {"betas": [0.9, 0.99], "tau": 1e-3}},
            "training": {"devices": [1, 0], "collector_cpus": [[0], [1]], "stall_timeout_s": 1e30},
            "checkpoint": {"every": 3},
        }
    )
    save_run_config(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml") == config
    assert resolve_run(to_plain(config)) == config
    assert dump_run_config(resolve_run(to_plain(config))) == dump_run_config(config)


def test_the_long_name_of_a_class_of_ours_is_the_short_one():
    tree = {
        "task": {**CARTPOLE, "class_path": "unilab_fabric.envs.tasks.cartpole.CartpoleSwingup"},
        "learner": "unilab_fabric.learners.fast_sac.config.FastSAC",
    }
    assert resolve_run(tree) == resolve_run({"task": CARTPOLE})


def test_the_learners_own_configuration_is_typed():
    config = resolve_run({"task": CARTPOLE, "learner": {"class_path": "FastSAC", "init_args": {"actor_hidden": [8]}}})
    assert build_learner_config(config.learner) == FastSAC(actor_hidden=(8,))


def test_a_task_a_learner_and_a_logger_of_the_users_go_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from unilab_fabric.envs.tasks.cartpole import CartpoleSwingup\n"
        "from unilab_fabric.learners.fast_sac.config import FastSAC\n"
        "class Mine(CartpoleSwingup):\n"
        "    def __init__(self, num_envs: int, *, rail: float = 2.0, num_threads: int = 0, seed: int = 0):\n"
        "        super().__init__(num_envs, num_threads=num_threads, seed=seed)\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Slow(FastSAC):\n"
        "    patience: int = 3\n"
        "class Quiet:\n"
        "    def __init__(self, level: int = 1): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = resolve_run(
        {
            "task": {"class_path": "mine.Mine", "init_args": {"num_envs": 3}},
            "learner": {"class_path": "mine.Slow", "init_args": {"patience": 5}},
            "logger": {"class_path": "mine.Quiet", "init_args": {"level": 2}},
        }
    )
    assert config.task.init_args == {"num_envs": 3, "rail": 2.0}
    assert build_learner_config(config.learner).patience == 5
    assert config.logger.init_args == {"level": 2}
    assert problems_of(task={"class_path": "mine.Mine", "init_args": {"num_envs": 3, "rial": 1}}) == [
        "task.rial is 1; there is no such setting; did you mean task.rail?"
    ]
    assert problems_of(task=CARTPOLE, learner="mine.Quiet") == [
        "learner is mine.Quiet; allowed: FastSAC, FlashSAC, PPO, or a subclass of LearnerConfig"
    ]
    assert problems_of(task=CARTPOLE, learner="mine.Slo") == [
        "learner is mine.Slo; mine has no such class; did you mean Slow?"
    ]


def test_an_error_inside_a_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "broken_learner.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        resolve_run({"task": CARTPOLE, "learner": "broken_learner.Slow"})


def test_every_problem_of_every_section_is_told_at_once():
    assert problems_of(
        task={"class_path": "CartpoleSwingup", "init_args": {"num_envs": 4, "episode": 3}},
        learner={"class_path": "FastSAC", "init_args": {"tua": 0.1, "n_step": "two"}},
        logger="TensorBordLogger",
        training={"max_envs_steps": 1, "num_nodes": 0, "accelerator": "gpu"},
        checkpoint={"keep_last": 0},
        num_envs=8,
        sed=3,
    ) == [
        "num_envs is 8; there is no such setting; did you mean task.num_envs?",
        "sed is 3; there is no such setting; did you mean seed?",
        "training.max_envs_steps is 1; there is no such setting; did you mean training.max_env_steps?",
        "training.accelerator is gpu; allowed: auto, cpu or cuda",
        "training.num_nodes is 0; allowed: 1 or more",
        "checkpoint.keep_last is 0; allowed: 1 or more",
        "task.episode is 3; there is no such setting; did you mean task.episode_s?",
        "learner.tua is 0.1; there is no such setting; did you mean learner.tau?",
        "learner.n_step is two; allowed: a whole number",
        "logger is TensorBordLogger; did you mean TensorBoardLogger?",
    ]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "task is missing; allowed: CartpoleSwingup, G1MotionTracking, G1WalkFlat, Go2JoystickFlat"),
        ({"task": "CartpoleSwingu"}, "task is CartpoleSwingu; did you mean CartpoleSwingup?"),
        ({"task": CARTPOLE, "learner": "SAC"}, "learner is SAC; did you mean FastSAC?"),
        ({"task": CARTPOLE, "learner": "no.such.Thing"}, "learner is no.such.Thing; there is no module no"),
        ({"task": CARTPOLE, "seed": -1}, "seed is -1; allowed: 0 to 4294901759"),
        ({"task": CARTPOLE, "seed": True}, "seed is true; allowed: a whole number"),
        ({"task": CARTPOLE, "training": 3}, "training is 3; allowed: a mapping of settings"),
        (
            {"task": CARTPOLE | {"num_envs": 3}},
            "task.num_envs is 3; the arguments of a class stand under task.init_args",
        ),
        ({"task": {"class_path": "CartpoleSwingup", "init_args": 3}}, "task.init_args is 3; allowed: a mapping"),
        (
            {"task": CARTPOLE, "training": {"devices": [0, "a"]}},
            "training.devices is [0, a]; allowed: a whole number, a list, each entry a whole number, auto or null",
        ),
        (
            {"task": CARTPOLE, "training": {"run_name": "a/b"}},
            "training.run_name is a/b; allowed: the name of a folder, without a path",
        ),
    ],
)
def test_one_problem_is_one_line(tree, said):
    assert said in problems_of(**tree)


def test_a_misspelt_argument_of_a_logger_is_found():
    said = problems_of(task=CARTPOLE, logger={"class_path": "CSVLogger", "init_args": {"flush": 3}})
    assert said[0].startswith("logger.flush is 3; there is no such setting; ")


def test_every_logger_with_a_short_name_is_there():
    pytest.importorskip("torch")
    for name in LOGGERS:
        assert section_class("logger", name).__name__ == name


def test_arguments_that_a_logger_hands_on_are_accepted():
    wandb = {
        "class_path": "WandbLogger",
        "init_args": {"project": "p", "entity": FlagText("e"), "offline": FlagText("1")},
    }
    config = resolve_run({"task": CARTPOLE, "logger": wandb | {"init_args": {"entity": FlagText("e"), "project": "p"}}})
    assert config.logger.init_args == {"entity": "e", "project": "p"}
    assert yaml.safe_load(dump_run_config(config))["logger"]["init_args"] == config.logger.init_args
    assert problems_of(task=CARTPOLE, logger=wandb) == ["logger.offline is 1; allowed: true or false"]
    tensorboard = {"class_path": "TensorBoardLogger", "init_args": {"flush_secs": FlagText("10")}}  # to SummaryWriter
    assert resolve_run({"task": CARTPOLE, "logger": tensorboard}).logger.init_args == {"flush_secs": 10}
    tensorboard["init_args"] = {"flush_sec": 10}
    assert problems_of(task=CARTPOLE, logger=tensorboard) == [
        "logger.flush_sec is 10; there is no such setting; did you mean logger.flush_secs?"
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training:\n  log_every: [1\n", "line 3 is not YAML: "),
        ("- a\n- b\n", "allowed: a YAML file of the form `key: value`"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_config_file(path)
    assert f"config is {path}; {said}" in str(caught.value)


def test_reading_a_configuration_loads_neither_torch_nor_lightning():
    program = (
        "import sys\n"
        "import unilab_fabric.cli\n"
        "from unilab_fabric.config import resolve_run, build_learner_config\n"
        "task = {'class_path': 'Go2JoystickFlat', 'init_args': {'num_envs': 4}}\n"
        "build_learner_config(resolve_run({'task': task}).learner)\n"
        "assert not {'torch', 'lightning'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
