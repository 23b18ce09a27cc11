"""How a checkpoint is written, found and read.

A checkpoint is a folder `tick-<number>` in the run's `checkpoints/`: `manifest.json`, `replicated.pt` (the replicated
state, once), and for each rank `rank-<r>.pt` (generators, replay, counters) and `rank-<r>-envs.npz`. It is written
beside its final name, flushed, then renamed, so a folder with that name is whole. The manifest holds the size and the
CRC-32 of every file as its writer knew them, so that later damage shows. Tensors are read with `weights_only=True` and
arrays without pickle: no file can run code.
"""

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unilab_fabric.config import SECTIONS
from unilab_fabric.errors import UserError
from unilab_fabric.evaluations import best_evaluation

if TYPE_CHECKING:  # the command line looks for checkpoints before torch is loaded
    from torch import Tensor

FORMAT = 2
MANIFEST = "manifest.json"
REPLICATED = "replicated.pt"
_TEMPORARY = ".partial"
_WORDS = ("last", "best")
_CHUNK = 1 << 24

Layouts = Mapping[str, Sequence[Sequence[Any]]]
"""By flat tensor, each parameter in it: name, shape, offset in elements."""

Fingerprint = tuple[int, int]
"""Bytes of a file, and their CRC-32."""

_NUMBERS: Mapping[str, tuple[tuple[type, ...], float]] = {
    "tick": ((int,), 0),
    "env_steps": ((int,), 0),
    "updates": ((int,), 0),
    "world_size": ((int,), 1),
    "num_envs": ((int,), 1),
    "replay_ticks": ((int,), 0),
    "seed": ((int,), 0),
    "train_s": ((int, float), 0),
    "score": ((int, float, type(None)), -math.inf),
}
"""What every manifest says of its run: of which type, and at least what."""


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; those before it are as they were."""


def checkpoint_name(tick: int) -> str:
    """Folder name of the checkpoint of `tick`; names sort by tick."""
    return f"tick-{tick:09d}"


def rank_file(rank: int) -> str:
    """File of a rank's own state."""
    return f"rank-{rank}.pt"


def envs_file(rank: int) -> str:
    """File of a rank's environments."""
    return f"rank-{rank}-envs.npz"


def tick_of(path: Path) -> int:
    """The tick in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("tick-"))


def whole_checkpoints(run_folder: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, the oldest first; later damage is for `verify` to find."""
    folders = [path for path in (run_folder / "checkpoints").glob("tick-*") if _is_checkpoint_name(path.name)]
    return sorted((path for path in folders if path.is_dir()), key=tick_of)


def _is_checkpoint_name(name: str) -> bool:
    """Whether we have given a folder this name, and not a user who keeps a copy beside ours."""
    return re.fullmatch(r"tick-\d{9,}", name) is not None


def newest_run(log_root: Path) -> Path | None:
    """The run folder under `log_root` whose newest checkpoint was written last."""
    newest = [runs[-1] for path in log_root.glob("*") if (runs := whole_checkpoints(path))]
    return max(newest, key=lambda path: path.stat().st_mtime).parent.parent if newest else None


def find_checkpoint(ckpt_path: str, *, log_root: Path, run_name: str | None) -> Path:
    """The checkpoint that `ckpt_path` means: a checkpoint's folder, a run's folder (its newest), `last` or `best`.

    `last` is the newest whole checkpoint of the run `run_name`, or of the newest run under `log_root`; `best` is that
    run's best one. Behind a run's folder both mean that run's. Raises UserError where there is none.
    """
    path = Path(ckpt_path)
    if path.name in _WORDS and not path.exists():
        given = len(path.parts) > 1
        run = path.parent if given else log_root / run_name if run_name else newest_run(log_root)
        found = whole_checkpoints(run) if run else []
        if run is None or not found:
            raise UserError("ckpt_path", ckpt_path, f"there is no checkpoint under {run or log_root}")
        return found[-1] if path.name == "last" else best_checkpoint(run)
    if path.suffix == _TEMPORARY:
        raise UserError("ckpt_path", path, f"it was never finished; {_offer(path)}")
    if (path / MANIFEST).is_file() or (path.is_dir() and _is_checkpoint_name(path.name)):
        return path
    found = whole_checkpoints(path)
    if not found:
        raise UserError(
            "ckpt_path", ckpt_path, "allowed: last, best, a checkpoint's folder, or the folder of a run with one"
        )
    return found[-1]


