"""A trained learner, and with it its policy, from a checkpoint; on the CPU, without a run."""

from pathlib import Path

import torch

from unilab_fabric.checkpoints import REPLICATED, check_layouts, read_state, restore
from unilab_fabric.config import RunConfig, build_learner_config
from unilab_fabric.learners.learner import Replicated
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec


def trained_learner(ckpt_path: Path, config: RunConfig, spec: TaskSpec) -> Replicated:
    """The learner of a checkpoint, whose run had this configuration, for a task of these sizes.

    Raises UserError where the checkpoint cannot be read or does not fit.
    """
    learner = build_learner_config(config.learner).build(
        spec, device=torch.device("cpu"), precision="32-true", ranks=Ranks(), seed=config.seed, total_updates=1
    )
    saved = read_state(ckpt_path, REPLICATED, ("learner", "layouts"))
    check_layouts(learner.layouts, saved["layouts"], ckpt_path)
    restore(learner.replicated, saved["learner"], ckpt_path / REPLICATED)
    return learner
