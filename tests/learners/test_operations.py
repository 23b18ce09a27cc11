"""The fused operations of a CPU against plain PyTorch in float64, and batched networks against single ones."""

import math

import pytest
import torch

from tests.learners.problems import CPU
from unilab_fabric.learners import categorical, gaussian
from unilab_fabric.learners.fused import FusedOperations
from unilab_fabric.learners.kernels import load_kernels
from unilab_fabric.learners.mlp import Mlp
from unilab_fabric.learners.operations import TorchOperations, batched, choose_operations, member_by_member

# a bf16 value is right to 2^-9 of itself; a network rounds at each layer
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}
THREADS = torch.get_num_threads()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def fused(request):
    kernels = load_kernels(request.param)
    if kernels is None:
        pytest.skip("no C compiler")
    operations = FusedOperations(kernels)
    operations.dtype = request.param
    return operations


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(THREADS)


def network(members=2, hidden=(40, 17, 64)):
    torch.manual_seed(1)
    mlp = Mlp(members, 9 + 4, hidden, 21)
    for norm in mlp.norms:
        norm.weight.data.normal_(1.0, 0.3)
        norm.bias.data.normal_(0.0, 0.3)
    return mlp


def double(mlp):
    copy = network(mlp.members, [norm.weight.shape[1] for norm in mlp.norms]).double()
    copy.load_state_dict(mlp.state_dict())
    return copy


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual, expected, tolerance):
    """Elementwise, relative to the largest expected value: sums of bf16 products round by that."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.double() / scale, expected.double() / scale, **tolerance)


def test_batched_networks_compute_what_single_ones_do():
    mlp, x = network(members=3).double(), normal(5, 13).double()
    for one, other in zip(batched(mlp, x), member_by_member(mlp, x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rows", [1, 2, 50])
@pytest.mark.parametrize("members", [1, 2])
def test_fused_networks_compute_what_plain_ones_do(fused, threads, rows, members):
    mlp, inputs = network(members), [normal(rows, 9), normal(rows, 4, seed=1)]
    expected = member_by_member(double(mlp), torch.cat(inputs, -1).double())
    mlp.flatten()
    with torch.no_grad():
        for own, plain in zip(fused.perceptrons(mlp, inputs), expected, strict=True):
            assert own.dtype == fused.dtype
            assert_near(own, plain, TOLERANCE[fused.dtype])


@pytest.mark.parametrize("rows", [3, 60])
def test_fused_networks_have_the_gradients_of_plain_ones(fused, threads, rows):
    mlp, observation, action = network(), normal(rows, 9), normal(rows, 4, seed=1).requires_grad_()
    plain, plain_action = double(mlp), action.detach().double().requires_grad_()
    weights = [normal(rows, 21, seed=2), normal(rows, 21, seed=3)]
    outputs = member_by_member(plain, torch.cat([observation.double(), plain_action], -1))
    sum((w.double() * out).sum() for w, out in zip(weights, outputs, strict=True)).backward()

    mlp.flatten()
    outputs = fused.perceptrons(mlp, [observation, action])
    sum((w * out.float()).sum() for w, out in zip(weights, outputs, strict=True)).backward()
    assert_near(action.grad, plain_action.grad, TOLERANCE[fused.dtype])
    for (name, own), expected in zip(mlp.named_parameters(), plain.parameters(), strict=True):
        assert_near(own.grad, expected.grad, TOLERANCE[fused.dtype]), name
    mlp.flat.check_views()


def test_a_second_backward_adds_to_the_gradient(fused):
    mlp, x = network(), normal(8, 13)
    flat = mlp.flatten()
    sum(out.float().sum() for out in fused.perceptrons(mlp, [x])).backward()
    once = flat.gradient.clone()
    sum(out.float().sum() for out in fused.perceptrons(mlp, [x])).backward()
    torch.testing.assert_close(flat.gradient, 2 * once)


def test_two_passes_in_one_graph_add_up(fused):
    mlp, first, second = network(), normal(8, 13), normal(8, 13, seed=5)
    flat = mlp.flatten()
    for x in (first, second):
        sum(out.float().sum() for out in fused.perceptrons(mlp, [x])).backward()
    expected = flat.gradient.clone()
    flat.zero_gradient()
    outputs = [*fused.perceptrons(mlp, [first]), *fused.perceptrons(mlp, [second])]
    sum(out.float().sum() for out in outputs).backward()
    torch.testing.assert_close(flat.gradient, expected)


def test_two_passes_before_their_backwards_do_not_mix(fused):
    mlp, first, second = network(), normal(8, 13), normal(8, 13, seed=5)
    flat = mlp.flatten()
    sum(out.float().sum() for out in fused.perceptrons(mlp, [first])).backward()
    expected = flat.gradient.clone()
    flat.zero_gradient()
    outputs = fused.perceptrons(mlp, [first])
    fused.perceptrons(mlp, [second])
    sum(out.float().sum() for out in outputs).backward()
    assert torch.equal(flat.gradient, expected)


def test_a_frozen_network_passes_the_gradient_on_and_keeps_none(fused):
    mlp, action = network(), normal(8, 4).requires_grad_()
    flat = mlp.flatten()
    with flat.frozen():
        outputs = fused.perceptrons(mlp, [normal(8, 9), action])
    sum(out.float().sum() for out in outputs).backward()
    assert action.grad.count_nonzero() > 0
    assert flat.gradient.count_nonzero() == 0


def test_a_pass_sees_parameters_changed_in_place(fused):
    mlp, x = network(), normal(8, 13)
    mlp.flatten()
    with torch.no_grad():
        before = [out.clone() for out in fused.perceptrons(mlp, [x])]
        mlp.flat.values.copy_(1.1 * mlp.flat.values)
        after = fused.perceptrons(mlp, [x])
        expected = member_by_member(double(mlp), x.double())
    for one, own, plain in zip(before, after, expected, strict=True):
        assert not torch.equal(one, own)
        assert_near(own, plain, TOLERANCE[fused.dtype])


def test_the_same_pass_gives_the_same_bits(fused, threads):
    mlp, x = network(), normal(301, 13)
    flat = mlp.flatten()
    gradients = []
    for _ in range(5):
        flat.zero_gradient()
        sum(out.float().square().sum() for out in fused.perceptrons(mlp, [x])).backward()
        gradients.append(flat.gradient.clone())
    assert all(torch.equal(gradients[0], other) for other in gradients)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_outputs_and_gradients(fused, bad):
    mlp, x = network(), normal(8, 13)
    flat = mlp.flatten()
    x[3, 2] = bad
    outputs = fused.perceptrons(mlp, [x])
    assert all(out[3].isnan().all() and out[:3].isfinite().all() for out in outputs)
    sum(out.float().sum() for out in outputs).backward()
    assert not flat.gradient.isfinite().all()


def test_not_a_number_survives_rounding_to_bf16_whatever_its_payload(fused):
    mlp = network()
    mlp.norms[-1].bias.data.view(torch.int32).fill_(0x7FFFFFFF)  # rounding alone would carry into the sign: -0
    mlp.flatten()
    with torch.no_grad():
        assert all(out.isnan().all() for out in fused.perceptrons(mlp, [normal(8, 13)]))


# The other operations


@pytest.mark.parametrize("actions", [1, 3, 29])
def test_squash_and_its_gradient(fused, threads, actions):
    head = (2.0 * normal(40, 2 * actions)).to(fused.dtype).requires_grad_()
    head.data[0] = 20.0
    head.data[1] = -20.0
    noise = normal(40, actions, seed=1)
    exact = head.detach().double().requires_grad_()
    weights = normal(40, actions, seed=2), normal(40, seed=3)

    own, expected = fused.squash(head, noise, -5.0, 0.0), gaussian.squash(exact, noise.double(), -5.0, 0.0)
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
    ((own[0] * weights[0]).sum() + (own[1] * weights[1]).sum()).backward()
    ((expected[0] * weights[0]).sum() + (expected[1] * weights[1]).sum()).backward()
    assert_near(head.grad, exact.grad, TOLERANCE[fused.dtype])


@pytest.mark.parametrize("atoms", [2, 51, 101])
def test_the_expected_value_and_its_gradient(fused, threads, atoms):
    logits = (3.0 * normal(40, atoms)).to(fused.dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    own, expected = fused.expected_value(logits, -7.0, 3.0), categorical.expected_value(exact, -7.0, 3.0)
    torch.testing.assert_close(own.double(), expected.double(), atol=1e-5, rtol=1e-5)
    weights = normal(40, seed=1)
    (own * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_near(logits.grad, exact.grad, TOLERANCE[fused.dtype])


@pytest.mark.parametrize("atoms", [2, 51, 101])
def test_the_categorical_loss_and_its_gradient(fused, threads, atoms):
    rows = 40
    logits = (2.0 * normal(rows, atoms)).to(fused.dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    next_logits = (2.0 * normal(rows, atoms, seed=1)).to(fused.dtype)
    soft_reward = 3.0 * normal(rows, seed=2)  # some rows leave the support
    bootstrap = torch.tensor([0.0, 0.97, 0.9, 1.0]).repeat(rows // 4)

    own = fused.categorical_loss(logits, next_logits, soft_reward, bootstrap, -7.0, 3.0)
    expected = TorchOperations(CPU, bf16=False).categorical_loss(
        exact, next_logits.double(), soft_reward.double(), bootstrap.double(), -7.0, 3.0
    )
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=1e-4, rtol=1e-4)
    (3.0 * own[0]).backward()
    (3.0 * expected[0]).backward()
    assert_near(
        logits.grad,
        exact.grad,
        {torch.float32: {"atol": 1e-4, "rtol": 0.0}}.get(fused.dtype, TOLERANCE[torch.bfloat16]),
    )


def test_a_target_that_does_not_move_and_equals_the_prediction_has_no_gradient(fused):
    logits = normal(6, 11).to(fused.dtype).requires_grad_()
    loss, _ = fused.categorical_loss(logits, logits.detach(), torch.zeros(6), torch.ones(6), -1.0, 1.0)
    loss.backward()
    assert logits.grad.abs().max().item() < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_stays_within_memory_and_spoils_only_its_row(fused, bad):
    logits = normal(4, 11).to(fused.dtype).requires_grad_()
    reward = torch.tensor([0.0, bad, 0.0, 0.0])
    loss, _ = fused.categorical_loss(logits, logits.detach(), reward, torch.full((4,), 0.97), -1.0, 1.0)
    loss.backward()
    assert logits.grad[[0, 2, 3]].isfinite().all()
    assert loss.isnan().item() == math.isnan(bad)  # an infinite return is clipped to the support


def test_the_choice_is_plain_pytorch_if_kernels_are_off():
    assert isinstance(choose_operations(CPU, "32-true", "off"), TorchOperations)
    if load_kernels(torch.float32) is not None:
        assert isinstance(choose_operations(CPU, "32-true", "auto"), FusedOperations)
