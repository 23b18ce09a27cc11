import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.manifests import cartpole_run, write_checkpoint
from unilab_fabric import __version__, cli
from unilab_fabric.config import resolve_run, to_plain
from unilab_fabric.sources import shipped_presets

CARTPOLE = ["--task", "CartpoleSwingup", "--training.accelerator=cpu"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(capsys, tmp_path):
    """Runs a command: exit status, standard output, lines on standard error. Whatever it says, it leaves no file."""

    def run(*tokens):
        before = sorted(tmp_path.rglob("*"))
        status = cli.main(tokens)
        assert sorted(tmp_path.rglob("*")) == before
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


@pytest.fixture
def job(monkeypatch):
    """Stands in for the launcher: keeps the run it was given."""
    started = []

    def run_job(config, plan):
        started.append((config, plan))
        return 0

    monkeypatch.setattr("unilab_fabric.launch.job.run_job", run_job)
    return started


def printed(command, *tokens):
    """The resolved configuration that `fit --print_config` prints."""
    status, out, err = command("fit", *tokens, "--print_config")
    assert (status, err) == (0, [])
    return yaml.safe_load(out)


# settings


def test_the_printed_configuration_reloads_to_an_equal_run(command, tmp_path):
    tokens = ["--config", "cartpole", "--seed", "5", "--learner.tau", "1e-2", "--devices", "[0]"]
    plain = printed(command, *tokens)
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(plain))
    assert printed(command, "--config", "again.yaml") == plain
    assert to_plain(resolve_run(plain)) == plain


