"""How every benchmark measures: all candidates in turn, in one run, ratios to a named one of them."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch


def in_turn(candidates: Mapping[str, Callable[[], None]], repeats: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per call of each, one figure per repeat; each figure is over about `seconds` [s]."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        for _ in range(3):
            call()
    for _ in range(repeats):
        for name, call in candidates.items():
            count, start = 0, time.perf_counter()
            while count < 2 or time.perf_counter() - start < seconds:
                call()
                count += 1
            times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def table(title: str, times: Mapping[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """Prints medians, and medians of reference time / own time within a repeat; returns the numbers."""
    numbers = {}
    print(f"\n{title}")
    print(f"{'':24}{'ms':>10}{'ratio':>8}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(times[reference], own, strict=True))
        numbers[name] = {"ms": statistics.median(own), "ratio": ratio}
        print(f"{name:24}{numbers[name]['ms']:10.3f}{ratio:8.2f}")
    return numbers


def processor() -> str:
    """The CPU's name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """What the figures belong to."""
    return {
        "processor": processor(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
