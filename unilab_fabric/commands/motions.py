"""The command on reference motions: motion convert, check, info."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unilab_fabric.commands.options import command_options
from unilab_fabric.errors import UserError, nearest


@dataclass(frozen=True, kw_only=True)
class MotionOptions:
    """What `motion` takes, behind convert, check or info."""

    input: str
    """convert: a retargeted CSV file. check and info: a motion in npz."""
    output: str | None = None
    """convert: the npz file to write."""
    input_fps: float = 30.0
    """convert: frames a second of the CSV file."""
    output_fps: float = 50.0
    """convert: frames a second of the motion; tasks read one in each control step, so 50."""
    robot: Literal["g1"] = "g1"
    """The robot."""
    mjcf: str | None = None
    """MJCF file in place of the shipped robot, with the same names."""


def motion(tokens: Sequence[str]) -> int:
    """Convert, check or describe a reference motion: motion convert, motion check, motion info."""
    action = tokens[0] if tokens else "--help"
    if action in ("convert", "check", "info"):
        tokens = tokens[1:]
    elif action != "--help":
        raise UserError("motion", action, nearest(action, ["convert", "check", "info"]))
    options = command_options("motion", MotionOptions, motion.__doc__, tokens or ["--help"])
    if options is None:
        return 0
    if action == "convert" and options.output is None:
        raise UserError("output", "missing", "allowed: the npz file to write")
    from unilab_fabric.envs import motions
    from unilab_fabric.envs.robots import g1

    motions.check_rates(("input_fps", "output_fps"), (options.input_fps, options.output_fps))
    model, source = g1.load("faithful", options.mjcf), Path(options.input)
    if action == "convert":
        poses = motions.read_csv(source, model, options.input_fps)
        found = motions.complete(motions.resample(poses, options.output_fps), model)
    else:
        found = motions.load_motion(source, model, "input")
    print(motions.summary(found))
    wrong = [] if action == "info" else motions.problems(found, model)
    for line in wrong:
        print(f"error: {source}: {line}", file=sys.stderr)
    if action == "convert" and options.output is not None:
        motions.save_motion(found, Path(options.output))
        print(f"{options.output}: written" + (", with the problems above" if wrong else ""))
    return 2 if wrong else 0
