"""How much faster is a job on N devices than on one, with the same devices, cores, batch and environments per rank?

Runs `fit` on the presets of FastSAC, FlashSAC and PPO, once on one device and once on more, and reads what the runs
wrote. The reference is the run on one device of the same repeat. Its one rank gets as many cores as each of the ranks
of the others: those of rank 0. Every rank does the same number of environment steps. The runs take turns, so that
whatever else the machine does falls on all of them alike.

    python benchmarks/scaling.py [--learners FastSAC FlashSAC PPO] [--devices 1 2] [--repeats 3] [--threshold 1.7]

The ratio is that of the steady rates: means of the second half of `Perf/env_steps_per_sec`. Exit status 0: two devices
reach the threshold; 1: they miss it; 2: a figure is missing, and then nothing is claimed at all.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from shared.jobs import Ended, Unmeasured, fit
from shared.run_files import RETURN, STEPS, UPDATES, by_rank, series, steady_rate, summary
from shared.timing import machine

from unilab_fabric.launch.affinity import allowed_cores, cpus_of, split_cores

PRESETS = {"FastSAC": "sac.yaml", "FlashSAC": "flash_sac.yaml", "PPO": "ppo.yaml"}
JUDGED = 2
"""Devices of which the threshold speaks."""
Verdicts = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run."""

    learner: str
    devices: int
    repeat: int
    env_steps_per_sec: float
    """Steady rate of the job."""
    updates_per_sec: float
    """Steady rate of all ranks together."""
    throughput: float
    """Environment steps of the job over seconds [s] of the whole command, its start included."""
    final_return: float | None
    """Newest mean return; None where no episode has ended."""
    peak_bytes: int | None
    """Largest memory of all processes of the job together; None where the system does not tell."""
    phase_ms: list[dict[str, float]]
    """By rank, milliseconds of a tick in each phase."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A learner on so many devices, over all repeats: medians."""

    learner: str
    devices: int
    env_steps_per_sec: float
    updates_per_sec: float
    throughput: float
    ratio: float
    """Median of the ratios within a repeat."""
    ratios: list[float]
    """By repeat: steady rate over that of one device."""
    efficiency: float
    """The ratio over the number of devices."""
    final_return: float | None
    peak_bytes: int | None
    phase_ms: list[dict[str, float]]


# ---- running ---------------------------------------------------------------------------------------------------------


def order(learners: Sequence[str], devices: Sequence[int], repeats: int) -> Iterator[tuple[int, str, int]]:
    """Repeat, learner, devices: those of one learner follow each other, every other time in the opposite order."""
    for repeat in range(repeats):
        for learner in learners:
            for count in devices if repeat % 2 == 0 else reversed(devices):
                yield repeat, learner, count


def cores_for(most: int) -> list[tuple[int, ...]]:
    """Logical CPUs of each rank of the largest job. Raises Unmeasured where there are too few."""
    cores = allowed_cores(most)
    if len(cores) < most:
        raise Unmeasured(f"{most} ranks need {most} cores, and this process may use {len(cores)}")
    return [cpus_of(block) for block in split_cores(cores, most)]


def run(settings: argparse.Namespace, repeat: int, learner: str, devices: int) -> RunFigures:
    """One run, from its start to its figures. Raises Unmeasured, with the name of the run."""
    name = f"{learner}-{devices}-{repeat}"
    arguments = [
        f"--config={PRESETS[learner]}",
        f"--devices={devices}",
        f"--training.accelerator={settings.accelerator}",
        f"--training.max_env_steps={settings.env_steps * devices}",
        f"--training.log_root={settings.output}",
        f"--training.run_name={name}",
        "--logger=TensorBoardLogger",
        "--checkpoint.replay=false",
        "--evaluation.episodes=0",  # it would run beside some of the reports, on the cores of rank 0
        *settings.fit,
    ]
    try:
        blocks = cores_for(max(settings.devices))
        cpus = [cpu for block in blocks[:devices] for cpu in block]
        ended = fit(arguments, settings.output / f"{name}-output", cpus, settings.deadline_s)
        return read(settings.output / name, learner, devices, repeat, ended, cores=len(blocks[0]))
    except Unmeasured as error:
        raise Unmeasured(f"{learner}, N = {devices}, repeat {repeat}: {error}") from None


