"""RSL-RL's own files (model_*.pt): read to start a run from, written so that RSL-RL's tools can go on from ours."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unilab_fabric.checkpoints import read_manifest, restore, verify
from unilab_fabric.config import RunConfig
from unilab_fabric.errors import UserError
from unilab_fabric.learners.ppo.learner import PPOLearner
from unilab_fabric.policies import trained_learner

SETTING = "learner.start_from"
_MODELS = {"actor": "actor_state_dict", "critic": "critic_state_dict"}
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def read_model(path: Path, learner: PPOLearner) -> None:
    """Puts a file's weights, optimiser, normaliser and learning rate into `learner`; runs no code of the file.

    Raises UserError where it cannot be read or does not fit the networks.
    """
    saved = _load(path)
    state: dict[str, Tensor] = {}
    names = [
        f"{group}/{name}"
        for group, model in (("actor", learner.algorithm.actor), ("critic", learner.algorithm.critic))
        for name, _ in model.named_parameters()
    ]
    try:
        for group, key in _MODELS.items():
            state |= {f"{group}/{name}": tensor for name, tensor in saved[key].items()}
        adam = saved["optimizer_state_dict"]
        for name, index in zip(names, adam["param_groups"][0]["params"], strict=True):
            moments = adam["state"][index] if adam["state"] else {}
            for moment in _MOMENTS:
                fresh = torch.zeros_like(learner.replicated[f"{name}/{moment}"])
                state[f"{name}/{moment}"] = torch.as_tensor(moments.get(moment, fresh), dtype=torch.float32)
        state["learning_rate"] = torch.tensor(float(adam["param_groups"][0]["lr"]), dtype=torch.float64)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UserError(SETTING, path, f"it is not as RSL-RL 5 writes it ({error}); allowed: model_*.pt") from None
    own = {name: tensor for name, tensor in learner.replicated.items() if not name.startswith("skipped_updates")}
    restore(own, state, path)


def write_model(path: Path, learner: PPOLearner, iteration: int) -> None:
    """Writes what RSL-RL's runner would have: both state dicts, the optimiser's, the iteration."""
    saved: dict[str, Any] = learner.algorithm.save()
    for group in saved["optimizer_state_dict"]["param_groups"]:
        group["lr"] = float(learner.replicated["learning_rate"])
        group["fused"] = None  # whoever loads it decides for himself
    torch.save({**saved, "iter": iteration, "infos": None}, path)


def write_checkpoint(ckpt_path: Path, config: RunConfig, output: Path) -> int:
    """Writes a checkpoint of a run with this configuration to `output`; returns its iteration."""
    from unilab_fabric.launch.preflight import task_spec

    manifest = read_manifest(ckpt_path)
    verify(ckpt_path)
    learner = trained_learner(ckpt_path, config, task_spec(config))
    assert isinstance(learner, PPOLearner)
    iteration: int = manifest["tick"] // learner.config.num_steps_per_env
    write_model(output, learner, iteration)
    return iteration


def _load(path: Path) -> Mapping[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(SETTING, path, f"it cannot be read: {error.strerror}") from None
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(SETTING, path, f"it cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(saved, dict):
        raise UserError(SETTING, path, "it holds no mapping; allowed: a model_*.pt of RSL-RL 5")
    return saved