def best_checkpoint(run_folder: Path) -> Path:
    """A run's best checkpoint: by its evaluations, where it has been evaluated, else by `Train/mean_reward`.

    Raises UserError where none is known.
    """
    evaluation = best_evaluation(run_folder)
    newest = whole_checkpoints(run_folder)[-1:]
    name = evaluation["checkpoint"] if evaluation else newest and read_manifest(newest[0]).get("best")
    if not name or not (run_folder / "checkpoints" / name).is_dir():
        raise UserError("ckpt_path", "best", f"no best checkpoint is known of {run_folder}; allowed: last")
    path: Path = run_folder / "checkpoints" / name
    return path


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises UserError, naming the file and the field, where it is damaged or foreign.

    The error offers the newest whole checkpoint of the same run.
    """
    manifest, problem = _look_at_manifest(path)
    if problem:
        raise UserError("ckpt_path", path, f"{problem}; {_offer(path)}")
    return manifest


def verify(path: Path, *names: str) -> None:
    """Reads files of a checkpoint once, all of them where none is named.

    Raises UserError, as `read_manifest` does, for one that is damaged.
    """
    problem = _problem(path, names)
    if problem:
        raise UserError("ckpt_path", path, f"{problem}; {_offer(path)}")


def fingerprint(file: Path) -> Fingerprint:
    """Size and CRC-32 of a file."""
    size, crc = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _look_at_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """The manifest, and what is wrong with it or with the sizes of the files that it lists; "" for nothing."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except OSError as error:
        return {}, f"its {MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return {}, f"its {MANIFEST} cannot be read: {error}"
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        return {}, f"{_field_text('format', found)}; this version reads {FORMAT}"
    wrong = next(_wrong_fields(manifest), None)
    if wrong:
        return {}, _field_text(*wrong)
    for name, (size, _) in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return {}, f"{name} is missing or not {size} bytes long"
    return manifest, ""


