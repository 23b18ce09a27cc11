"""A policy that leaves the trainer: ONNX and TorchScript with the normaliser inside, and a contract for who runs it."""

import contextlib
import hashlib
import io
import json
import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from unilab_fabric import __version__
from unilab_fabric.checkpoints import REPLICATED, read_manifest, saved_config, verify
from unilab_fabric.config import resolve_run
from unilab_fabric.envs.registry import make_task
from unilab_fabric.errors import UserError
from unilab_fabric.policies import trained_learner

FORMAT = 1
"""Of the contract."""
ONNX, TORCHSCRIPT, CONTRACT = "policy.onnx", "policy.pt", "policy.json"
INPUT, OUTPUT = "observation", "action"


def export(ckpt_path: Path, output: Path) -> dict[str, Any]:
    """Writes `policy.onnx`, `policy.pt` and `policy.json` into the folder `output`; returns the contract.

    Both policies take float32 (n, actor observation), any n, and give (n, actions). Raises UserError for a checkpoint
    that cannot be read, a task that has no contract, and where the packages of the `export` extra are missing.
    """
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise UserError("export", package, "it is not installed; allowed: pip install 'unilab-fabric[export]'")
    manifest = read_manifest(ckpt_path)
    verify(ckpt_path)
    config = resolve_run(saved_config(ckpt_path))
    task = make_task(config.task.class_path, {**config.task.init_args, "num_envs": 1}, seed=config.seed, num_threads=1)
    spec = task.task_spec()
    contract = {
        "format": FORMAT,
        "exporter": f"unilab_fabric {__version__}",
        "checkpoint": {
            "sha256": hashlib.sha256((ckpt_path / REPLICATED).read_bytes()).hexdigest(),
            "tick": manifest["tick"],
            "env_steps": manifest["env_steps"],
        },
        "learner": config.learner.class_path,
        "policy": {
            "onnx": ONNX,
            "torchscript": TORCHSCRIPT,
            "input": {"name": INPUT, "shape": ["n", spec.actor_size], "dtype": "float32"},
            "output": {"name": OUTPUT, "shape": ["n", spec.action_size], "dtype": "float32"},
        },
        **task.contract(),
    }
    policy = trained_learner(ckpt_path, config, spec).policy().eval()
    output.mkdir(parents=True, exist_ok=True)
    _write_onnx(policy, spec.actor_size, output / ONNX)
    _write_torchscript(policy, spec.actor_size, output / TORCHSCRIPT)
    (output / CONTRACT).write_text(json.dumps(contract, indent=2) + "\n")
    return contract


def _write_onnx(policy: torch.nn.Module, size: int, path: Path) -> None:
    rows = torch.export.Dim("n")
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                policy,
                (torch.zeros(2, size),),
                str(path),
                input_names=[INPUT],
                output_names=[OUTPUT],
                dynamic_shapes=({0: rows},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        quiet.setLevel(level)


def _write_torchscript(policy: torch.nn.Module, size: int, path: Path) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch calls TorchScript old; robots' programs are older
        traced = torch.jit.trace(policy, torch.zeros(2, size))  # type: ignore[no-untyped-call]
    traced.save(str(path))
