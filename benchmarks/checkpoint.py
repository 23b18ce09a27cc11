"""What do saving and loading a checkpoint cost, beside `torch.save` and `torch.load` of the same tensors?

    python benchmarks/checkpoint.py [--json PATH] [--ticks N] [--folder FOLDER] [--quick]

FastSAC on the Go2 (configs/sac.yaml) after some ticks, one rank, with its replay. Ours holds besides the state of the
environments and of all generators and checksums of all files, and is forced to the disk before it counts; a load checks
them. The reference is one file of the learner's and the replay's tensors, forced to the disk too. `bytes alone` writes
or reads as many bytes as the checkpoint has. Before each save lies a tick of the run, which counts too.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
from shared.rank import rank
from shared.timing import in_turn, machine, table

from unilab_fabric.loop.checkpoints import Progress
from unilab_fabric.offpolicy.runner import OffPolicyRunner

REFERENCE, OURS, BYTES = "torch.save / torch.load", "ours", "bytes alone"


def tensors_of(runner: OffPolicyRunner) -> dict[str, torch.Tensor]:
    """The learner's and the replay's."""
    replay = {f"replay/{name}": tensor for name, tensor in runner._replay.state().items()}
    return {**runner._replicated, **replay}


def to_disk(file: Path) -> None:
    """Forces a file to the disk."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def measure(ticks: int, folder: Path, repeats: int, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Prints and returns a table for saving and one for loading."""
    with rank(1) as runner:
        for _ in range(ticks):
            runner.advance()
        path = runner._checkpoints.save(Progress(tick=runner.tick, env_steps=runner.env_steps, train_s=0.0))
        payload = os.urandom(sum(file.stat().st_size for file in path.iterdir()))
        plain, raw = folder / "plain.pt", folder / "raw"

        def ours() -> None:
            runner.advance()
            runner._checkpoints.save(Progress(tick=runner.tick, env_steps=runner.env_steps, train_s=0.0))

        def torch_save() -> None:
            runner.advance()
            torch.save(tensors_of(runner), plain)
            to_disk(plain)

        def bytes_alone() -> None:
            runner.advance()
            raw.write_bytes(payload)
            to_disk(raw)

        saving = in_turn({REFERENCE: torch_save, OURS: ours, BYTES: bytes_alone}, repeats, seconds)
        tensors = {name: tensor.clone() for name, tensor in tensors_of(runner).items()}
        torch.save(tensors, plain)
        size = sum(tensor.nbytes for tensor in tensors.values())
        print(f"{size / 1e6:.0f} MB of tensors, {len(payload) / 1e6:.0f} MB of files")
        runner.advance()
        newest = runner._checkpoints.save(Progress(tick=runner.tick, env_steps=runner.env_steps, train_s=0.0))
        loading = in_turn(
            {
                REFERENCE: lambda: _load(plain, tensors),
                OURS: lambda: _resume(runner, newest),
                BYTES: lambda: _read(raw),
            },
            repeats,
            seconds,
        )
        return {
            "bytes": {"tensors": {"bytes": size}, "files": {"bytes": len(payload)}},
            "save": table("saving", saving, REFERENCE),
            "load": table("loading", loading, REFERENCE),
        }


def _load(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in torch.load(file, weights_only=True).items():
        tensors[name].copy_(tensor)


def _resume(runner: OffPolicyRunner, path: Path) -> None:
    runner.resume(path)


def _read(file: Path) -> None:
    file.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--ticks", type=int, default=500, help="ticks of 256 environments in the replay")
    parser.add_argument("--folder", type=Path, help="where the references write; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="few ticks, one repeat: shows that it runs, not how fast")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    described = machine()
    print(f"{described['processor']}, torch {described['torch']}")
    ticks, repeats, seconds = (10, 1, 0.0) if arguments.quick else (arguments.ticks, 5, 0.5)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        numbers = measure(ticks, Path(folder), repeats, seconds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, "ticks": ticks, **numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
