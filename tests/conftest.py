"""Tests start jobs of their own, wherever they run: what a cluster or a shell says about ranks is not for them."""

import os

_PREFIXES = ("LT_", "SLURM_", "OMPI_", "TORCHELASTIC_", "MASTER_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")

for _name in list(os.environ):
    if _name.startswith(_PREFIXES) or _name in _RANKS:
        del os.environ[_name]

if not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is loaded
