import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from unilab_fabric.errors import UserError
from unilab_fabric.loop.collector import Collector, CollectorConfig, CollectorFailed

COUNTING = "tests.offpolicy.counting.CountingEnv"


@pytest.fixture
def start():
    """Starts collectors and ends them with the test."""
    started = []

    def start(class_path=COUNTING, deadline_s=30.0, state_file=None, **init_args):
        config = CollectorConfig(
            class_path=class_path, init_args=init_args, seed=5, num_threads=1, state_file=state_file
        )
        started.append(Collector(config, rank=0, deadline_s=deadline_s))
        return started[-1]

    yield start
    for collector in started:
        collector.close()


def gone(pid, within_s=5.0):
    """Whether a process has ended; a zombie has."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def walk(collector, ticks, first=0):
    """Steps with actions equal to the tick; yields copies of each slot."""
    for tick in range(first, first + ticks):
        slot = collector.wait_filled(tick)
        yield tick, {name: getattr(slot, name).copy() for name in ("actor", "action", "reward", "terminated", "ended")}
        collector.next_slot(tick).action[:] = 0.001 * tick
        collector.release()


def test_a_slot_holds_the_observation_and_the_transition_that_led_to_it(start):
    collector = start(num_envs=1)
    assert collector.connect().name == "CountingEnv"
    seen = [slot for _, slot in walk(collector, 6)]
    assert [slot["actor"][0, 0] for slot in seen] == [0, 1, 2, 0, 1, 2]  # an episode has three steps
    assert [slot["reward"][0] for slot in seen[1:]] == [1, 2, 3, 1, 2]
    assert [slot["ended"][0] for slot in seen[1:]] == [0, 0, 1, 0, 0]
    assert [float(slot["action"][0, 0]) for slot in seen[1:]] == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004])


def test_the_collector_loads_neither_torch_nor_lightning_nor_cuda(start):
    collector = start("unilab_fabric.envs.tasks.cartpole.CartpoleSwingup", num_envs=2)
    collector.connect()
    list(walk(collector, 2))
    with open(f"/proc/{collector.pid}/maps") as maps:
        loaded = maps.read()
    with open(f"/proc/{collector.pid}/environ") as environ:
        assert "CUDA_VISIBLE_DEVICES=\0" in environ.read() + "\0"
    assert "mujoco" in loaded
    assert "libcuda" not in loaded
    assert "/dev/nvidia" not in loaded
    assert "torch" not in loaded
    assert "lightning" not in loaded


def test_a_failing_environment_reaches_the_user_with_its_own_traceback(start):
    collector = start(fail_at=3)
    collector.connect()
    with pytest.raises(CollectorFailed, match="told to fail here"):
        list(walk(collector, 6))
    assert gone(collector.pid)


def test_an_environment_that_cannot_be_made_is_reported(start):
    with pytest.raises(UserError, match="task is NoSuchTask; "):
        start("NoSuchTask").connect()


def test_a_killed_collector_is_named_with_its_signal(start):
    collector = start()
    collector.connect()
    list(walk(collector, 2))
    os.kill(collector.pid, signal.SIGKILL)
    with pytest.raises(CollectorFailed, match="killed by SIGKILL"):
        for _ in walk(collector, 5, first=2):
            pass


def test_a_wait_has_a_deadline_and_says_what_it_waited_for(start):
    collector = start(deadline_s=2.0)
    collector.connect()
    collector.wait_filled(0)
    with pytest.raises(CollectorFailed, match=r"rank 0: collector .* did not fill the slot of tick 1 within 2 s$"):
        collector.wait_filled(1)  # never released


def test_a_stopped_collector_is_named_as_such(start):
    collector = start(deadline_s=2.0)
    collector.connect()
    collector.wait_filled(0)
    os.kill(collector.pid, signal.SIGSTOP)
    collector.release()
    with pytest.raises(CollectorFailed, match="within 2 s; it is stopped"):
        collector.wait_filled(1)


def test_a_collector_ends_with_the_process_that_started_it():
    code = (
        "import sys, time\n"
        "from unilab_fabric.loop.collector import Collector, CollectorConfig\n"
        f"config = CollectorConfig(class_path={COUNTING!r}, init_args={{}}, seed=1, num_threads=1)\n"
        "collector = Collector(config, rank=0, deadline_s=30)\n"
        "collector.connect()\n"
        "print(collector.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        try:
            pid = int(parent.stdout.readline())
            parent.kill()
            assert gone(pid)
        finally:
            parent.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_collector_is_left_to_its_rank(start, number):
    collector = start()
    collector.connect()
    list(walk(collector, 2))
    os.kill(collector.pid, number)
    os.kill(collector.pid, number)
    list(walk(collector, 5, first=2))
    assert collector.wait_filled(7).stop[0] == number


def test_a_signal_while_the_environments_are_made_is_not_lost(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    collector = start("tests.system.tasks.Held", hold="starting", hold_s=1.0)
    time.sleep(0.5)  # the interpreter is up, and its handlers stand
    os.kill(collector.pid, signal.SIGTERM)
    collector.connect()
    assert collector.wait_filled(0).stop[0] == signal.SIGTERM


def test_what_stopped_a_run_does_not_stop_the_resumed_one(start, tmp_path):
    task = "unilab_fabric.envs.tasks.cartpole.CartpoleSwingup"
    first = start(task, num_envs=2)
    first.connect()
    os.kill(first.pid, signal.SIGTERM)
    list(walk(first, 2))
    slot = first.save_state(tmp_path / "envs.npz", 2)
    resumed = start(task, num_envs=2, state_file=str(tmp_path / "envs.npz"))
    resumed.connect()
    resumed.resume_at(2, slot)
    assert resumed.wait_filled(2).stop[0] == 0


def test_closing_ends_the_process(start):
    collector = start()
    collector.connect()
    collector.close()
    assert gone(collector.pid)


def test_a_restored_collector_continues_bit_for_bit(start, tmp_path):
    task = "unilab_fabric.envs.tasks.cartpole.CartpoleSwingup"
    straight = start(task, num_envs=8)
    straight.connect()
    list(walk(straight, 20))
    slot = straight.save_state(tmp_path / "envs.npz", 20)
    expected = [slot for _, slot in walk(straight, 20, first=20)]
    resumed = start(task, num_envs=8, state_file=str(tmp_path / "envs.npz"))
    resumed.connect()
    resumed.resume_at(20, slot)
    for found, wanted in zip([slot for _, slot in walk(resumed, 20, first=20)], expected, strict=True):
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_environments_without_state_say_so(start, tmp_path):
    collector = start()
    collector.connect()
    list(walk(collector, 3))
    assert collector.save_state(tmp_path / "envs.npz", 3) is None
    assert not (tmp_path / "envs.npz").exists()


def resident_kb(pid):
    """Memory that a process holds [kB]."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1])


