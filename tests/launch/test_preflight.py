import os
from dataclasses import replace

import pytest

from tests.launch.machines import Machine
from tests.manifests import write_checkpoint
from unilab_fabric.config import build_learner_config, resolve_run
from unilab_fabric.errors import Problems, UserErrors
from unilab_fabric.launch import preflight as module
from unilab_fabric.launch.devices import resolve_topology
from unilab_fabric.launch.preflight import available_memory, banner, preflight, size_text, task_spec
from unilab_fabric.sources import overlay, read_files, shipped_presets

MANY_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(num_envs=16, learner=None, ckpt_path=None, **training):
    return resolve_run(
        {
            "task": {"class_path": "CartpoleSwingup", "init_args": {"num_envs": num_envs}},
            "learner": {
                "class_path": "FastSAC",
                "init_args": {"batch_size": 32, "updates_per_tick": 2, "replay_ticks": 100, **(learner or {})},
            },
            "training": {"accelerator": "cpu", "max_env_steps": 1000, **training},
            "ckpt_path": ckpt_path,
        }
    )


def problems(config):
    with pytest.raises(UserErrors) as caught:
        preflight(config)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", sorted(shipped_presets()))
def test_every_shipped_preset_can_start(name):
    tree = read_files([name], Problems())
    if "class_path" not in tree["task"]:
        tree = overlay(tree, {"task": "gymnasium:Pendulum-v1"})
    plan = preflight(resolve_run(overlay(tree, {"training": {"accelerator": "cpu"}})))
    assert plan.ticks > plan.ticks_per_step
    assert plan.num_envs == tree["task"]["init_args"]["num_envs"]


@MANY_CORES
def test_a_plan_holds_sizes_per_rank_and_the_banner_those_of_the_job(tmp_path):
    plan = preflight(run(devices=2, run_name="a"), notes=("said here",))
    assert plan.num_envs == 16
    assert plan.ticks == 32  # the first tick at which 2 x 16 environments have made 1000 steps
    assert plan.run_folder.resolve() == tmp_path / "runs" / "a"
    lines = [" ".join(line.split()) for line in banner(plan).splitlines()]
    assert lines[0].endswith("FastSAC on CartpoleSwingup, seeds 1 to 2")
    assert "environments 16 32" in lines
    assert "batch size 32 64" in lines
    assert "environment steps 512 1,024" in lines
    assert "before the first update 160 320" in lines
    assert "transitions in replay 1,600 3,200" in lines
    assert "length 32 ticks; critic updates in each: 2" in lines
    assert "run folder runs/a" in lines
    assert "note said here" in lines
    assert any("2 on the CPU" in line and "gloo" in line for line in lines)
    assert any("rank 1: " in line and line.endswith("held to them") for line in lines)


@MANY_CORES
def test_sizes_of_the_job_are_divided_among_the_ranks():
    plan = preflight(run(devices=2, batch="job"))
    lines = [" ".join(line.split()) for line in banner(plan).splitlines()]
    assert "environments 8 16" in lines
    assert "batch size 16 32" in lines
    assert "transitions in replay 800 1,600" in lines
    assert "length 63 ticks; critic updates in each: 2" in lines  # as with one rank
    assert "note the sizes that were given are the job's, divided among 2 ranks" in lines
    alone = banner(preflight(run(devices=1, batch="job")))
    assert "the job's" not in alone


@MANY_CORES
def test_sizes_of_the_job_that_do_not_divide_are_told_at_once():
    assert problems(run(num_envs=15, learner={"batch_size": 33}, devices=2, batch="job")) == [
        "task.num_envs is 15; training.batch is job; allowed: a multiple of 2, the number of ranks",
        "learner.batch_size is 33; training.batch is job; allowed: a multiple of 2, the number of ranks",
    ]


def test_nothing_is_made_before_the_run_starts(tmp_path):
    preflight(run(run_name="a"))
    assert not list(tmp_path.iterdir())