def test_flags_go_over_files_and_later_files_over_earlier_ones(command, tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 2\ntraining: {log_every: 7, run_name: a}\n")
    (tmp_path / "b.yaml").write_text("training: {log_every: 8}\n")
    plain = printed(command, "--seed=3", "--config", "cartpole", "--config=a.yaml", "--config", "b.yaml")
    assert plain["seed"] == 3
    assert plain["training"]["log_every"] == 8
    assert plain["training"]["run_name"] == "a"
    assert plain["task"]["init_args"]["num_envs"] == 64


def test_short_forms(command):
    plain = printed(
        command, "--task", "Go2JoystickFlat", "--task.num_envs", "64", "--learner=FastSAC", "--learner.batch_size=256"
    )
    assert plain["task"]["class_path"] == "Go2JoystickFlat"
    assert plain["task"]["init_args"]["num_envs"] == 64
    assert plain["learner"]["init_args"]["batch_size"] == 256
    assert printed(command, *CARTPOLE, "--devices", "2")["training"]["devices"] == 2


@pytest.mark.parametrize(
    ("text", "value"), [("2", 2), ("[0, 1]", [0, 1]), ("[]", []), ("null", None), ("auto", "auto")]
)
def test_devices_on_the_command_line(command, text, value):
    assert printed(command, *CARTPOLE, "--devices", text)["training"]["devices"] == value


def test_a_task_without_a_file_starts_from_its_preset(command):
    assert printed(command, *CARTPOLE)["learner"] == printed(command, "--config=cartpole")["learner"]
    gymnasium = printed(command, "--task", "gymnasium:Pendulum-v1", "--task.num_envs", "4")
    assert gymnasium["task"] == {
        "class_path": "gymnasium:Pendulum-v1",
        "init_args": {"num_envs": 4, "env_kwargs": None},
    }
    (note,) = [line for line in command("doctor", *CARTPOLE)[1].splitlines() if "note" in line]
    assert "settings start from cartpole.yaml" in note


def test_the_environment_configures_nothing(command, monkeypatch):
    before = printed(command, *CARTPOLE)
    for name in ("SEED", "FIT__SEED", "UNILAB_FABRIC_SEED", "UNILAB_FABRIC__SEED", "JSONARGPARSE_DEFAULT_ENV"):
        monkeypatch.setenv(name, "9")
    assert printed(command, *CARTPOLE) == before


# commands


def test_fit_hands_the_resolved_run_and_its_plan_to_the_launcher(command, job):
    status, _, err = command("fit", *CARTPOLE, "--training.run_name=a")
    assert (status, err) == (0, [])
    ((config, plan),) = job
    assert config.task.class_path == "CartpoleSwingup"
    assert plan.run_folder == Path("runs/a")


def test_doctor_says_what_a_run_would_use(command, job):
    status, out, err = command("doctor", "--config", "cartpole", "--training.run_name", "a")
    assert (status, err) == (0, [])
    for word in ("FastSAC on CartpoleSwingup", "per rank", "job", "physics", "OMP_NUM_THREADS", "runs/a", "mujoco 3"):
        assert word in out
    assert not job


def test_doctor_without_arguments_looks_at_the_main_preset(command):
    status, out, _ = command("doctor", "--training.accelerator=cpu")
    assert status == 0
    assert "Go2JoystickFlat" in out
    assert "sac.yaml" in out


def test_tasks_are_one_line_each(command):
    status, out, err = command("tasks")
    assert (status, err) == (0, [])
    names = [line.split()[0] for line in out.splitlines()]
    assert {"CartpoleSwingup", "Go2JoystickFlat", "gymnasium:ID"} <= set(names)
    assert all(len(line.split()) > 3 for line in out.splitlines())


@pytest.mark.parametrize(
    "tokens", [["--help"], ["fit", "--help"], ["fit", "-h"], ["evaluate", "--help"], ["doctor", "--help"]]
)
def test_help(command, tokens):
    status, out, err = command(*tokens)
    assert (status, err) == (0, [])
    assert out.startswith("usage: python -m unilab_fabric ")


def test_help_of_fit_gives_units_and_scope(command):
    text = " ".join(command("fit", "--help")[1].split())
    assert "Environment steps of the job, all ranks together" in text
    assert "Seconds [s] a rank waits" in text
    presets = ", ".join(f"{name}.yaml" for name in sorted(shipped_presets()))
    assert f"{presets}; to be laid over one of these: small.yaml" in text
    assert "Path to a configuration file" not in text  # jsonargparse's own way, which is not ours


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--task.help", "CartpoleSwingup"], "--task.num_envs NUM_ENVS Environments per rank."),
        (["--task", "CartpoleSwingup", "--task.help"], "--task.episode_s EPISODE_S Time limit of an episode [s]."),
        (["--learner.help=FastSAC"], "Transitions of one critic update, per rank."),
    ],
)
def test_help_on_a_class(command, tokens, words):
    status, out, _ = command("fit", *tokens)
    assert status == 0
    assert words in " ".join(out.split())


def test_help_on_a_task_leaves_out_what_ranks_fill_in(command):
    assert "--task.seed" not in command("fit", "--task.help", "CartpoleSwingup")[1]


def test_version(command):
    assert command("--version")[:2] == (0, __version__ + "\n")


# continuing


@pytest.fixture
def checkpoint(tmp_path):
    """A run `runs/a` of 64 cart-poles with a checkpoint, of which only the manifest is real."""
    return write_checkpoint(tmp_path / "runs" / "a", cartpole_run(seed=9))


@pytest.mark.parametrize("name", ["last", "runs/a", "runs/a/checkpoints/tick-000000030"])
def test_a_run_continues_with_its_own_settings_in_its_own_folder(command, job, checkpoint, name):
    status, _, err = command("fit", "--ckpt_path", name, "--learner.batch_size=256", "--training.max_env_steps=5000")
    assert (status, err) == (0, [])
    ((config, plan),) = job
    assert config.seed == 9
    assert config.task.init_args["num_envs"] == 64
    assert plan.run_folder.resolve() == checkpoint.parents[1]
    assert Path(config.ckpt_path).resolve() == checkpoint
    assert [note.partition(": ")[2] for note in plan.notes] == [
        "training.max_env_steps 2000000 -> 5000",
        "learner.batch_size 8192 -> 256",
    ]


def test_last_can_be_asked_of_a_run_by_name(command, job, checkpoint):
    shutil.copytree(checkpoint.parents[1], checkpoint.parents[2] / "b")
    command("fit", "--ckpt_path=last", "--training.run_name=a", "--learner.batch_size=256")
    assert job[0][1].run_folder.name == "a"


