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


def write_finished_run(folder, config, ticks_ms, *, rates=(1000.0, 2000.0, 4000.0, 4000.0), **changes):
    """A run of 4,000 environment steps that came to its end: settings, summary, and a report every 1,000 steps.

    `ticks_ms`: for each rank the length of a tick and the milliseconds of each phase in it; `rates`: environment steps
    a second in each report, whose returns are 10, 20, ...; `changes` go over the summary.
    """
    ranks = len(ticks_ms)
    num_envs = config.task.init_args["num_envs"]
    ticks = 4000 / (num_envs * ranks)
    folder.mkdir(parents=True)
    save_run_config(config, folder / "config.yaml")
    summary = {
        "status": "completed",
        "reason": "",
        "env_steps": 4000,
        "env_steps_per_sec": sum(num_envs / tick["tick"] * 1e3 for tick in ticks_ms),
        "ticks": ticks,
        "mean_reward": 10.0 * len(rates),
        "first_tick_s": 1.5,
        "wall_s": 30.0,
        "ranks": [
            {
                "rank": rank,
                "env_steps": 4000 // ranks,
                "env_steps_per_sec": num_envs / tick["tick"] * 1e3,
                "updates": ticks,
                "seconds": {phase: ms / 1e3 * ticks for phase, ms in tick.items() if phase != "tick"},
            }
            for rank, tick in enumerate(ticks_ms)
        ],
        "world_size": ranks,
        "topology": {
            "accelerator": "cpu",
            "devices": list(range(ranks)),
            "num_nodes": 1,
            "cpus": [[2 * rank, 2 * rank + 1] for rank in range(ranks)],
        },
        "versions": {"python": "3.11.7", "unilab-fabric": "0.1.0"},
    } | changes
    (folder / "run_summary.json").write_text(json.dumps(summary))
    write_reports(folder, num_envs, ticks_ms[0], rates)


def write_reports(folder, num_envs, tick_ms, rates):
    """TensorBoard's file of a run."""
    from lightning.fabric.loggers.tensorboard import TensorBoardLogger

    logger = TensorBoardLogger(root_dir=folder, name="", version="")
    for i, rate in enumerate(rates):
        times = {f"Perf/{phase}_ms": ms for phase, ms in tick_ms.items() if phase != "tick"}
        perf = {"Perf/env_steps_per_sec": rate, "Perf/updates_per_sec": rate / num_envs}
        logger.log_metrics({"Train/mean_reward": 10.0 * (i + 1)} | perf | times, step=1000 * (i + 1))
    logger.finalize("success")