@MANY_CORES
def test_the_banner_names_every_variable_that_a_run_sets():
    from unilab_fabric.launch.job import rank_environments

    plan = preflight(run(devices=2))
    for variables in rank_environments(plan.topology, os.environ, port=1234).values():
        assert variables.keys() <= plan.environment.keys()
        for name, value in variables.items():
            assert plan.environment[name] in (value, "0..1", "(a free one)")
    for name in plan.environment:
        assert f"{name}=" in banner(plan)


def test_a_run_without_a_name_gets_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(module.time, "strftime", lambda _: "20260102-030405")
    first = preflight(run()).run_folder
    assert first.name == "CartpoleSwingup-FastSAC-20260102-030405"
    first.mkdir(parents=True)
    assert preflight(run()).run_folder.name == "CartpoleSwingup-FastSAC-20260102-030405-2"


def test_names_of_gymnasium_ids_and_import_paths_make_plain_folder_names():
    config = run()
    for name in ("gymnasium:ALE/Pong-v5", "mine.tasks.Pong-v5"):
        folder = module.new_run_folder(replace(config, task=replace(config.task, class_path=name)))
        assert "/" not in folder.name
        assert "Pong-v5-FastSAC-" in folder.name
        assert ":" not in folder.name


def test_every_problem_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    said = problems(run(learner={"batch_size": 4096}, devices=1000, log_root="file", max_env_steps=3, num_nodes=2))
    assert [line.split(" is ")[0] for line in said] == [
        "training.num_nodes",
        "training.devices",
        "learner.replay_ticks",
        "learner.batch_size",
        "training.log_root",
    ]


def test_a_replay_smaller_than_a_batch_and_a_batch_larger_than_the_first_fill():
    assert problems(run(num_envs=2, learner={"batch_size": 64, "replay_ticks": 20, "learning_starts": 10})) == [
        "learner.replay_ticks is 20; allowed: 32 or more, so that 2 environments fill a batch of 64",
        "learner.batch_size is 64; allowed: 20 or less, the transitions that 2 environments give in "
        "learner.learning_starts = 10 ticks",
    ]


def test_no_environments():
    assert problems(run(num_envs=0)) == ["task.num_envs is 0; allowed: 1 or more"]


def test_a_run_shorter_than_a_tick():
    assert problems(run(max_env_steps=15)) == [
        "training.max_env_steps is 15; allowed: 16 or more, one tick of 1 x 16 environments"
    ]


def test_a_folder_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    preflight(run(run_name="a"))  # an empty one is as good as none
    (tmp_path / "runs" / "a" / "config.yaml").write_text("")
    assert problems(run(run_name="a")) == [
        "training.run_name is a; runs/a already holds a run; allowed: another name, or --ckpt_path last to continue it"
    ]


@pytest.mark.parametrize("log_root", ["/proc/self/nothing", "file", "file/below"])
def test_a_folder_that_cannot_be_written(tmp_path, log_root):
    (tmp_path / "file").write_text("")
    (said,) = problems(run(log_root=log_root))
    assert said.startswith(f"training.log_root is {log_root}; ")
    assert "cannot be written" in said


def checkpoint(tmp_path, config, **manifest):
    return str(write_checkpoint(tmp_path / "runs" / "a", config, **manifest))


def test_a_run_continues_in_its_own_folder(tmp_path):
    path = checkpoint(tmp_path, run(run_name="a"))
    plan = preflight(run(run_name="a", ckpt_path=path))
    assert str(plan.ckpt_path) == path
    assert "continuing tick-000000030" in banner(plan)
    assert problems(run(run_name="b", ckpt_path=path, log_root="/proc/self/nothing"))[0].startswith("training.log_root")


def test_a_checkpoint_that_has_all_its_steps_has_nothing_left_to_do(tmp_path):
    path = checkpoint(tmp_path, run(run_name="a"), env_steps=1000)
    assert problems(run(run_name="a", ckpt_path=path)) == [
        "training.max_env_steps is 1000; the checkpoint is at 1000 environment steps of the job; "
        "allowed: more than that"
    ]


