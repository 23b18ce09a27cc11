"""Which arithmetic `training.precision: auto` means."""

from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")
FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def resolve_precision(accelerator: str) -> str:
    """bf16-mixed where the device (cpu or cuda) has fast bf16 matrix products, else 32-true."""
    fast = torch.cuda.get_device_capability() >= (8, 0) if accelerator == "cuda" else _cpu_has_fast_bf16()
    return "bf16-mixed" if fast else "32-true"


def set_precision(precision: str, device: torch.device) -> str:
    """Prepares float32 products on CUDA; returns what the learner is to compute in, 32-true or bf16-mixed."""
    if precision == "auto":
        precision = resolve_precision(device.type)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    return "32-true" if precision == "tf32" else precision


def _cpu_has_fast_bf16() -> bool:
    """Asks /proc/cpuinfo; False where there is none, as bf16 without such instructions is slower than float32."""
    if not CPUINFO.exists():
        return False
    flags = (line for line in CPUINFO.read_text().splitlines() if line.startswith("flags"))
    return not FAST_BF16_FLAGS.isdisjoint(next(flags, "").split())
