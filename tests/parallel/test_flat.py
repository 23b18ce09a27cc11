import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from unilab_fabric.parallel.flat import FlatAdamW, FlatParameters


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 70), nn.LayerNorm(70), nn.SiLU(), nn.Linear(70, 3))


def learning_rate():
    return torch.tensor(3e-3)


def test_a_module_computes_the_same_after_it_was_flattened():
    plain, flattened = network(), network()
    FlatParameters(flattened)
    x = torch.randn(4, 5)
    assert torch.equal(plain(x), flattened(x))


def test_every_view_starts_at_a_multiple_of_64_elements_and_the_padding_is_zero():
    flat = FlatParameters(network())
    assert [view.offset for view in flat.views] == [0, 384, 512, 640, 768, 1024]
    assert flat.values.shape == (1088,)
    assert flat.values[350:384].count_nonzero() == 0


def test_backward_fills_the_flat_gradient_and_adds_to_it():
    plain, flattened = network(), network()
    flat = FlatParameters(flattened)
    x = torch.randn(4, 5)
    for _ in range(2):
        plain(x).square().sum().backward()
        flattened(x).square().sum().backward()
    for view, parameter in zip(flat.views, plain.parameters(), strict=True):
        assert torch.equal(view.of(flat.gradient), parameter.grad)
    flat.zero_gradient()
    assert flattened[0].weight.grad.count_nonzero() == 0


def test_the_state_dict_keeps_its_names_and_loads_in_place():
    flattened, other = network(), network()
    flat = FlatParameters(flattened)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    assert list(flattened.state_dict()) == list(other.state_dict())
    flattened.load_state_dict(other.state_dict())
    flat.check_views()
    assert torch.equal(flat.views[0].of(flat.values), other[0].weight)


def test_the_tail_is_reduced_and_zeroed_with_the_gradient_but_not_part_of_it():
    flat = FlatParameters(network(), tail=3)
    flat.tail.fill_(7.0)
    assert flat.reduced[-3:].tolist() == [7.0, 7.0, 7.0]
    assert flat.gradient.count_nonzero() == 0
    flat.zero_gradient()
    assert flat.tail.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "harmless",
    [
        lambda module: module.load_state_dict(network().state_dict()),
        lambda module: module.to("cpu"),
        lambda module: module.float(),
        lambda module: module.zero_grad(set_to_none=False),
        lambda module: module(torch.ones(2, 5)).sum().backward(inputs=list(module.parameters())),
        lambda module: torch.autograd.grad(module(torch.ones(2, 5)).sum(), list(module.parameters())),
        lambda module: module.eval().train().requires_grad_(True),
        lambda module: copy.deepcopy(module),
    ],
)
def test_views_survive(harmless):
    module = network()
    flat = FlatParameters(module)
    harmless(module)
    flat.check_views()


@pytest.mark.parametrize(
    ("harmful", "text"),
    [
        (lambda module: module.zero_grad(), "the gradient tensor of parameter 0.weight is no longer a view"),
        (lambda module: module.double(), "the tensor of parameter 0.weight is no longer a view"),
        (
            lambda module: module.load_state_dict(network().state_dict(), assign=True),
            "the tensor of parameter 0.weight is no longer a view",
        ),
    ],
)
def test_check_views_names_the_parameter_that_left(harmful, text):
    module = network()
    flat = FlatParameters(module)
    harmful(module)
    with pytest.raises(RuntimeError, match=text):
        flat.check_views()


def test_flat_adamw_is_bitwise_fused_adamw_of_each_parameter_over_50_steps():
    # widths of whole vectors: the fused kernel rounds the remainder of a tensor in scalar arithmetic
    plain = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 32))
    flattened = copy.deepcopy(plain)
    flat = FlatParameters(flattened)
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.01, "fused": True}
    reference = AdamW(plain.parameters(), lr=learning_rate().item(), **settings)
    adam = FlatAdamW(flat.values, flat.gradient, betas=(0.9, 0.95), weight_decay=0.01)
    for seed in range(50):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
        reference.zero_grad()
        flat.zero_gradient()
        plain(x).square().sum().backward()
        flattened(x).square().sum().backward()
        reference.step()
        adam.step(learning_rate(), torch.zeros(()))
    for expected, actual in zip(plain.parameters(), flattened.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_a_step_held_back_leaves_weights_moments_and_step_count_alone():
    flat = FlatParameters(network())
    adam = FlatAdamW(flat.values, flat.gradient, betas=(0.9, 0.95), weight_decay=0.01)
    flat.gradient.fill_(1.0)
    adam.step(learning_rate(), torch.zeros(()))
    before = {"values": flat.values, **adam.replicated("")}
    before = {name: tensor.clone() for name, tensor in before.items()}

    flat.gradient[3] = torch.nan
    adam.step(learning_rate(), torch.ones(()))
    after = {"values": flat.values, **adam.replicated("")}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_clipping_scales_down_to_the_norm_and_returns_the_one_before():
    flat = FlatParameters(network(), tail=1)
    flat.gradient[:2] = torch.tensor([30.0, 40.0])
    flat.tail.fill_(1000.0)  # not part of the norm
    assert flat.clip_norm_(10.0).item() == 50.0
    torch.testing.assert_close(flat.gradient[:2], torch.tensor([6.0, 8.0]))
    assert flat.clip_norm_(0.0).item() == pytest.approx(10.0)
    torch.testing.assert_close(flat.gradient[:2], torch.tensor([6.0, 8.0]))