def test_sizes_of_what_a_checkpoint_continues_stay(tmp_path):
    path = checkpoint(tmp_path, run(run_name="a"))
    changed = run(num_envs=8, learner={"replay_ticks": 50}, run_name="a", ckpt_path=path)
    assert problems(changed) == [
        "task.num_envs is 8; the checkpoint was made with 16; allowed: that, or a new run",
        "learner.replay_ticks is 50; the checkpoint was made with 100; allowed: that, or a new run",
    ]


def test_sizes_may_change_with_the_number_of_ranks_as_environments_start_anew(tmp_path):
    path = checkpoint(tmp_path, run(run_name="a"), world_size=2)
    preflight(run(num_envs=8, learner={"replay_ticks": 50}, run_name="a", ckpt_path=path))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = checkpoint(tmp_path, run(run_name="a"))
    (tmp_path / "runs/a/checkpoints/tick-000000030/manifest.json").write_text("{")
    assert problems(run(run_name="a", ckpt_path=path))[0].startswith(f"ckpt_path is {path}; its manifest.json cannot")


def storage(config, spec, ticks=None):
    settings = build_learner_config(config.learner)
    return replace(settings, **({} if ticks is None else {settings.storage(spec).setting: ticks})).storage(spec)


def test_the_estimate_of_a_replay_is_its_memory(tmp_path):
    torch = pytest.importorskip("torch")
    from unilab_fabric.offpolicy.replay import Replay

    spec = task_spec(run(num_envs=16))
    replay = Replay(spec, ticks=500, n_step=1, discount=0.9, device=torch.device("cpu"), seed=0)
    held = sum(value.nbytes for value in vars(replay).values() if isinstance(value, torch.Tensor))
    assert held == pytest.approx(storage(run(num_envs=16), spec, 500).bytes, rel=0.1)


@MANY_CORES
@pytest.mark.parametrize(("devices", "needed"), [(1, 1), (2, 2)])
def test_a_replay_that_does_not_fit_is_refused_with_the_number_that_does(monkeypatch, devices, needed):
    spec = task_spec(run())
    learner = build_learner_config(run().learner).memory_bytes(spec, "auto") * needed
    room = storage(run(), spec, 50).bytes * needed + learner
    monkeypatch.setattr(module, "available_memory", lambda: room)
    said = problems(run(devices=devices))
    assert said == [
        f"learner.replay_ticks is 100; that takes {size_text(storage(run(), spec, 100).bytes * needed)} beside "
        f"{size_text(learner)} of the learner, and this machine has {size_text(room)} left; allowed: 50 or less"
    ]
    preflight(run(devices=devices, learner={"replay_ticks": 50}))


def test_memory_is_what_machine_and_container_leave(tmp_path):
    machine = Machine(tmp_path, cores=1)
    assert available_memory(tmp_path) is None
    machine.write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:    500 kB")
    assert available_memory(tmp_path) == 512_000
    machine.write("proc/self/cgroup", "0::/box")
    machine.write("sys/fs/cgroup/box/memory.max", "max")
    assert available_memory(tmp_path) == 512_000
    machine.write("sys/fs/cgroup/box/memory.max", "300000")
    machine.write("sys/fs/cgroup/box/memory.current", "100000")
    assert available_memory(tmp_path) == 200_000


def test_a_rank_above_0_leaves_the_run_folder_to_rank_0(tmp_path, monkeypatch):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("")  # rank 0 has begun
    config = run(run_name="a", devices=1)
    second = replace(resolve_topology(config.training, {}), devices=(0, 1), local_rank=1, started_by="torchrun")
    monkeypatch.setattr(module, "resolve_topology", lambda training: second)
    assert preflight(config).topology.rank == 1


@pytest.mark.parametrize(("size", "text"), [(1_500, "1.5 kB"), (2_500_000, "2.5 MB"), (12_300_000_000, "12.3 GB")])
def test_sizes_as_a_person_reads_them(size, text):
    assert size_text(size) == text
