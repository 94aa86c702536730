"""Averaged weights: closed forms of the average, and a model that gets its own weights back whatever happens."""

import pytest
import torch
from torch import nn

from trl_ppo_ext.modeling.averaging import AveragedWeights

DECAY = 0.9


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).to(dtype)


def averaged(of, decay=DECAY):
    return AveragedWeights(dict(of.named_parameters()), decay)


def copies(of):
    return {name: weight.detach().clone() for name, weight in of.named_parameters()}


def assign(of, values):
    with torch.no_grad():
        for name, weight in of.named_parameters():
            weight.copy_(values[name] if isinstance(values, dict) else torch.full_like(weight, values))


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


# ---- the average ----


def test_the_average_starts_as_a_copy_of_the_weights():
    net = model(torch.float32)
    start = copies(net)
    average = averaged(net)
    assign(net, 7.0)
    assert same_bits(average.state_dict(), start)


def test_the_average_approaches_constant_weights_geometrically():
    net = model()
    start, average = copies(net), averaged(net)
    assign(net, 2.0)
    for steps in range(1, 12):
        average.update()
        for name, found in average.state_dict().items():
            expected = DECAY**steps * start[name] + (1 - DECAY**steps) * 2.0
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.992])
def test_the_average_of_a_geometric_sequence_has_its_closed_form(decay):
    net, ratio, steps = model(), 0.8, 10
    assign(net, 1.0)
    average = averaged(net, decay)
    for step in range(1, steps + 1):
        assign(net, ratio**step)
        average.update()
    expected = decay**steps + (1 - decay) * ratio * (ratio**steps - decay**steps) / (ratio - decay)
    for found in average.state_dict().values():
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-12, atol=0)


def test_without_decay_the_average_is_the_weights():
    net = model(torch.float32)
    average = averaged(net, 0.0)
    for seed in range(3):
        torch.manual_seed(seed)
        assign(net, {name: torch.randn_like(weight) for name, weight in net.named_parameters()})
        average.update()
        assert same_bits(average.state_dict(), copies(net))


def test_bf16_weights_are_averaged_in_float32_where_small_steps_count():
    net = model(torch.bfloat16)
    assign(net, 1.0)
    average = averaged(net, 0.999)
    assign(net, 2.0)
    average.update()  # 1.001 is no bf16 number
    for found in average.state_dict().values():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.full_like(found, 1.001))


def test_updating_leaves_no_trace_in_the_weights_or_the_graph():
    net = model(torch.float32)
    before, average = copies(net), averaged(net)
    loss = net(torch.ones(1, 3)).sum()
    average.update()
    loss.backward()  # would fail had a weight been touched
    assert same_bits(copies(net), before)
    assert not any(tensor.requires_grad for tensor in average.state_dict().values())


def test_the_average_follows_weights_that_change_their_precision():
    net = model(torch.float32)
    average = averaged(net)
    net.to(torch.float64)
    average.update()
    with average.swapped():
        assert net[0].weight.dtype == torch.float64


def test_the_average_follows_a_model_to_another_device():
    net = model(torch.float32)
    average = averaged(net)
    for weight in net.parameters():  # as `net.to` does in place, to a device that every machine has
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().to("meta")))
    average.update()
    assert {tensor.device.type for tensor in average.state_dict().values()} == {"meta"}


@pytest.mark.gpu
def test_a_model_moved_to_the_gpu_is_averaged_there():
    net = model()
    start, average = copies(net), averaged(net)
    net.to("cuda")
    with average.swapped():  # before an update has moved the average
        assert net[0].weight.is_cuda
    assign(net, 2.0)
    average.update()
    for name, found in average.state_dict().items():
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), DECAY * start[name] + (1 - DECAY) * 2.0)


# ---- swapping ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swapping_gives_the_averages_and_then_the_own_weights_bit_for_bit(dtype):
    net = model(dtype)
    start, average = copies(net), averaged(net)
    assign(net, {name: -weight.detach() / 3 for name, weight in net.named_parameters()})
    with torch.no_grad():
        net[0].bias.copy_(torch.tensor([-0.0, 0.0, torch.nan, -torch.inf]))
    own, places = copies(net), [weight.data_ptr() for weight in net.parameters()]
    for _ in range(2):
        with average.swapped():
            assert same_bits(copies(net), start)
        assert same_bits(copies(net), own)
    assert [weight.data_ptr() for weight in net.parameters()] == places
    assert all(weight.requires_grad for weight in net.parameters())


def test_the_own_weights_come_back_after_an_exception():
    net = model()
    average = averaged(net)
    assign(net, 3.0)
    with pytest.raises(KeyboardInterrupt), average.swapped():
        raise KeyboardInterrupt
    assert same_bits(copies(net), {name: torch.full_like(weight, 3.0) for name, weight in copies(net).items()})
    average.update()  # and the next step and swap are free again
    with average.swapped():
        pass


def test_swapping_does_not_change_the_average():
    net = model()
    average = averaged(net)
    assign(net, 3.0)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    with average.swapped():
        assign(net, 5.0)
    assert same_bits(average.state_dict(), before)


def test_a_weight_under_two_names_comes_back():
    weight = nn.Parameter(torch.tensor([1.0]))
    average = AveragedWeights({"embedding": weight, "head": weight}, DECAY)
    with torch.no_grad():
        weight.fill_(2.0)
    with average.swapped():
        assert weight.item() == 1.0
    assert weight.item() == 2.0


# ---- checkpoints ----


def test_a_restored_average_goes_on_bit_for_bit():
    net = model(torch.float32)
    average = averaged(net)
    assign(net, 2.0)
    average.update()
    state = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    resumed = averaged(net)  # starts from the weights, not from the average
    resumed.load_state_dict(state)
    assert same_bits(resumed.state_dict(), state)
    for each in (average, resumed):
        each.update()
    assert same_bits(resumed.state_dict(), average.state_dict())
    assert not same_bits(state, average.state_dict())  # loading copied