def test_a_checkpoint_may_start_a_run_of_another_name(command, job, checkpoint):
    assert command("fit", "--ckpt_path=runs/a", "--training.run_name=b", "--learner.batch_size=256")[0] == 0
    assert job[0][1].run_folder.name == "b"


def test_a_checkpoint_of_another_task_is_refused(command, checkpoint):
    status, _, err = command("fit", "--ckpt_path=last", "--config=sac")
    assert status == 2
    assert (
        "error: task is Go2JoystickFlat; the checkpoint was made with CartpoleSwingup; allowed: that, or a new run"
        in err
    )


# bad input: one line each, status 2, nothing started


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["fti"], "command is fti; did you mean fit?"),
        (["tasks", "all"], "argument is all; tasks takes none"),
        (["fit", "cartpole.yaml"], "argument is cartpole.yaml; allowed: --name value"),
        (["fit", *CARTPOLE, "--sed", "3"], "sed is 3; there is no such setting; did you mean seed?"),
        (["fit", *CARTPOLE, "--num_envs=3"], "num_envs is 3; there is no such setting; did you mean task.num_envs?"),
        (
            ["fit", *CARTPOLE, "--training.max_step=3"],
            "training.max_step is 3; there is no such setting; did you mean training.max_env_steps?",
        ),
        (["fit", *CARTPOLE, "--task.num_envs=x"], "task.num_envs is x; allowed: a whole number"),
        (["fit", *CARTPOLE, "--learner.betas=[1]"], "learner.betas is [1]; allowed: [a number, a number]"),
        (
            ["fit", *CARTPOLE, "--training.precision=bf16"],
            "training.precision is bf16; allowed: auto, 32-true, tf32 or bf16-mixed",
        ),
        (["fit", *CARTPOLE, "--training.log_every=0"], "training.log_every is 0; allowed: 1 or more"),
        (
            ["fit", "--task=Go2JoystickFlat", "--task.pushes={interval_s: 0}"],
            "task.pushes.interval_s is 0.0; allowed: 0.02 s or more",
        ),
        (
            ["fit", "--task=G1WalkFlat", "--task.terrain={levels: 0}"],
            "task.terrain.levels is 0; allowed: 1 to 100",
        ),
        (
            ["fit", *CARTPOLE, "--devices", "[0, 7]"],
            "training.devices is [0, 7]; allowed on the CPU: n or [0, ..., n - 1] for n ranks",
        ),
        (["fit", *CARTPOLE, "--devices"], "devices is without a value; allowed: --devices VALUE"),
        (["fit", "--task=Go2JoystikFlat"], "task is Go2JoystikFlat; did you mean Go2JoystickFlat?"),
        (["fit", "--task=gymnasium:Pendulm-v1"], "task is gymnasium:Pendulm-v1; did you mean gymnasium:Pendulum-v1?"),
        (["fit"], "task is missing; allowed: CartpoleSwingup, G1MotionTracking, G1WalkFlat, Go2JoystickFlat"),
        (["fit", *CARTPOLE, "--learner=FastSAK"], "learner is FastSAK; did you mean FastSAC?"),
        (["fit", *CARTPOLE, "--logger=Tensorboard"], "logger is Tensorboard; did you mean TensorBoardLogger?"),
        (
            ["fit", "--config=cartpol.yaml"],
            "config is cartpol.yaml; there is no such file, nor such a preset; did you mean cartpole?",
        ),
        (["fit", *CARTPOLE, "--ckpt_path=last"], "ckpt_path is last; there is no checkpoint under runs"),
        (
            ["fit", *CARTPOLE, "--ckpt_path=nowhere"],
            "ckpt_path is nowhere; allowed: last, best, a checkpoint's folder, or the folder of a run with one",
        ),
        (
            ["fit", *CARTPOLE, "--learner.replay_ticks=2"],
            "learner.replay_ticks is 2; allowed: 4 or more, so that 64 environments fill a batch of 256",
        ),
        (
            ["doctor", *CARTPOLE, "--training.max_env_steps=1"],
            "training.max_env_steps is 1; allowed: 64 or more, one tick of 1 x 64 environments",
        ),
        (["evaluate"], "ckpt_path is missing; allowed: a text"),
        (
            ["evaluate", "--ckpt_path=nowhere"],
            "ckpt_path is nowhere; allowed: last, best, a checkpoint's folder, or the folder of a run with one",
        ),
        (["evaluate", "--ckpt_path=last", "--episodes=0"], "episodes is 0; allowed: 1 or more"),
        (["evaluate", "--ckpt_path=last", "--json=no/a"], "json is no/a; allowed: a file in a folder that is there"),
        (["evaluate", "--ckpt_path=last", "--physics=real"], "physics is real; allowed: faithful or fast"),
    ],
)
def test_bad_input_is_one_line(command, job, tokens, said):
    status, out, err = command(*tokens)
    assert status == 2
    assert f"error: {said}" in err
    assert out == ""
    assert not job


