"""How fast would a job of 1 to 1,024 ranks be, and what would limit it? A model, held against what runs here.

    python benchmarks/scaling_model.py [--json PATH] [--rounds N] [--env_steps N] [--gloo] [--slow_link RATE] [--quick]

Measured: the phases of a tick of FastSAC on the Go2 (configs/sac.yaml) with one rank, and an all-reduce between two
processes, in shared memory as ranks of one machine make it, or with `--gloo` as those of several machines do. From
these the model predicts one rank on two cores, one on a single core, and two ranks with a core each; then the same
three are run, in turns, and the error is printed. With three cores or more, three ranks too; with less they are
refused, and their prediction is printed alone. At the end stands a table for many ranks on links that are assumed, not
measured.

`--slow_link 100mbit` does all of it in a network namespace of its own, whose loopback `tc` holds to that rate: another
bandwidth to predict, that of gloo. It needs Linux and root, and leaves the machine's own network alone.

The formula and its limits are explained in docs/scaling.md.
"""

import argparse
import csv
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from shared.timing import machine

from unilab_fabric.envs.registry import make_task
from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.fast_sac.learner import FastSACLearner
from unilab_fabric.loop.phases import WORK_OF_COLLECTOR
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.shared import open_shared_sum

PRESET = Path(__file__).parents[1] / "configs" / "sac.yaml"
SMALL, LARGE = 4, 1 << 21
"""Bytes of the two all-reduces that give latency and bandwidth."""


