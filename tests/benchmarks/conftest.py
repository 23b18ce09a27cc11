import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark by name as one that is run there; forgets it afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = []

    def load(name):
        found.append(name)
        return importlib.import_module(name)

    yield load
    for name in found:
        sys.modules.pop(name, None)
