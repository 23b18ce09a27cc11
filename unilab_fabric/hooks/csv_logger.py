"""A table of all reports, `metrics.csv`, that a resumed run continues."""

import csv
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import Logger
from typing_extensions import override

FILE = "metrics.csv"
_STEP = "env_steps"


class CSVLogger(Logger):
    """One row for each report, one column for each tag; rows are only ever added.

    A report with a new tag rewrites the file with one more column, whole or not at all. Lightning's logger of this name
    deletes what is there when a run resumes.
    """

    def __init__(self, root_dir: str | None = None, purge_step: int | None = None) -> None:
        """Continues the table that is there, if any.

        Args:
            root_dir: Folder of `metrics.csv`; null means the run folder.
            purge_step: Rows from this step on are dropped: a resumed run reports them again.
        """
        self._file = Path(root_dir or ".") / FILE
        rows = self._rows()
        self._columns = [*rows[0]] if rows else [_STEP]
        if rows:  # written anew, so that half a row of a killed run does not stand in the way of the next one
            self._rewrite(self._columns, [row for row in rows if int(row[_STEP]) < (purge_step or math.inf)])

    @property
    @override
    def name(self) -> str:
        return "csv"

    @property
    @override
    def version(self) -> str:
        return ""

    @property
    @override
    def root_dir(self) -> str:
        return str(self._file.parent)

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {_STEP: step, **metrics}
        new = [tag for tag in row if tag not in self._columns]
        if new or not self._file.is_file():
            self._rewrite([*self._columns, *new], self._rows())
        with self._file.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run folder has its `config.yaml`."""

    def _rewrite(self, columns: list[str], rows: Iterable[Mapping[str, str]]) -> None:
        part = self._file.with_name(f"{FILE}.partial")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._file)
        self._columns = columns

    def _rows(self) -> list[dict[str, str]]:
        """The whole rows; a kill may have left half of one."""
        if not self._file.is_file():
            return []
        lines = self._file.read_text().splitlines(keepends=True)
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))