def read(folder: Path, learner: str, devices: int, repeat: int, ended: Ended, cores: int) -> RunFigures:
    """The figures in a run folder. Raises Unmeasured where one is missing, or a rank had not `cores` CPUs."""
    figures = summary(folder)
    ranks = by_rank(figures, devices, folder)
    for rank, cpus in enumerate(figures["topology"]["cpus"]):
        if len(cpus) != cores:
            raise Unmeasured(f"rank {rank} had {len(cpus)} CPUs, not {cores}, says run_summary.json in {folder}")
    found = series(folder)
    return RunFigures(
        learner=learner,
        devices=devices,
        repeat=repeat,
        env_steps_per_sec=steady_rate(found, STEPS, folder),
        updates_per_sec=steady_rate(found, UPDATES, folder),
        throughput=figures["env_steps"] / ended.wall_s,
        final_return=found[RETURN].values[-1] if RETURN in found else None,
        peak_bytes=ended.peak_bytes,
        phase_ms=[
            {phase: 1e3 * seconds / figures["ticks"] for phase, seconds in rank["seconds"].items()} for rank in ranks
        ],
    )


# ---- judging ---------------------------------------------------------------------------------------------------------


def aggregate(runs: Sequence[RunFigures]) -> list[Scaling]:
    """Medians over repeats, a line for each learner and number of devices."""
    cells: dict[tuple[str, int], list[RunFigures]] = {}
    for one in sorted(runs, key=lambda one: (list(PRESETS).index(one.learner), one.devices, one.repeat)):
        cells.setdefault((one.learner, one.devices), []).append(one)
    return [_scaling(own, cells[learner, 1]) for (learner, _), own in cells.items()]


def _scaling(own: Sequence[RunFigures], alone: Sequence[RunFigures]) -> Scaling:
    ratios = [a.env_steps_per_sec / b.env_steps_per_sec for a, b in zip(own, alone, strict=True)]
    ratio = statistics.median(ratios)
    returns = [one.final_return for one in own if one.final_return is not None]
    peaks = [one.peak_bytes for one in own if one.peak_bytes is not None]
    return Scaling(
        learner=own[0].learner,
        devices=own[0].devices,
        env_steps_per_sec=statistics.median(one.env_steps_per_sec for one in own),
        updates_per_sec=statistics.median(one.updates_per_sec for one in own),
        throughput=statistics.median(one.throughput for one in own),
        ratio=ratio,
        ratios=ratios,
        efficiency=ratio / own[0].devices,
        final_return=statistics.median(returns) if returns else None,
        peak_bytes=max(peaks) if peaks else None,
        phase_ms=[
            {phase: statistics.median(one.phase_ms[rank][phase] for one in own) for phase in own[0].phase_ms[rank]}
            for rank in range(own[0].devices)
        ],
    )


def judge(results: Sequence[Scaling], threshold: float) -> Verdicts:
    """By learner: what two devices reach, and whether that is enough."""
    return {
        one.learner: {"ratio": one.ratio, "threshold": threshold, "reached": one.ratio >= threshold}
        for one in results
        if one.devices == JUDGED
    }


# ---- telling ---------------------------------------------------------------------------------------------------------


def markdown(described: dict[str, Any], results: Sequence[Scaling], verdicts: Verdicts) -> str:
    """The page: rates, the parts of a tick, and the verdicts."""
    lines = [
        "# Scaling",
        "",
        f"{described['processor']}, {described['device']}, torch {described['torch']}; {described['cores_per_rank']} "
        f"CPUs per rank; {described['env_steps_per_rank']} environment steps per rank, "
        f"{described['repeats']} repeats; medians.",
        "",
        "| learner | N | env steps/s | updates/s | job throughput | ratio | efficiency | return | peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.learner} | {one.devices} | {one.env_steps_per_sec:.0f} | {one.updates_per_sec:.1f} "
        f"| {one.throughput:.0f} | {one.ratio:.2f} | {one.efficiency:.2f} | {_or_none(one.final_return, 1)} "
        f"| {_or_none(one.peak_bytes and one.peak_bytes / 1e6, 0)} MB |"
        for one in results
    ]
    phases = list(results[0].phase_ms[0])
    lines += [
        "",
        "Milliseconds of a tick, by rank:",
        "",
        f"| learner | N | rank | {' | '.join(phases)} |",
        f"| --- | --- | --- |{' --- |' * len(phases)}",
    ]
    lines += [
        f"| {one.learner} | {one.devices} | {rank} | {' | '.join(f'{own[phase]:.2f}' for phase in phases)} |"
        for one in results
        for rank, own in enumerate(one.phase_ms)
    ]
    return "\n".join([*lines, "", *verdict_lines(verdicts)]) + "\n"