def test_problems_of_settings_devices_and_files_are_told_in_one_pass(command):
    status, _, err = command(
        "fit", *CARTPOLE, "--config=missing", "--devices=999", "--sed=1", "--task.num_env=2", "--learner.tau=x"
    )
    assert status == 2
    assert [line.split(" is ")[0] for line in err] == [
        "error: config",
        "error: sed",
        "error: task.num_env",
        "error: learner.tau",
        "error: training.devices",
    ]


def test_a_wrong_key_in_a_file_is_found_as_on_the_command_line(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("task: {class_path: CartpoleSwingup, init_args: {num_env: 3}}\nsed: 1\n")
    assert command("fit", "--config=mine.yaml")[2] == [
        "error: sed is 1; there is no such setting; did you mean seed?",
        "error: task.num_env is 3; there is no such setting; did you mean task.num_envs?",
    ]


def test_left_over_rank_variables_are_refused(command, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LT_DEVICES", "2")
    status, _, err = command("fit", *CARTPOLE)
    assert status == 2
    assert [line.split(" is ")[0] for line in err] == ["error: LT_DEVICES", "error: LOCAL_RANK"]


def test_an_error_inside_a_users_task_keeps_its_traceback(command, tmp_path, monkeypatch):
    (tmp_path / "broken_task.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        command("fit", "--task=broken_task.Mine")


# evaluate


def test_evaluate_prints_a_table_and_json(capsys, monkeypatch, tmp_path, checkpoint):
    from unilab_fabric import evaluation

    asked = []

    def evaluate(path, **options):
        asked.append((path, options))
        return {"return": 1.5}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    monkeypatch.setattr(evaluation, "format_table", lambda result: f"return | {result['return']}")
    assert cli.main(["evaluate", "--ckpt_path=last", "--episodes=3", "--json", "out.json"]) == 0
    ((path, options),) = asked
    assert path.resolve() == checkpoint
    assert options == {"episodes": 3, "episode_s": 10.0, "physics": "faithful", "seed": 1, "overrides": {}}
    out = capsys.readouterr().out
    table, _, text = out.partition("\n")
    assert table == "return | 1.5"
    assert json.loads(text) == json.loads((tmp_path / "out.json").read_text()) == {"return": 1.5}


# real processes


def process(*command):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )


def test_as_a_module_bad_input_ends_with_status_2_and_without_a_traceback():
    done = process(sys.executable, "-m", "unilab_fabric", "fit", "--task", "CartpoleSwingu", "--devices", "999")
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.split(" is ")[0] for line in done.stderr.splitlines()] == ["error: task", "error: training.devices"]


def test_the_console_script_does_the_same():
    script = Path(sys.executable).with_name("unilab-fabric")
    if not script.exists():
        pytest.skip("the package is not installed")
    assert process(script, "tasks").stdout == process(sys.executable, "-m", "unilab_fabric", "tasks").stdout
    assert process(script, "fit").returncode == 2
