"""The command on finished runs: report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unilab_fabric.commands.options import command_options
from unilab_fabric.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What `report` takes, beside the folders of runs."""

    png: str | None = None
    """Picture to write: return over seconds and steps, and where a tick goes on each rank. Needs matplotlib."""
    json: str | None = None
    """File for the figures, in seconds [s] and as JSON."""


def report(tokens: Sequence[str]) -> int:
    """Say where the time of finished runs went, and what limits them: report RUN..., a RUN being a folder or last."""
    names, flags = _positional(tokens or ["--help"])
    options = command_options("report", ReportOptions, report.__doc__, flags)
    if options is None:
        return 0
    if not names:
        raise UserError("run", "missing", "allowed: folders of runs, or last: report RUN...")
    for field, file in (("png", options.png), ("json", options.json)):
        if file is not None and not Path(file).resolve().parent.is_dir():
            raise UserError(field, file, "its folder does not exist")
    from unilab_fabric.reporting.runs import find_runs, read_runs
    from unilab_fabric.reporting.text import plain, report_text

    if options.png is not None:
        from unilab_fabric.reporting.picture import require_matplotlib

        require_matplotlib()
    runs = read_runs(find_runs(names))
    print(report_text(runs))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(plain(runs), indent=2) + "\n")
    if options.png is not None:
        from unilab_fabric.reporting.picture import draw

        draw(runs, Path(options.png))
        print(f"\n{options.png}: written")
    return 0


def _positional(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands alone, and the flags, each with its value."""
    names: list[str] = []
    flags: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            names.append(token)
            continue
        flags.append(token)
        if "=" not in token and token != "--help" and rest and not rest[0].startswith("--"):
            flags.append(rest.pop(0))
    return names, flags
