import pytest

from unilab_fabric.arguments import FlagText
from unilab_fabric.config import build_learner_config, resolve_run
from unilab_fabric.errors import Problems, UserError, UserErrors
from unilab_fabric.sources import (
    Flag,
    find_config,
    flags_to_tree,
    overlay,
    parse_flags,
    preset_of,
    read_files,
    shipped_overlays,
    shipped_presets,
)


def test_flags_with_a_space_or_an_equals_sign():
    problems = Problems()
    flags = parse_flags(
        ["--seed", "3", "--task=a=b", "--print_config", "--x", "-1", "--task.help", "--learner.help", "FastSAC"],
        problems,
        switches=["print_config"],
        optional=["task.help", "learner.help"],
    )
    assert not problems.found
    assert flags == [
        Flag("seed", "3"),
        Flag("task", "a=b"),
        Flag("print_config", None),
        Flag("x", "-1"),
        Flag("task.help", None),
        Flag("learner.help", "FastSAC"),
    ]


def test_stray_words_and_flags_without_a_value_are_problems():
    problems = Problems()
    parse_flags(["stray", "--seed", "--devices"], problems)
    assert [str(problem) for problem in problems.found] == [
        "argument is stray; allowed: --name value",
        "seed is without a value; allowed: --seed VALUE",
        "devices is without a value; allowed: --devices VALUE",
    ]


def test_short_flags_stand_for_settings():
    tree = flags_to_tree(
        [Flag("devices", "2"), Flag("task", "A"), Flag("task.num_envs", "4"), Flag("learner.a.b", "c")]
    )
    assert tree == {
        "training": {"devices": "2"},
        "task": {"class_path": "A", "init_args": {"num_envs": "4"}},
        "learner": {"init_args": {"a": {"b": "c"}}},
    }
    assert isinstance(tree["training"]["devices"], FlagText)


def test_a_flag_reaches_into_a_mapping_given_before_it():
    tree = flags_to_tree([Flag("task.push", "{speed: 1, every: 2}"), Flag("task.push.speed", "3")])
    assert tree["task"]["init_args"]["push"] == {"speed": "3", "every": 2}


def test_the_later_source_wins_key_by_key():
    lower = {"seed": 1, "training": {"devices": 2, "log_every": 5}}
    upper = {"training": {"devices": None}, "checkpoint": {"every": 1}}
    assert overlay(lower, upper) == {
        "seed": 1,
        "training": {"devices": None, "log_every": 5},
        "checkpoint": {"every": 1},
    }
    assert lower["training"]["devices"] == 2  # sources stay as they are


def test_arguments_of_the_same_class_are_kept_and_those_of_another_are_not():
    lower = {"task": {"class_path": "CartpoleSwingup", "init_args": {"num_envs": 4, "episode_s": 2}}}
    same = {"class_path": "unilab_fabric.envs.tasks.cartpole.CartpoleSwingup", "init_args": {"episode_s": 3}}
    assert overlay(lower, {"task": same})["task"]["init_args"] == {"num_envs": 4, "episode_s": 3}
    assert overlay(lower, {"task": "CartpoleSwingup"})["task"]["init_args"] == {"num_envs": 4, "episode_s": 2}
    assert overlay(lower, {"task": {"init_args": {"num_envs": 8}}})["task"]["init_args"]["episode_s"] == 2
    assert overlay(lower, {"task": "Go2JoystickFlat"})["task"] == {"class_path": "Go2JoystickFlat"}


def test_a_file_is_tried_before_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("cartpole") == find_config("cartpole.yaml") == shipped_presets()["cartpole"]
    (tmp_path / "cartpole.yaml").write_text("seed: 5\n")
    assert find_config("cartpole.yaml").resolve() == tmp_path / "cartpole.yaml"
    with pytest.raises(UserError, match=r"config is cartpol\.yaml; .* did you mean cartpole\?"):
        find_config("cartpol.yaml")


