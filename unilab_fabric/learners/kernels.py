"""Binds kernels.c; learners work without it, only slower."""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unilab_fabric.native import Unavailable, build

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fPIC"]
# what vectorisation needs of -ffast-math; never -ffinite-math-only, as a value that is not finite must stay one
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math"]

BLOCK = 8  # as in kernels.c
# arguments of each function: p a pointer, f a float, l a long
SIGNATURES = {
    "norm_silu": "ppppppplll",
    "norm_silu_backward": "ppppppppppplll",
    "column_sums": "ppplll",
    "categorical_loss": "ppppffppplll",
    "expected_value": "pffpplll",
    "expected_value_backward": "pppffpplll",
    "squash": "ppffppppplll",
    "squash_backward": "ppppppffplll",
    "column_moments": "pppplll",
    "norm_relu": "pppppplll",
    "norm_relu_backward": "pppppppppplplll",
    "elu": "plll",
    "elu_backward": "ppppplll",
}
C_TYPES = {"p": ctypes.c_void_p, "f": ctypes.c_float, "l": ctypes.c_long}


@cache
def load_kernels(dtype: torch.dtype) -> "Kernels | None":
    """The kernels beside products in float32 or bfloat16; None, said in one log line, where they cannot be built."""
    try:
        return Kernels(build(SOURCE, [*FLAGS, *(["-DBF16"] if dtype == torch.bfloat16 else [])]), dtype)
    except (Unavailable, OSError) as error:
        logger.warning("fused CPU kernels are not used (%s); PyTorch computes the same, slower", error)
        return None