# ---- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between two ranks, or two machines."""

    latency_s: float
    """Seconds [s] until the first byte of a message is there."""
    bytes_per_s: float
    """Bandwidth [B/s] of one direction."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """One kind of all-reduce."""

    num_bytes: float
    per_tick: float
    """How many in a tick; a half where it is in every second one."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """What one rank does in a tick when it is alone, seconds [s]."""

    env_steps: int
    physics_s: float
    serial_s: float
    """Commit and act, beside which neither physics nor the update runs."""
    update_s: float
    other_s: float
    """Between ticks: reports, the vote on stopping."""
    overlap_s: float
    """What a mean tick is longer than the longer one of physics and update: they are longer by turns."""
    jitter_s: float
    """Standard deviation of a tick's length."""
    reductions: tuple[Reduction, ...]
    one_core: bool = False
    """Physics and update share a core, so they add up."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How ranks are connected."""

    ranks_per_machine: int
    inside: Link
    between: Link


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A tick of a job, seconds [s]."""

    ranks: int
    tick_s: float
    latency_s: float
    """All-reduces of a tick: messages."""
    bandwidth_s: float
    """All-reduces of a tick: bytes."""
    waiting_s: float
    """For the slowest rank."""
    env_steps_per_sec: float
    """Of the job."""
    efficiency: float
    """Throughput of a rank, as a share of that of a rank alone."""
    limit: str


def ring_s(num_bytes: float, ranks: int, link: Link) -> tuple[float, float]:
    """Seconds [s] of an all-reduce around a ring: for its messages, and for its bytes.

    Reduce-scatter and all-gather, n - 1 steps each with 1/n of the bytes; Thakur, Rabenseifner, Gropp 2005,
    "Optimization of Collective Communication Operations in MPICH", section 4. Adding the numbers up is left out.
    """
    steps = 2 * (ranks - 1)
    return steps * link.latency_s, steps / ranks * num_bytes / link.bytes_per_s


def halving_doubling_s(num_bytes: float, ranks: int, link: Link) -> tuple[float, float]:
    """The same by recursive halving, then recursive doubling (Rabenseifner's algorithm, same source).

    As many bytes as the ring, in log2 n steps each way. For other counts than powers of two it is a bit dearer.
    """
    return 2 * math.ceil(math.log2(ranks)) * link.latency_s, 2 * (ranks - 1) / ranks * num_bytes / link.bytes_per_s


def all_reduce_s(num_bytes: float, ranks: int, cluster: Cluster) -> tuple[float, float]:
    """Inside each machine, then between machines; in both the cheaper algorithm, as a library picks it."""
    local = min(ranks, cluster.ranks_per_machine)
    total = [0.0, 0.0]
    for count, link in ((local, cluster.inside), (math.ceil(ranks / local), cluster.between)):
        best = min(ring_s(num_bytes, count, link), halving_doubling_s(num_bytes, count, link), key=sum)
        total = [done + more for done, more in zip(total, best, strict=True)]
    return total[0], total[1]


def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` standard normal numbers; sqrt(2 ln count) is its bound and its limit."""
    x = np.linspace(-10, 10, 20_001)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    density = count * below ** (count - 1) * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return float((x * density).sum() * (x[1] - x[0]))


def predict(tick: Tick, ranks: int, cluster: Cluster) -> Prediction:
    """The job's tick with so many equal ranks."""
    latency = bandwidth = 0.0
    for reduction in tick.reductions:
        messages, volume = all_reduce_s(reduction.num_bytes, ranks, cluster)
        latency += reduction.per_tick * messages
        bandwidth += reduction.per_tick * volume
    learner = {"update": tick.update_s, "latency": latency, "bandwidth": bandwidth}
    waiting = tick.jitter_s * expected_maximum(ranks)
    length = _length(tick, sum(learner.values())) + waiting
    on_path = {"waiting": waiting}
    if tick.one_core or sum(learner.values()) > tick.physics_s:
        on_path |= learner
    if tick.one_core or sum(learner.values()) <= tick.physics_s:
        on_path |= {"physics": tick.physics_s}
    return Prediction(
        ranks=ranks,
        tick_s=length,
        latency_s=latency,
        bandwidth_s=bandwidth,
        waiting_s=waiting,
        env_steps_per_sec=ranks * tick.env_steps / length,
        efficiency=_length(tick, tick.update_s) / length,
        limit=max(on_path, key=lambda part: on_path[part]),
    )


def _length(tick: Tick, learner_s: float) -> float:
    chains = (tick.physics_s, learner_s)
    beside = sum(chains) if tick.one_core else max(chains) + tick.overlap_s
    return tick.serial_s + beside + tick.other_s


# ---- its inputs, measured -----------------------------------------------------------------------------------------


def run(
    folder: Path, name: str, env_steps: int, gloo: bool, ranks: int = 1, cores: int | None = None, log_every: int = 10
) -> list[dict[str, float]]:
    """The reports of a real run, those of its second half; `cores` limits what it may use."""
    command = [sys.executable, "-m", "unilab_fabric", "fit", "--config", str(PRESET), "--training.accelerator", "cpu"]
    command += ["--training.max_env_steps", str(env_steps), "--training.log_every", str(log_every)]
    command += ["--training.log_root", str(folder), "--training.run_name", name, "--devices", str(ranks)]
    command += ["--checkpoint.every", "0", "--logger", "CSVLogger", "--evaluation.episodes", "0"]
    command += ["--training.shared_memory", "false" if gloo else "true"]
    mask = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, preexec_fn=lambda: os.sched_setaffinity(0, mask)
    )
    if done.returncode:
        sys.exit(f"error: {' '.join(command)} failed:\n{done.stderr}")
    with (folder / name / "metrics.csv").open(newline="") as file:
        rows = [{tag: float(text) for tag, text in row.items() if text} for row in csv.DictReader(file)]
    return rows[len(rows) // 2 :]


def mean_rate(rows: Sequence[Mapping[str, float]]) -> float:
    """Environment steps a second over rows of equal ticks: one over the mean time of a step."""
    return statistics.harmonic_mean([row["Perf/env_steps_per_sec"] for row in rows])


def measured_tick(rows: Sequence[Mapping[str, float]], num_envs: int, reductions: tuple[Reduction, ...]) -> Tick:
    """From reports of single ticks of one rank with a core for physics and one for the learner."""

    def mean_s(*phases: str) -> float:
        return sum(statistics.fmean(row[f"Perf/{phase}_ms"] for row in rows) for phase in phases) / 1e3

    ticks = [num_envs / row["Perf/env_steps_per_sec"] for row in rows]
    physics, serial, update = mean_s(*WORK_OF_COLLECTOR), mean_s("commit", "act"), mean_s("update")
    other = max(0.0, statistics.fmean(ticks) - mean_s("wait", "commit", "act", "update"))
    return Tick(
        env_steps=num_envs,
        physics_s=physics,
        serial_s=serial,
        update_s=update,
        other_s=other,
        overlap_s=max(0.0, statistics.fmean(ticks) - other - serial - max(physics, update)),
        jitter_s=statistics.stdev(ticks),
        reductions=reductions,
    )


def preset() -> tuple[int, FastSAC, dict[str, Any]]:
    """Environments of a rank, the learner's settings, and the task's."""
    tree = yaml.safe_load(PRESET.read_text())
    arguments = tree["learner"]["init_args"]
    lists = {name: tuple(value) for name, value in arguments.items() if isinstance(value, list)}
    return tree["task"]["init_args"]["num_envs"], FastSAC(**{**arguments, **lists}), tree["task"]


def reductions_of(settings: FastSAC, task: Mapping[str, Any]) -> tuple[Reduction, ...]:
    """The gradients that the learner averages: with what travels along."""
    spec = make_task(task["class_path"], {**task["init_args"], "num_envs": 2}, seed=1, num_threads=1).task_spec()
    learner = settings.build(spec, torch.device("cpu"), "32-true", Ranks(world_size=2), 1, 1)
    assert isinstance(learner, FastSACLearner)
    updates = settings.updates_per_tick
    return (
        Reduction(num_bytes=learner.critic_flat.reduced.nbytes, per_tick=updates),
        Reduction(num_bytes=learner.actor_flat.reduced.nbytes, per_tick=updates / settings.actor_every),
    )


def measured_link(gloo: bool, busy: bool, seconds: float) -> Link:
    """Between two processes on the first two cores; `busy`: while another process wants each core too."""
    spawn = multiprocessing.get_context("spawn")
    burners = [spawn.Process(target=_burn, args=(core,), daemon=True) for core in _two_cores() if busy]
    with tempfile.TemporaryDirectory() as folder:
        pair = [spawn.Process(target=_time_all_reduces, args=(rank, folder, gloo, seconds)) for rank in range(2)]
        for process in (*burners, *pair):
            process.start()
        for process in pair:
            process.join()
        for burner in burners:
            burner.terminate()
            burner.join()
        if any(process.exitcode for process in pair):
            sys.exit("error: the two processes that measure the link have failed")
        small, large = json.loads((Path(folder) / "seconds.json").read_text())
    return Link(latency_s=small / 2, bytes_per_s=LARGE / (large - small))  # ring of two: 2 messages, all bytes once


def _two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    return [cores[0], cores[min(1, len(cores) - 1)]]


def _burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def _time_all_reduces(rank: int, folder: str, gloo: bool, seconds: float) -> None:
    """Writes the mean seconds of a small and a large all-reduce."""
    os.sched_setaffinity(0, {_two_cores()[rank]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = Ranks(rank, 2)
    if not gloo:
        ranks = replace(ranks, shared=open_shared_sum(rank, 2, ranks.gather))
    means: list[float] = []
    for num_bytes in (SMALL, LARGE):
        buffer = torch.zeros(num_bytes // 4)
        for count in (5, None):  # the first ones set the connection up, and say how many fit
            if count is None:
                share = torch.tensor(float(np.clip(seconds / means.pop(), 5, 5000)))
                dist.broadcast(share, 0)
                count = int(share)
            since = time.perf_counter()
            for _ in range(count):
                ranks.sum_(buffer, "a buffer of zeros")
            means.append((time.perf_counter() - since) / count)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(means))
    dist.barrier()
    dist.destroy_process_group()


# ---- prediction against measurement -------------------------------------------------------------------------------


def check(env_steps: int, rounds: int, gloo: bool, seconds: float) -> dict[str, Any]:
    """Measures inputs, predicts, runs, prints the errors."""
    num_envs, settings, task = preset()
    reductions = reductions_of(settings, task)
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        sys.exit("error: this process may use 1 core; the check needs 2")
    cases = {"1 rank, 2 cores": (1, 2), "1 rank, 1 core": (1, 1), "2 ranks, 1 core each": (2, 2)}
    if cores > 2:
        cases["3 ranks, 1 core each"] = (3, 3)
    inputs: list[Tick] = []
    rates: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            rows = run(Path(folder), f"inputs-{i}", env_steps, gloo, cores=2, log_every=1)
            inputs.append(measured_tick(rows, num_envs, reductions))
            for name, (ranks, used) in cases.items():
                plain = f"{name}-{i}".replace(" ", "-").replace(",", "")
                rows = run(Path(folder), plain, env_steps, gloo, ranks, used)
                rates[name].append(mean_rate(rows))
    tick = replace(
        inputs[0],
        **{
            part: statistics.median(getattr(one, part) for one in inputs)
            for part in ("physics_s", "serial_s", "update_s", "other_s", "overlap_s", "jitter_s")
        },
    )
    quiet, busy = measured_link(gloo, False, seconds), measured_link(gloo, True, seconds)
    _print_inputs(tick, "gloo" if gloo else "shared memory", quiet, busy)

    print(f"\n{'':24}{'predicted':>10}{'measured':>10}{'error':>8}   env steps/s; measured: median of {rounds}")
    numbers: dict[str, Any] = {"tick": asdict(tick), "link": asdict(quiet), "busy_link": asdict(busy), "cases": {}}
    for name, (ranks, used) in ({"3 ranks, 1 core each": (3, 3)} | cases if cores < 3 else cases).items():
        alone = used == ranks
        link = busy if alone else quiet
        cluster = Cluster(ranks_per_machine=ranks, inside=link, between=link)
        predicted = predict(replace(tick, one_core=alone), ranks, cluster).env_steps_per_sec
        if name in rates:
            measured = statistics.median(rates[name])
            error = predicted / measured - 1
            print(f"{name:24}{predicted:10,.0f}{measured:10,.0f}{error:+8.0%}")
            numbers["cases"][name] = {"predicted": predicted, "measured": rates[name], "error": error}
        else:
            print(f"{name:24}{predicted:10,.0f}{'-':>10}{'':>8}   refused on {cores} cores: a rank needs one")
    return numbers


def _print_inputs(tick: Tick, transport: str, quiet: Link, busy: Link) -> None:
    print("a tick of one rank [ms]: ", end="")
    print(
        ", ".join(
            f"{name} {1e3 * getattr(tick, f'{name}_s'):.2f}"
            for name in ("physics", "update", "serial", "other", "overlap")
        )
    )
    print(f"standard deviation of its length: {1e3 * tick.jitter_s:.2f} ms")
    sizes = (f"{one.num_bytes / 1e6:.2f} MB x {one.per_tick:g}" for one in tick.reductions)
    print("gradients of a tick: " + ", ".join(sizes))
    for name, link in (("idle cores", quiet), ("busy cores", busy)):
        print(f"{transport}, {name}: {1e6 * link.latency_s:.0f} us a message, {link.bytes_per_s / 1e9:.2f} GB/s")


# ---- many ranks, assumed ------------------------------------------------------------------------------------------

ASSUMED = Cluster(
    ranks_per_machine=8,
    inside=Link(latency_s=10e-6, bytes_per_s=100e9),
    between=Link(latency_s=20e-6, bytes_per_s=25e9),
)
"""Accelerators of one machine among each other, and one network card for each machine: assumed, not measured."""
KNOBS = {
    "physics": "more cores, or fewer task.num_envs a rank",
    "update": "a smaller learner.batch_size, fewer learner.updates_per_tick",
    "latency": "fewer learner.updates_per_tick; every one is a round of messages",
    "bandwidth": "training.gradient_wire bfloat16, smaller networks",
    "waiting": "cores of their own, equal machines; longer ticks (task.num_envs)",
}


def many_ranks(tick: Tick, cluster: Cluster, counts: Sequence[int]) -> list[Prediction]:
    """Prints and returns the predictions."""
    print(
        f"{'ranks':>7}{'env steps/s':>14}{'tick ms':>9}{'latency':>9}{'bandwidth':>11}{'waiting':>9}{'eff.':>6}  limit"
    )
    predictions = [predict(tick, count, cluster) for count in counts]
    for one in predictions:
        parts = [one.tick_s, one.latency_s, one.bandwidth_s, one.waiting_s]
        ms = "".join(f"{1e3 * s:{width}.2f}" for s, width in zip(parts, (9, 9, 11, 9), strict=True))
        print(f"{one.ranks:7}{one.env_steps_per_sec:14,.0f}{ms}{one.efficiency:6.2f}  {one.limit}")
    for limit in dict.fromkeys(one.limit for one in predictions):
        print(f"  {limit}: {KNOBS[limit]}")
    return predictions


COUNTS = [2**power for power in range(11)]
SMALL_TICK = "the tick measured here"
LARGE_TICK = Tick(
    env_steps=2048,
    physics_s=20e-3,
    serial_s=0.5e-3,
    update_s=15e-3,
    other_s=0.1e-3,
    overlap_s=0.4e-3,
    jitter_s=1e-3,
    reductions=(Reduction(num_bytes=10e6, per_tick=8), Reduction(num_bytes=3e6, per_tick=4)),
)
"""About a G1 on an accelerator: 2,048 environments, 8 updates a tick. Assumed, not measured."""


def print_tables(measured: Tick) -> dict[str, Any]:
    """Both ticks on the assumed cluster."""
    inside, between = ASSUMED.inside, ASSUMED.between
    link = "{:.0f} GB/s and {:.0f} us"
    print(f"\nassumed: {ASSUMED.ranks_per_machine} ranks a machine, inside it ", end="")
    print(link.format(inside.bytes_per_s / 1e9, 1e6 * inside.latency_s), end=", between machines ")
    print(link.format(between.bytes_per_s / 1e9, 1e6 * between.latency_s))
    tables = {}
    for name, tick in ((SMALL_TICK, measured), ("an assumed larger tick, 2,048 environments, 8 updates", LARGE_TICK)):
        print(f"\n{name}")
        tables[name] = [asdict(one) for one in many_ranks(tick, ASSUMED, COUNTS)]
    return tables


def in_namespace(rate: str, arguments: Sequence[str]) -> int:
    """Runs this program again where the loopback is slow: in a network namespace that ends with it."""
    shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 128kb latency 200ms"
    command = ["unshare", "--net", "sh", "-c", f'{shape} && exec "$@"', "sh", sys.executable, __file__, *arguments]
    print(f"in a network namespace of its own, with a loopback of {rate}", flush=True)
    return subprocess.run(command).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case, in turns")
    parser.add_argument("--env_steps", type=int, default=200_000, help="length of a run")
    parser.add_argument("--gloo", action="store_true", help="ranks add up through gloo, as on several machines")
    parser.add_argument("--slow_link", metavar="RATE", help="in tc's words, such as 100mbit")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, not how fast")
    arguments = parser.parse_args()
    if arguments.slow_link:
        rest = [f"--rounds={arguments.rounds}", f"--env_steps={arguments.env_steps}"]
        rest += ["--gloo"] + ["--quick"] * arguments.quick + ([f"--json={arguments.json}"] if arguments.json else [])
        sys.exit(in_namespace(arguments.slow_link, rest))
    print(f"{machine()['processor']}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}", flush=True)
    env_steps, rounds, seconds = (20_000, 1, 0.2) if arguments.quick else (arguments.env_steps, arguments.rounds, 2.0)
    numbers = check(env_steps, rounds, arguments.gloo, seconds)
    tick = dict(numbers["tick"])
    tick["reductions"] = tuple(Reduction(**one) for one in tick["reductions"])
    numbers["tables"] = print_tables(Tick(**tick))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(machine() | numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
