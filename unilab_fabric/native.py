"""Compiles C files of ours for this machine; what uses them works without, only slower.

A result lies in the user's cache under a name made from the source, the flags, the compiler and the processor, so that
it is built once, and a home folder shared by different machines keeps one for each.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_DEADLINE_S = 60.0


class Unavailable(Exception):
    """A C file could not be built here; the message says why."""


def build(source: Path, flags: Sequence[str]) -> Path:
    """The shared library of a C file, built now if it was not before. Raises Unavailable."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise Unavailable("no C compiler found")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_DEADLINE_S, check=False)
        recipe = [source.read_bytes(), *(flag.encode() for flag in flags), version.stdout, _processor()]
        library = _cache_folder() / f"{source.stem}-{hashlib.sha256(b'|'.join(recipe)).hexdigest()[:16]}.so"
        if not library.exists():
            _compile(compiler, source, flags, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(str(error)) from error
    return library


def _compile(compiler: str, source: Path, flags: Sequence[str], library: Path) -> None:
    """Builds beside the final name and renames, so that ranks that start together cannot see half a file."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "built.o"
        # linked without the flags, as -fopenmp would name a second OpenMP runtime beside PyTorch's
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(built)],
            [compiler, "-shared", str(built), "-o", f"{built}.so"],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
            if done.returncode != 0:
                raise Unavailable((done.stderr.strip().splitlines() or ["the compiler failed"])[-1])
        os.replace(f"{built}.so", library)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unilab_fabric"


def _processor() -> bytes:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor().encode()
    return b"".join(sorted({line for line in cpuinfo.read_bytes().splitlines() if line.startswith(b"flags")}))
