"""Draws how a Go2 policy got better: evaluates every checkpoint of some runs, against seconds of training.

    for seed in 1 2 3; do
        python -m unilab_fabric fit --config sac.yaml --seed $seed --training.run_name seed-$seed \
            --checkpoint.every 600 --checkpoint.keep_last 100 --checkpoint.replay false
    done
    python docs/learning_curve.py runs/seed-1 runs/seed-2 runs/seed-3 --out docs/go2_sac.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from unilab_fabric.checkpoints import read_manifest, whole_checkpoints
from unilab_fabric.evaluation import evaluate

PANELS = [("planar_error", "planar velocity error [m/s]", 0.2), ("yaw_error", "yaw rate error [rad/s]", 0.2)]
PANELS += [("fell", "share of episodes that fell", 0.02)]


def judge(run: Path, known: list[dict[str, float]]) -> list[dict[str, float]]:
    """One row for each checkpoint: seconds of training, environment steps, the three errors; keeps `known` rows."""
    rows = list(known)
    done = {row["env_steps"] for row in known}
    for path in whole_checkpoints(run):
        manifest = read_manifest(path)
        if manifest["env_steps"] in done:
            continue
        figures = evaluate(path, episodes=128, episode_s=10.0, physics="faithful", seed=1)["figures"]
        rows.append(
            {"train_s": manifest["train_s"], "env_steps": manifest["env_steps"]}
            | {name: figures[name]["mean"] for name, _, _ in PANELS}
        )
        print(f"{run.name}: " + ", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    return sorted(rows, key=lambda row: row["env_steps"])


def draw(curves: dict[str, list[dict[str, float]]], out: Path) -> None:
    """One panel for each figure, the bar to reach dashed."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.6), layout="constrained")
    for axis, (name, label, bar) in zip(axes, PANELS, strict=True):
        for run, rows in curves.items():
            axis.plot([row["train_s"] for row in rows], [row[name] for row in rows], marker=".", label=run)
        axis.axhline(bar, color="grey", linestyle="--", linewidth=1)
        axis.set(xlabel="seconds of training", ylabel=label, ylim=(0, None), xlim=(0, None))
    axes[0].legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Evaluates what the figures beside the picture do not hold yet, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    figures = options.out.with_suffix(".json")
    curves = json.loads(figures.read_text()) if figures.exists() else {}
    for run in options.runs:
        curves[run.name] = judge(run, curves.get(run.name, []))
        figures.write_text(json.dumps(curves, indent=1) + "\n")
    draw(curves, options.out)


if __name__ == "__main__":
    main()
