import csv

from unilab_fabric.config import ClassConfig
from unilab_fabric.hooks.csv_logger import CSVLogger
from unilab_fabric.hooks.metrics import build_logger


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_new_column_and_a_resumed_run_lose_no_row(tmp_path):
    first = CSVLogger(str(tmp_path))
    for step in range(3):
        first.log_metrics({"a": step / 2}, step)
    first.log_metrics({"a": 1.5, "Loss/critic": 7.0}, 3)
    resumed = CSVLogger(str(tmp_path))
    resumed.log_metrics({"Loss/critic": 8.0, "late, with a comma": 1.0}, 4)
    resumed.log_metrics({"a": 2.5}, 5)
    found = rows(tmp_path)
    assert [row["env_steps"] for row in found] == ["0", "1", "2", "3", "4", "5"]
    assert [row["a"] for row in found] == ["0.0", "0.5", "1.0", "1.5", "", "2.5"]
    assert [row["Loss/critic"] for row in found] == ["", "", "", "7.0", "8.0", ""]
    assert [row["late, with a comma"] for row in found] == ["", "", "", "", "1.0", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_it_stands_in_the_run_folder(tmp_path):
    logger = build_logger(ClassConfig(class_path="CSVLogger"), tmp_path)
    logger.log_metrics({"a": 1.0}, 10)
    assert rows(tmp_path) == [{"env_steps": "10", "a": "1.0"}]


def test_what_a_killed_run_reported_after_its_checkpoint_is_dropped_and_half_a_row_too(tmp_path):
    first = CSVLogger(str(tmp_path))
    for step in (8, 16, 24, 32):
        first.log_metrics({"a": float(step)}, step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("40,4")
    resumed = CSVLogger(str(tmp_path), purge_step=17)
    resumed.log_metrics({"a": 25.0}, 24)
    assert [(row["env_steps"], row["a"]) for row in rows(tmp_path)] == [("8", "8.0"), ("16", "16.0"), ("24", "25.0")]
