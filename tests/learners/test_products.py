import pytest
import torch

from unilab_fabric.learners.products import input_gradient, linear, weight_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_a_linear_layer(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in [(33, 17), (20, 17), (20,), (33, 20)]
    )
    exact_x, exact_weight, exact_bias = (tensor.double().requires_grad_() for tensor in (x, weight, bias))
    expected = torch.nn.functional.linear(exact_x, exact_weight, exact_bias)
    expected.backward(grad.double())
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 5e-2, "rtol": 1e-2}
    for actual, right in [
        (linear(x, weight, bias), expected),
        (linear(x, weight), expected - exact_bias),
        (input_gradient(grad, weight), exact_x.grad),
        (weight_gradient(grad, x), exact_weight.grad),
    ]:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), right, **tolerance)
