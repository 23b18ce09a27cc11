"""Two reference motions of our own for the G1; `make.py` makes them."""

from pathlib import Path

from unilab_fabric.errors import UserError, nearest

CLIPS = ("squat_and_step", "wave_and_turn")


def clip_path(name_or_path: str) -> Path:
    """The file of a shipped clip by its name, or of a path. Raises UserError where there is neither."""
    if name_or_path in CLIPS:
        return Path(__file__).with_name(f"{name_or_path}.npz")
    if Path(name_or_path).is_file():
        return Path(name_or_path)
    raise UserError("task.motion", name_or_path, f"there is no such file; {nearest(name_or_path, CLIPS)}")
