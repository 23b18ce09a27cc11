"""The command line: arguments in, exit status out.

Bad input is one line on standard error for each problem, and exit status 2, before anything has started.
"""

import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from unilab_fabric import __version__
from unilab_fabric.commands.motions import motion
from unilab_fabric.commands.options import PROGRAM
from unilab_fabric.commands.policies import evaluate, export, play, rsl_rl
from unilab_fabric.commands.reports import report
from unilab_fabric.commands.runs import doctor, fit
from unilab_fabric.errors import UserError, UserErrors, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 2 for bad input."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    if not tokens or tokens[0] in ("-h", "--help"):
        print(_overview())
        return 0 if tokens else 2
    if tokens[0] == "--version":
        print(__version__)
        return 0
    try:
        if tokens[0] not in COMMANDS:
            raise UserError("command", tokens[0], nearest(tokens[0], COMMANDS))
        return COMMANDS[tokens[0]](["--help" if token == "-h" else token for token in tokens[1:]])
    except UserError as problem:
        return _refuse([problem])
    except UserErrors as several:
        return _refuse(several.problems)
    except KeyboardInterrupt:  # before a run has begun there is nothing to end in good order
        return 128 + signal.SIGINT


def tasks(tokens: Sequence[str]) -> int:
    """List the tasks, one line each."""
    if [token for token in tokens if token != "--help"]:
        raise UserError("argument", tokens[0], "tasks takes none")
    from unilab_fabric.envs.registry import describe_tasks

    lines = describe_tasks()
    width = max(len(name) for name, _ in lines)
    for name, line in lines:
        print(f"{name:<{width}}  {line}")
    print(f"{'gymnasium:ID':<{width}}  Any environment registered with Gymnasium, Box observations and actions.")
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "fit": fit,
    "evaluate": evaluate,
    "report": report,
    "tasks": tasks,
    "doctor": doctor,
    "play": play,
    "export": export,
    "motion": motion,
    "rsl_rl": rsl_rl,
}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {inspect.getdoc(command)}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {PROGRAM} COMMAND ...", "", *lines, "", f"{PROGRAM} COMMAND --help tells more."])


def _refuse(problems: Iterable[UserError]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2