def verdict_lines(verdicts: Verdicts) -> list[str]:
    """One line for each learner."""
    if not verdicts:
        return [f"No verdict: N = {JUDGED} was not measured."]
    return [
        f"- {learner}: N = {JUDGED} is {own['ratio']:.2f} times as fast as N = 1, which "
        f"{'reaches' if own['reached'] else 'misses'} {own['threshold']}"
        for learner, own in verdicts.items()
    ]


def _or_none(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def draw(results: Sequence[Scaling], threshold: float, file: Path) -> None:
    """The ratios over devices, beside what would be perfect."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    devices = sorted({one.devices for one in results})
    axes.plot(devices, devices, "k:", label="perfect")
    axes.plot(JUDGED, threshold, "k_", markersize=16, label="threshold")
    for learner in dict.fromkeys(one.learner for one in results):
        own = [one for one in results if one.learner == learner]
        axes.plot([one.devices for one in own], [one.ratio for one in own], "o-", label=learner)
        for one in own:
            axes.vlines(one.devices, min(one.ratios), max(one.ratios), alpha=0.4)
    axes.set(xlabel="devices", ylabel="environment steps per second, one device = 1", xticks=devices)
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def write(settings: argparse.Namespace, described: dict[str, Any], runs: Sequence[RunFigures]) -> Verdicts:
    """Prints the page and writes it as Markdown, JSON and a picture."""
    results = aggregate(runs)
    verdicts = judge(results, settings.threshold)
    page = markdown(described, results, verdicts)
    print(page)
    numbers = {**described, "results": [asdict(one) for one in results], "verdicts": verdicts}
    settings.json.write_text(json.dumps({**numbers, "runs": [asdict(one) for one in runs]}, indent=2) + "\n")
    settings.markdown.write_text(page)
    draw(results, settings.threshold, settings.png)
    return verdicts


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults that depend on the machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--learners", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], help="default: cuda where there are two such devices")
    parser.add_argument("--devices", nargs="+", type=int, help="default: 1 and 2, and on cuda 4, 8, ... that there are")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--env_steps", type=int, default=300_000, help="of each rank")
    parser.add_argument("--threshold", type=float, default=1.7, help="ratio that two devices must reach")
    parser.add_argument("--deadline_s", type=float, default=600.0, help="seconds a run may take")
    parser.add_argument("--output", type=Path, help="folder of runs and results; default: one in runs/")
    for kind, suffix in [("json", "json"), ("markdown", "md"), ("png", "png")]:
        parser.add_argument(f"--{kind}", type=Path, help=f"default: scaling.{suffix} in the output folder")
    parser.add_argument("--fit", nargs=argparse.REMAINDER, default=[], help="what follows goes to every fit")
    settings = parser.parse_args(argv)
    there = torch.cuda.device_count()
    settings.accelerator = settings.accelerator or ("cuda" if there >= JUDGED else "cpu")
    more = [2**power for power in range(2, there.bit_length()) if settings.accelerator == "cuda"]
    settings.devices = sorted({1, *(settings.devices or [2, *more])})
    if settings.devices[0] < 1 or settings.repeats < 1:
        parser.error(f"--devices {settings.devices} --repeats {settings.repeats}; allowed: 1 or more")
    output = (settings.output or Path("runs") / f"scaling-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    output.mkdir(parents=True, exist_ok=True)
    settings.output = output
    settings.json = settings.json or output / "scaling.json"
    settings.markdown = settings.markdown or output / "scaling.md"
    settings.png = settings.png or output / "scaling.png"
    return settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; the exit status."""
    settings = parse(argv)
    runs = []
    try:
        blocks = cores_for(max(settings.devices))
        described: dict[str, Any] = {
            **machine(),
            "accelerator": settings.accelerator,
            "cores_per_rank": len(blocks[0]),
            "env_steps_per_rank": settings.env_steps,
            "repeats": settings.repeats,
        }
        for repeat, learner, devices in order(settings.learners, settings.devices, settings.repeats):
            one = run(settings, repeat, learner, devices)
            print(f"{learner}, N = {devices}, repeat {repeat}: {one.env_steps_per_sec:.0f} env steps/s", flush=True)
            runs.append(one)
    except Unmeasured as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    verdicts = write(settings, described, runs)
    return 0 if all(own["reached"] for own in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
