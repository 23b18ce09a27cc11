"""The report as text, and as plain values for a JSON file."""

from collections.abc import Sequence
from typing import Any

from unilab_fabric.reporting.limits import Estimate, estimates, find_limit, share, two_digits
from unilab_fabric.reporting.runs import FinishedRun


def report_text(runs: Sequence[FinishedRun]) -> str:
    """All runs one by one, then side by side."""
    parts = [run_text(run) for run in runs]
    if len(runs) > 1:
        parts.append(comparison_text(runs))
    return "\n\n".join(parts)


def run_text(run: FinishedRun) -> str:
    """One run: what it was, where a tick goes, what limits, what would help."""
    note = f" ({run.note})" if run.note else ""
    lines = [f"{run.name}: {run.status}{note}", *(f"  {line}" for line in _header(run)), "", *_times(run), ""]
    lines.append(f"limit: {find_limit(run).text.removesuffix('.')}.")
    lines += ["what would help (estimates from these times):", *(_estimate_line(run, one) for one in estimates(run))]
    return "\n".join(lines)


def _header(run: FinishedRun) -> list[str]:
    ranks = f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"
    machines = f" on {run.num_nodes} machines" if run.num_nodes > 1 else ""
    rate = f"{run.rate:,.0f} env steps/s, the mean of the second half of its reports"
    if not run.curves.values:
        rate = f"{run.rate:,.0f} env steps/s, the mean of the whole run: its logger left no curves here"
    wall = "" if run.wall_s is None else f" in {run.wall_s:.0f} s"
    first = "" if run.first_tick_s is None else f", the first tick after {run.first_tick_s:.1f} s"
    final = "no episode has ended" if run.final_return is None else f"final return {run.final_return:.4g}"
    return [
        f"{run.learner} on {run.task}, {ranks}{machines}, {'CUDA' if run.on_cuda else 'CPU'}",
        f"{run.env_steps:,} env steps{wall}{first}; {final}",
        rate,
    ]


def _times(run: FinishedRun) -> list[str]:
    """A table: one row for each rank, milliseconds and shares of a tick."""
    collector, learner = list(run.ranks[0].collector_s), list(run.ranks[0].learner_s)
    if run.world_size == 1 and "all_reduce" in learner:
        learner.remove("all_reduce")
    rows = [["ms per tick", "tick", *collector, "|", *learner]]
    for rank in run.ranks:
        cells = [f"{rank.name}{', ' * bool(rank.place)}{rank.place}", f"{1e3 * rank.tick_s:.2f}"]
        cells += [_cell(rank.collector_s[phase], rank.tick_s) for phase in collector]
        cells += ["|", *(_cell(rank.learner_s[phase], rank.tick_s) for phase in learner)]
        rows.append(cells)
    return aligned(rows)


def _cell(seconds: float, tick_s: float) -> str:
    return f"{1e3 * seconds:.2f} {share(seconds, tick_s):>4}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of one width, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _estimate_line(run: FinishedRun, one: Estimate) -> str:
    rate = two_digits(one.gain * run.rate)
    return f"  {one.change}: x {one.gain:.2f} = {rate} env steps/s\n    if {one.assumption}"


# ---- several runs -------------------------------------------------------------------------------------------------


def compare(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """One row for each run; ratios are to the first one."""
    first = runs[0]
    rows = []
    for run in runs:
        ratio = run.rate / first.rate
        rows.append(
            {
                "run": run.name,
                "ranks": run.world_size,
                "cores": run.cores,
                "env_steps_per_sec": run.rate,
                "updates_per_sec": run.updates_per_s,
                "ratio": ratio,
                "efficiency": ratio * first.world_size / run.world_size,
                "final_return": run.final_return,
                "first_tick_s": run.first_tick_s,
                "limit": find_limit(run).name,
            }
        )
    return rows


def comparison_text(runs: Sequence[FinishedRun]) -> str:
    """The runs side by side, and the settings in which they differ."""
    rows = [
        ["run", "ranks", "cores", "env steps/s", "updates/s", "ratio", "efficiency", "return", "first tick", "limit"]
    ]
    for row in compare(runs):
        rows.append(
            [
                row["run"],
                str(row["ranks"]),
                str(row["cores"] or "-"),
                f"{row['env_steps_per_sec']:,.0f}",
                f"{row['updates_per_sec']:,.0f}",
                f"{row['ratio']:.2f}",
                f"{row['efficiency']:.2f}",
                "-" if row["final_return"] is None else f"{row['final_return']:.4g}",
                "-" if row["first_tick_s"] is None else f"{row['first_tick_s']:.1f} s",
                row["limit"],
            ]
        )
    text = ["side by side (ratio: to the first run; efficiency: ratio over that of the ranks)", *aligned(rows)]
    if len({run.world_size for run in runs}) > 1 and len({run.cores for run in runs}) == 1 and runs[0].cores:
        text.append(f"All had the same {runs[0].cores} cores: more ranks only divided them.")
    different = differences(runs)
    text += ["", "settings that differ:" if different else "no setting differs."]
    if different:
        table = [["", *(run.name for run in runs)]]
        table += [[name, *map(_shown, values)] for name, values in different.items()]
        text += aligned(table)
    versions = {
        name: [run.versions.get(name) for run in runs]
        for name in sorted({name for run in runs for name in run.versions})
    }
    other = {name: values for name, values in versions.items() if len(set(values)) > 1}
    text += [f"{name}: {', '.join(str(value) for value in values)}" for name, values in other.items()]
    return "\n".join(text)


def differences(runs: Sequence[FinishedRun]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, by name: one value for each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name != "training.run_name")
    values = {name: [run.settings.get(name, "(absent)") for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


# ---- plain values -------------------------------------------------------------------------------------------------


def plain(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Everything that the text says, for programs; times in seconds [s] of a tick."""
    return {
        "runs": [_plain_run(run) for run in runs],
        "comparison": compare(runs),
        "differences": differences(runs),
    }


def _plain_run(run: FinishedRun) -> dict[str, Any]:
    limit = find_limit(run)
    return {
        "run": run.name,
        "status": run.status,
        "note": run.note,
        "learner": run.learner,
        "task": run.task,
        "ranks": run.world_size,
        "machines": run.num_nodes,
        "accelerator": "cuda" if run.on_cuda else "cpu",
        "env_steps": run.env_steps,
        "wall_s": run.wall_s,
        "first_tick_s": run.first_tick_s,
        "env_steps_per_sec": run.rate,
        "updates_per_sec": run.updates_per_s,
        "final_return": run.final_return,
        "ticks": [
            {"name": rank.name, "place": rank.place, "tick_s": rank.tick_s, **rank.collector_s, **rank.learner_s}
            for rank in run.ranks
        ],
        "limit": {"name": limit.name, "rank": limit.rank or None, "text": limit.text},
        "estimates": [
            {
                "change": one.change,
                "gain": one.gain,
                "env_steps_per_sec": one.gain * run.rate,
                "updates_per_sec": one.updates_gain * run.updates_per_s,
                "assumption": one.assumption,
            }
            for one in estimates(run)
        ],
    }