def test_all_files_are_read_and_each_that_is_missing_is_a_problem(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\ntraining: {log_every: 3}\n")
    (tmp_path / "b.yaml").write_text("seed: 2\n")
    problems = Problems()
    tree = read_files([str(tmp_path / "a.yaml"), "missing_1", str(tmp_path / "b.yaml"), "missing_2"], problems)
    assert tree == {"seed": 2, "training": {"log_every": 3}}
    assert [problem.value for problem in problems.found] == ["missing_1", "missing_2"]


@pytest.mark.parametrize(
    ("task", "preset"),
    [
        ("CartpoleSwingup", "cartpole"),
        ({"class_path": "unilab_fabric.envs.tasks.go2_joystick.Go2JoystickFlat"}, "sac"),
        (FlagText("gymnasium:Pendulum-v1"), "gymnasium"),
        ("mine.Task", None),
    ],
)
def test_the_preset_of_a_task(task, preset):
    assert preset_of(task) == preset
    assert preset is None or preset in shipped_presets()


@pytest.mark.parametrize("name", sorted(shipped_presets()))
def test_every_shipped_preset_is_a_whole_run(name):
    tree = read_files([name], Problems())
    if "class_path" not in tree["task"]:
        tree = overlay(tree, {"task": "gymnasium:Pendulum-v1"})
    config = resolve_run(tree)
    assert config.task.init_args["num_envs"] > 0


@pytest.mark.parametrize("name", sorted(shipped_presets()))
def test_a_preset_holds_only_what_differs_from_the_defaults(name):
    tree = read_files([name], Problems())
    task = {"class_path": "gymnasium:Pendulum-v1", **tree["task"]}
    learner = tree["learner"].get("class_path", "FastSAC")
    bare = resolve_run({"task": {**task, "init_args": {"num_envs": 1}}, "learner": learner})
    for section in ("training", "checkpoint"):
        for key, value in tree.get(section, {}).items():
            assert value != vars(vars(bare)[section])[key], f"{section}.{key} is the default"
    for key, value in tree["learner"]["init_args"].items():
        assert value != bare.learner.init_args[key], f"learner.{key} is the default"
    for key, value in tree["task"]["init_args"].items():
        assert value != bare.task.init_args[key] or key == "num_envs", f"task.{key} is the default"


@pytest.mark.parametrize("overlaid", sorted(shipped_overlays()))
@pytest.mark.parametrize("name", sorted(shipped_presets()))
def test_every_shipped_overlay_fits_every_preset(name, overlaid):
    tree = read_files([name, overlaid], Problems())
    if "class_path" not in tree["task"]:
        tree = overlay(tree, {"task": "gymnasium:Pendulum-v1"})
    config = resolve_run(tree)
    assert build_learner_config(config.learner).problems(config.task.init_args["num_envs"]) == []
    assert config.task.init_args["num_envs"] == 128


def test_an_overlay_changes_the_class_at_hand_and_flags_come_after_it():
    lower = {"learner": {"class_path": "PPO", "init_args": {"lam": 0.9, "clip_param": 0.1}}}
    upper = {"learner": {"by_class": {"PPO": {"lam": 0.8}, "FastSAC": {"batch_size": 64}}}}
    merged = overlay(overlay(lower, upper), {"learner": {"init_args": {"clip_param": 0.3}}})
    assert merged["learner"] == {"class_path": "PPO", "init_args": {"lam": 0.8, "clip_param": 0.3}}


@pytest.mark.parametrize(
    ("lower", "by_class", "told"),
    [
        ({"learner": "PPO"}, {"PP0": {}}, "learner is PP0; did you mean PPO?"),
        ({"learner": "PPO"}, 3, "learner.by_class is 3; allowed: a mapping from names of classes to their arguments"),
        ({}, 3, "learner.by_class is 3; allowed: a mapping from names of classes to their arguments"),
    ],
)
def test_an_overlay_that_cannot_be_laid_is_told(lower, by_class, told):
    with pytest.raises(UserError) as refused:
        overlay(lower, {"learner": {"by_class": by_class}})
    assert str(refused.value) == told


def test_an_overlay_waits_for_its_class_to_be_named():
    laid = overlay({}, {"task": {"init_args": {"num_envs": 4}, "by_class": {"G1WalkFlat": {"action_scale": 0.25}}}})
    named = overlay(laid, {"task": {"class_path": "G1WalkFlat", "init_args": {"num_envs": 8}}})
    assert named["task"] == {"class_path": "G1WalkFlat", "init_args": {"num_envs": 8, "action_scale": 0.25}}
    other = overlay(laid, {"task": "CartpoleSwingup"})
    assert other["task"] == {"class_path": "CartpoleSwingup", "init_args": {"num_envs": 4}}
    with pytest.raises(UserErrors, match="task is missing"):
        resolve_run(laid)


def test_an_overlay_alone_is_told():
    laid = overlay({}, {"task": "CartpoleSwingup", "learner": {"by_class": {"PPO": {"lam": 0.8}}}})
    with pytest.raises(UserErrors, match=r"learner\.by_class is PPO; allowed where learner names a class"):
        resolve_run(laid)
