"""Checkpoints whose files hold nothing: enough for everything that happens before a run starts."""

import json

from unilab_fabric.checkpoints import fingerprint, rank_file
from unilab_fabric.config import resolve_run, save_run_config, to_plain


def cartpole_run(**tree):
    """A resolved run of 64 cart-poles."""
    return resolve_run({"task": {"class_path": "CartpoleSwingup", "init_args": {"num_envs": 64}}, **tree})


def write_checkpoint(run_folder, config, *, env_steps=480, world_size=1):
    """A checkpoint of tick 30 in a run's folder; its path."""
    path = run_folder / "checkpoints" / "tick-000000030"
    path.mkdir(parents=True)
    counters = {
        "tick": 30,
        "env_steps": env_steps,
        "updates": 20,
        "world_size": world_size,
        "num_envs": config.task.init_args["num_envs"],
        "replay_ticks": 0,
        "seed": config.seed,
    }
    files = {}
    for name in ("replicated.pt", *map(rank_file, range(world_size))):
        (path / name).write_bytes(b"nothing")
        files[name] = fingerprint(path / name)
    manifest = {"format": 2, **counters, "train_s": 1.5, "score": None, "files": files}
    (path / "manifest.json").write_text(json.dumps(manifest | {"config": to_plain(config)}))
    save_run_config(config, run_folder / "config.yaml")
    return path