def _wrong_fields(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields of a manifest that are not what they have to be, with their values; None where there is nothing.

    Ask for the first only: each check relies on those before it.
    """
    for field, (types, least) in _NUMBERS.items():
        value = manifest.get(field)
        if type(value) not in types or (value is not None and value < least):  # and true is no number
            yield field, value
    for field in ("config", "files"):
        if not isinstance(manifest.get(field), dict):
            yield field, manifest.get(field)
    files, ranks = manifest["files"], range(manifest["world_size"])
    for name in chain([REPLICATED], map(rank_file, ranks)):
        if name not in files:
            yield f"files/{name}", None
    known = {REPLICATED, *map(rank_file, ranks), *map(envs_file, ranks)}
    for name, listed in files.items():
        if name not in known or not _is_fingerprint(listed):
            yield f"files/{name}", listed


def _is_fingerprint(listed: object) -> bool:
    return isinstance(listed, list) and len(listed) == 2 and all(type(number) is int for number in listed)


def _problem(path: Path, names: Collection[str] = ()) -> str:
    """What is wrong with a checkpoint, these of its files read, or all of them; "" for nothing."""
    manifest, problem = _look_at_manifest(path)
    for name, listed in manifest.get("files", {}).items():
        if (not names or name in names) and fingerprint(path / name) != tuple(listed):
            return f"{name} is damaged: its CRC-32 is not the one in {MANIFEST}"
    return problem


def _offer(path: Path) -> str:
    """The newest whole checkpoint beside a damaged one, in words."""
    others = [other for other in whole_checkpoints(path.parent.parent) if other.resolve() != path.resolve()]
    whole = next((other for other in reversed(others) if not _problem(other)), None)
    return f"the newest whole one is {whole}" if whole else "its run has no other whole one"


def envs_to_resume(path: Path, *, rank: int, world_size: int) -> Path | None:
    """The environments' state for a rank, where the checkpoint has one that fits a job of `world_size` ranks."""
    manifest = read_manifest(path)
    fits = manifest["world_size"] == world_size and envs_file(rank) in manifest["files"]
    return path / envs_file(rank) if fits else None


def saved_config(path: Path) -> dict[str, Any]:
    """The configuration that a checkpoint's run had, as plain values.

    Raises UserError, as `read_manifest` does, where it lacks what every run writes.
    """
    config: dict[str, Any] = read_manifest(path)["config"]
    wrong = next(_wrong_settings(config), None)
    if wrong:
        raise UserError("ckpt_path", path, f"{_field_text(*wrong)}; {_offer(path)}")
    return config


def _wrong_settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """As `_wrong_fields`, of the sections that others look into before the whole configuration is checked."""
    for section in ("training", *SECTIONS):
        if not isinstance(config.get(section), dict):
            yield f"config/{section}", config.get(section)
    for section in SECTIONS:
        for name, kind in (("class_path", str), ("init_args", dict)):
            if not isinstance(config[section].get(name), kind):
                yield f"config/{section}/{name}", config[section].get(name)


def _field_text(field: str, value: object) -> str:
    return f"{field} in its {MANIFEST} is {'missing' if value is None else json.dumps(value)}"


class CheckpointWriter:
    """One checkpoint being written: open it on all ranks, write the parts, close it on rank 0."""

    def __init__(self, run_folder: Path, tick: int) -> None:
        self.final = run_folder / "checkpoints" / checkpoint_name(tick)
        self.folder = self.final.with_name(self.final.name + _TEMPORARY)

    def open(self) -> None:
        """Makes the folder, empty; rank 0, before the others write. Raises CheckpointFailed where it cannot be made."""
        with _named_on_failure(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def write(self, name: str, state: Mapping[str, Any]) -> Fingerprint:
        """Writes tensors, numbers and texts (and dicts, lists and tuples of them), flushed to disk.

        Raises TypeError where `weights_only=True` could not read them back, CheckpointFailed where the disk does not
        take them; nothing of the file is left then.
        """
        import torch

        refuse_unsafe(name, state)
        path = self.folder / name
        with _named_on_failure(path):
            with path.open("wb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
            return fingerprint(path)

    def close(self, manifest: Mapping[str, Any], files: Mapping[str, Fingerprint]) -> Path:
        """Writes the manifest and gives the folder its final name; rank 0, after the others have written.

        `files` are those of all ranks, as these have told: on a shared disk rank 0 may not see them as they are yet.
        Raises CheckpointFailed where the disk does not take it.
        """
        text = json.dumps({"format": FORMAT, **manifest, "files": files}, indent=2)
        path = self.folder / MANIFEST
        with _named_on_failure(path):
            with path.open("w") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            _sync(self.folder)
        with _named_on_failure(self.final):
            self._take_final_name()
        return self.final

    def _take_final_name(self) -> None:
        """By renaming alone, so that a kill at any moment leaves no half checkpoint under a final name."""
        replaced = self.final.with_name(f"{self.final.name}.replaced{_TEMPORARY}")
        if self.final.exists():  # the same tick once more, by a run that has continued from an older one
            self.final.rename(replaced)
        self.folder.rename(self.final)
        _sync(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def read_state(path: Path, name: str, fields: Iterable[str] = ()) -> dict[str, Any]:
    """One part of a checkpoint, on the CPU. Raises UserError where it is damaged, could run code, or lacks a field."""
    import torch

    try:
        state: dict[str, Any] = torch.load(path / name, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the damage happens to trigger
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError("ckpt_path", path / name, f"it cannot be read: {reason}") from None
    lacking = [field for field in fields if field not in state] if isinstance(state, dict) else ["fields"]
    if lacking:
        raise UserError("ckpt_path", path / name, f"it holds no {', '.join(lacking)}")
    return state


def check_layouts(own: Layouts, saved: Layouts, path: Path) -> None:
    """Raises UserError, naming the parameter, where flat tensors hold other parameters, or hold them elsewhere.

    Two layouts may have the same size, and a tensor of that size would then be taken for what it is not.
    """
    for group, views in own.items():
        for view, then in zip_longest(views, saved.get(group, ())):
            if view is None or then is None or list(view) != list(then):
                raise UserError(
                    "ckpt_path",
                    path / REPLICATED,
                    f"in {group} there is {_view_text(then)} where this learner has {_view_text(view)}",
                )


def _view_text(view: Sequence[Any] | None) -> str:
    return "nothing" if view is None else f"{view[0]} {tuple(view[1])} at {view[2]}"


def restore(tensors: Mapping[str, "Tensor"], saved: Mapping[str, "Tensor"], path: Path) -> None:
    """Copies saved tensors into live ones, in place. Raises UserError where names, shapes or types differ."""
    if tensors.keys() != saved.keys():
        differing = ", ".join(sorted(tensors.keys() ^ saved.keys()))
        raise UserError("ckpt_path", path, f"it does not fit this learner: {differing} stands on one side only")
    for name, tensor in tensors.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            raise UserError(
                "ckpt_path",
                path,
                f"{name} is {saved[name].dtype} {tuple(saved[name].shape)} there and {tensor.dtype} "
                f"{tuple(tensor.shape)} here",
            )
        tensor.copy_(saved[name])


def prune(run_folder: Path, keep: set[Path]) -> None:
    """Removes every checkpoint of a run that is not in `keep`, and what a killed writer left; no file of the user's."""
    for path in whole_checkpoints(run_folder):
        if path not in keep:  # renamed first, so that a kill in the middle leaves no half checkpoint
            path.rename(path.with_name(path.name + _TEMPORARY))
    sweep(run_folder)


def sweep(run_folder: Path) -> None:
    """Removes what a writer left that was killed or could not go on; call it when nobody writes."""
    for path in (run_folder / "checkpoints").glob(f"tick-*{_TEMPORARY}"):
        shutil.rmtree(path)


def refuse_unsafe(name: str, value: object) -> None:
    """Raises TypeError, naming the place, for anything that `weights_only=True` would not read back."""
    import torch

    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_unsafe(f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            refuse_unsafe(f"{name}[{index}]", inner)
    elif value is not None and not isinstance(value, torch.Tensor | bool | int | float | str):
        raise TypeError(f"{name} is a {type(value).__qualname__}; a checkpoint holds tensors, numbers and texts only")


@contextlib.contextmanager
def _named_on_failure(path: Path) -> Iterator[None]:
    """Makes what the disk refuses within it a CheckpointFailed that names `path`; half a file is removed."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch wraps what the disk says
        with contextlib.suppress(OSError):  # one that cannot be removed either is not the news
            path.unlink()
        raise CheckpointFailed(f"{path} could not be written: {_what_the_disk_says(error, path)}") from error


def _what_the_disk_says(error: BaseException, path: Path) -> str:
    """The reason that the system gave, and the space that is left."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    reason = (cause and cause.strerror) or str(error).partition("\n")[0]
    there = next(folder for folder in path.absolute().parents if folder.exists())
    return f"{reason}; {shutil.disk_usage(there).free / 1e6:.1f} MB are free"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