class Kernels:
    """The functions of kernels.c on contiguous CPU tensors; `dtype` is that of everything a matrix product touches.

    Parameters, statistics, actions, noise and values are float32. B rows, W the width, K atoms, n actions.
    """

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        loaded = ctypes.CDLL(str(library))
        self._functions = {name: loaded[name] for name in SIGNATURES}
        for name, function in self._functions.items():
            function.argtypes = [C_TYPES[kind] for kind in SIGNATURES[name]]  # type: ignore[misc]
            function.restype = None
        self._scratch = torch.empty(0)

    def norm_silu(self, x: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """silu(scale * layer_norm(x + bias) + shift) of x (B, W); also mean and 1 / std of each row, (2, B)."""
        rows, width = x.shape
        out, statistics = torch.empty_like(x), torch.empty(2, rows)
        mean, rstd = statistics.data_ptr(), statistics.data_ptr() + 4 * rows
        self._run("norm_silu", (x, bias, scale, shift, out, mean, rstd), sizes=(rows, width))
        return out, statistics

    def norm_silu_backward(
        self,
        grad: Tensor,
        x: Tensor,
        parameters: Sequence[Tensor],
        statistics: Tensor,
        of_parameters: Sequence[Tensor | None],
    ) -> None:
        """Turns `grad` (B, W) of the output into that of x, and adds to those of bias, scale and shift (W,) if given.

        `parameters` are bias, scale and shift, `statistics` what norm_silu returned.
        """
        rows, width = x.shape
        mean, rstd = statistics.data_ptr(), statistics.data_ptr() + 4 * rows
        arguments: list[Tensor | float | int | None] = [grad, x, *parameters, mean, rstd, *of_parameters]
        self._run("norm_silu_backward", arguments, scratch=(3 + 2 * BLOCK) * width, sizes=(rows, width))

    def column_sums(self, x: Tensor, sums: Tensor) -> None:
        """Adds the sums over the rows of x (B, W) to `sums` (W,)."""
        rows, width = x.shape
        self._run("column_sums", (x, sums), scratch=width, sizes=(rows, width))

    def categorical_loss(
        self, logits: Tensor, next_logits: Tensor, soft_reward: Tensor, bootstrap: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean cross-entropy against the projected target, mean expected return, and the gradient of logits (B, K)."""
        rows, atoms = logits.shape
        grad, sums = torch.empty_like(logits), torch.empty(torch.get_num_threads(), 2, dtype=torch.float64)
        arguments = (logits, next_logits, soft_reward, bootstrap, low, high, grad, sums)
        self._run("categorical_loss", arguments, scratch=(4 + 2 * BLOCK) * atoms, sizes=(rows, atoms))
        loss, value = sums[0].div_(rows).float()
        return loss, value, grad

    def expected_value(self, logits: Tensor, low: float, high: float) -> Tensor:
        """Mean of softmax(logits) on the atoms low ... high: (B, K) -> (B,)."""
        rows, atoms = logits.shape
        value = torch.empty(rows)
        self._run("expected_value", (logits, low, high, value), scratch=BLOCK * atoms, sizes=(rows, atoms))
        return value

    def expected_value_backward(
        self, grad_value: Tensor, logits: Tensor, value: Tensor, low: float, high: float
    ) -> Tensor:
        """The gradient of logits (B, K) from that of the value (B,)."""
        rows, atoms = logits.shape
        grad = torch.empty_like(logits)
        arguments = (grad_value, logits, value, low, high, grad)
        self._run("expected_value_backward", arguments, scratch=BLOCK * atoms, sizes=(rows, atoms))
        return grad

    def squash(self, head: Tensor, noise: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tanh(u), std and tanh(raw), (B, n) each, and the log-density (B,) of tanh(u), from head (B, 2 n)."""
        rows, actions = noise.shape
        squashed, std, raw_tanh, terms = torch.empty(4, rows, actions)
        log_prob = torch.empty(rows)
        arguments = (head, noise, low, high, squashed, std, raw_tanh, log_prob, terms)
        self._run("squash", arguments, sizes=(rows, actions))
        return squashed, std, raw_tanh, log_prob

    def squash_backward(
        self,
        grad_squashed: Tensor,
        grad_log_prob: Tensor,
        noise: Tensor,
        squashed: Tensor,
        std: Tensor,
        raw_tanh: Tensor,
        low: float,
        high: float,
    ) -> Tensor:
        """The gradient of head (B, 2 n)."""
        rows, actions = noise.shape
        grad_head = torch.empty(rows, 2 * actions, dtype=self.dtype)
        arguments = (grad_squashed, grad_log_prob, noise, squashed, std, raw_tanh, low, high, grad_head)
        self._run("squash_backward", arguments, sizes=(rows, actions))
        return grad_head

    def column_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each column of x (B, W), (W,) each."""
        rows, width = x.shape
        mean, variance = torch.empty(2, width)
        self._run("column_moments", (x, mean, variance), scratch=2 * width, sizes=(rows, width))
        return mean, variance

    def norm_relu(self, x: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
        """relu(x * scale + shift) of x (B, W), scale and shift (W,); with `residual` its float32 sum with that."""
        out = torch.empty_like(x) if residual is None else None
        wide = None if residual is None else torch.empty_like(residual)
        self._run("norm_relu", (x, scale, shift, residual, out, wide), sizes=x.shape)
        result = wide if out is None else out
        assert result is not None
        return result

    def norm_relu_backward(
        self,
        grad: Tensor,
        x: Tensor,
        vectors: Sequence[Tensor],
        of_weight: Tensor | None,
        of_bias: Tensor | None,
        *,
        wide: bool,
        batch: bool,
    ) -> Tensor:
        """The gradient of x (B, W) from that of norm_relu's result; adds to those of weight and bias (W,) if given.

        `vectors` are mean, 1 / std, scale and shift, with scale = weight / std and shift = bias - mean * scale; with
        `batch` mean and std are those of x itself. `wide` says that there was a residual.
        """
        of_x = torch.empty_like(x)
        arguments: list[Tensor | float | int | None] = [None if wide else grad, grad if wide else None, x, *vectors]
        arguments += [of_x, of_weight, of_bias, int(batch)]
        self._run("norm_relu_backward", arguments, scratch=2 * x.shape[1], sizes=x.shape)
        return of_x

    def elu(self, x: Tensor) -> None:
        """Replaces x (B, W) by its ELU."""
        self._run("elu", (x,), sizes=x.shape)

    def elu_backward(self, grad: Tensor, out: Tensor, of_bias: Tensor) -> Tensor:
        """The gradient of ELU's argument (B, W) from that of its result; adds its column sums to of_bias (W,)."""
        of_x = torch.empty_like(out)
        self._run("elu_backward", (grad, out, of_x, of_bias), scratch=out.shape[1], sizes=out.shape)
        return of_x

    def _run(
        self, name: str, arguments: Sequence[Tensor | float | int | None], *, sizes: Sequence[int], scratch: int = 0
    ) -> None:
        """Calls a function with `arguments`, `scratch` floats for each thread if any, the sizes and the threads."""
        threads = torch.get_num_threads()
        values = [part.data_ptr() if isinstance(part, Tensor) else part for part in arguments]
        if scratch > 0:
            if self._scratch.numel() < scratch * threads:
                self._scratch = torch.empty(scratch * threads)
            values.append(self._scratch.data_ptr())
        self._functions[name](*values, *sizes, threads)