def test_a_learner_that_pauses_costs_the_collector_no_memory(start):
    collector = start("unilab_fabric.envs.tasks.cartpole.CartpoleSwingup", num_envs=64)
    collector.connect()
    list(walk(collector, 200))
    before = resident_kb(collector.pid)
    time.sleep(2)  # there is nowhere to queue what it could collect meanwhile
    assert resident_kb(collector.pid) - before < 64
    list(walk(collector, 200, first=200))
    assert resident_kb(collector.pid) - before < 1024


def test_collectors_that_come_and_go_leave_nothing(start):
    segments = Path("/dev/shm")
    before = (len(os.listdir("/proc/self/fd")), set(segments.iterdir()) if segments.is_dir() else set())
    for _ in range(8):
        collector = start()
        collector.connect()
        list(walk(collector, 2))
        collector.close()
        assert gone(collector.pid)
    after = (len(os.listdir("/proc/self/fd")), set(segments.iterdir()) if segments.is_dir() else set())
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1]


def test_environments_of_other_settings_are_refused_in_one_line(start, tmp_path):
    task = "unilab_fabric.envs.tasks.cartpole.CartpoleSwingup"
    first = start(task, num_envs=2)
    first.connect()
    first.save_state(tmp_path / "envs.npz", 0)
    with pytest.raises(UserError) as caught:
        start(task, num_envs=3, state_file=str(tmp_path / "envs.npz")).connect()
    told = str(caught.value)
    assert told.startswith(
        f"task is CartpoleSwingup; {tmp_path / 'envs.npz'} is of other settings of it: episode/length"
    )
    assert "episode/length has the shape (2,) there and (3,) here" in told
    assert "\n" not in told
