import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from unilab_fabric.learners import kernels


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.load_kernels.cache_clear()
    yield tmp_path / "unilab_fabric"
    kernels.load_kernels.cache_clear()


@pytest.fixture
def built(cache):
    if kernels.load_kernels(torch.float32) is None:
        pytest.skip("no C compiler")
    return cache


def test_each_kind_is_built_once(built):
    assert kernels.load_kernels(torch.bfloat16) is not None
    first = {path: path.stat().st_mtime_ns for path in built.iterdir()}
    assert len(first) == 2
    kernels.load_kernels.cache_clear()
    kernels.load_kernels(torch.float32)
    kernels.load_kernels(torch.bfloat16)
    assert {path: path.stat().st_mtime_ns for path in built.iterdir()} == first


def test_ranks_that_start_together_all_find_whole_kernels(cache):
    code = (
        "import torch\n"
        "from unilab_fabric.learners.kernels import load_kernels\n"
        "loaded = load_kernels(torch.float32)\n"
        "print(loaded and loaded.expected_value(torch.zeros(2, 3), 1.0, 3.0).tolist())"
    )

    def rank(_):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(rank, range(3)))
    assert len(set(outputs)) == 1
    assert outputs[0] in ("[2.0, 2.0]", "None")
    assert len(list(cache.glob("*"))) <= 1


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no_such_compiler", "no C compiler found"),
        ("false", "the compiler failed"),
    ],
)
def test_without_a_working_compiler_one_log_line_says_why_and_there_are_none(
    cache, compiler, reason, monkeypatch, caplog
):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernels(torch.float32) is None
        assert kernels.load_kernels(torch.float32) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"fused CPU kernels are not used ({reason}); PyTorch computes the same, slower"
    ]


def test_a_cache_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    kernels.load_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernels(torch.float32) is None
    kernels.load_kernels.cache_clear()
    assert len(caplog.records) == 1


def test_the_library_brings_no_second_openmp_runtime(built):
    (library,) = built.iterdir()
    linked = subprocess.run(["ldd", str(library)], capture_output=True, text=True, timeout=60).stdout
    assert "gomp" not in linked
    assert "omp" not in linked.replace("unilab_fabric", "")


@pytest.mark.parametrize("threads", [1, 2])
def test_elu_and_its_gradient_are_pytorch_s(threads, monkeypatch):
    fused = kernels.load_kernels(torch.float32)
    if fused is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = (3.0 * torch.randn(37, 21)).requires_grad_()
    expected = torch.nn.functional.elu(x)
    grad = torch.randn(37, 21)
    expected.backward(grad)
    out, of_bias = x.detach().clone(), torch.ones(21)
    fused.elu(out)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
    of_x = fused.elu_backward(grad, out, of_bias)
    torch.testing.assert_close(of_x, x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_bias, 1.0 + x.grad.sum(0), rtol=1e-4, atol=1e-5)
    bad = torch.tensor([[float("nan"), -float("inf"), float("inf")]])
    fused.elu(bad)
    assert bad.isnan().tolist() == [[True, False, False]]
    assert bad[0, 1:].tolist() == [-1.0, float("inf")]
