"""Loops over time that a forward writes out: one step stands for all where they are alike, else all are run."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch as other
import torch.nn.functional as F
from torch import Tensor, nn, sigmoid

from examples.models.lstm import LSTM
from paraplan.capture.capture import capture
from tests.capture.looped import STEPS, WIDTH, Net, held_against_eager, num_loops

torch.set_num_threads(1)


def listed(net: Net, x: Tensor) -> Tensor:
    h, out = x.new_zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        h = torch.tanh(F.linear(h, net.inner.weight, net.inner.bias) + x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def joined(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0] * 0, []
    for t in range(x.shape[1]):
        h = h * x[:, t].sigmoid() + x[:, t]
        out.append(h.unsqueeze(1))
    return torch.cat(out, dim=1) + h.unsqueeze(1)


def written(net: Net, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        decay = x[..., t, :].sigmoid()
        h = decay * h + x[:, t]
        out[:, t] = (h * decay).to(out.dtype)
    return out * x


def backward_in_time(net: Net, x: Tensor) -> Tensor:
    h, out = x.new_zeros(x.shape[0], WIDTH), []
    for t in reversed(range(x.shape[1])):
        h = torch.tanh(F.linear(h, net.inner.weight) + x[:, t])
        out.append(h)
    return torch.stack(out, 1) * torch.arange(1, STEPS + 1, dtype=x.dtype)[:, None]


def neighbours(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(1, x.shape[1]):
        h = h * x[:, t].cos() + x[:, t - 1] * net.rates[t]
    return h


def begun_with_none(net: Net, x: Tensor) -> Tensor:
    h, out = None, []
    for t in range(x.shape[1]):
        h = x[:, t] if h is None else h.sin() + x[:, t]
        out.append(h)
    return torch.stack(out, 1)


def two_states(net: Net, x: Tensor) -> Tensor:
    a = b = x.new_ones(x.shape[0], WIDTH)
    last = b
    for t in range(x.shape[1]):
        a, b = b * x[:, t], a + x[:, t]
        last = a * b.sigmoid()
    return last


def unbound(net: Net, x: Tensor) -> Tensor:
    h, out = x.new_zeros(x.shape[0], WIDTH), []
    for part in x.unbind(1):
        h = torch.tanh(F.linear(h, net.inner.weight) + part)
        out.append(h)
    return torch.stack(out, 1)


def enumerated(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t, part in enumerate(torch.unbind(x, 1)):
        h = h * part + net.rates[t]
    return h


def nested(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        for k in range(2):
            h = (net.inner(h) * net.rates[k]).tanh() + sum(x[:, t] * n for n in range(2))
    return h


def masked(net: Net, x: Tensor) -> Tensor:
    h, there = torch.zeros_like(x[:, 0]), x[..., 0] > 0
    for t in range(x.shape[1]):
        with torch.no_grad():
            gate = x[:, t].sigmoid()
        h = torch.where(there[:, t, None], h * gate + x[:, t], h)
    return h


def twice(net: Net, x: Tensor) -> Tensor:
    return listed(net, listed(net, x))


def by_other_names(net: Net, x: Tensor) -> Tensor:
    h = other.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = sigmoid(other.tanh(h) + x[:, t]) * h.shape[-1]
    return h


def summed(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0], []
    total = torch.zeros_like(h)
    times = 1.0
    for t in range(x.shape[1]):
        h = h.sin() * x[:, t]
        total += h
        times *= 1 + h.pow(2).mean()
        out.append(h)
    return torch.stack(out, 1) + total[:, None] * times


def layers_called(net: Net, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], WIDTH)
    c = h
    for t in range(x.shape[1]):
        h, c = net.cell(net.layers(x[:, t]), (h, c))
    return h + c


def tuple_carried(net: Net, x: Tensor) -> Tensor:
    state, out = (x[:, 0] * 0, (x[:, 0].cos(), 2)), []
    for t in range(x.shape[1]):
        a, (b, n) = state
        a = torch.tanh(a * b + x[:, t])
        state = (a, (b * 0.5 + a, n))
        out.append(a * n)
    return torch.stack(out, 1) + state[1][0][:, None]


def cut_up(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        a, b = (h + x[:, t]).chunk(2, -1)
        h = torch.cat([a.tanh() * net.rates[:2], b - net.rates[2:4]], -1)
    return h


def cut_lists(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0], []
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out.append(h)
    return torch.stack(out[::-1], 1)[:, 1:-1] * torch.stack(out[1:-1], 1) + torch.cat(out[::3][:1], 1)[:, None]


def filled_for_the_caller(net: Net, x: Tensor) -> Tensor:
    def fill(h: Tensor, out: list[Tensor]) -> Tensor:
        for t in range(x.shape[1]):
            h = h.sin() + x[:, t]
            out.append(h)
        return h

    states: list[Tensor] = [x[:, 0]]
    same = states
    last = fill(x[:, 0], states)
    return [x[:, 1], *same][2] * len(states) + sum(states) + last + torch.stack(same, 1).sum(1)


def advantages(net: Net, x: Tensor) -> Tensor:
    rewards, values, out = x[:, :-1], x.detach().cos() * net.rates[: x.shape[1], None], []
    found = 0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + 0.9 * values[:, t + 1] - values[:, t]
        found = delta + 0.8 * found
        out.append(found)
    return torch.stack(out[::-1], 1)


def with_a_default(net: Net, x: Tensor, *, scale: Callable[[Tensor], Tensor] = lambda x: x * 2) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
    return scale(h)


LOOPS = [unbound, enumerated, listed, joined, backward_in_time, neighbours, two_states]
LOOPS += [by_other_names, summed, layers_called, tuple_carried, cut_up, cut_lists]
LOOPS += [filled_for_the_caller, advantages, with_a_default, written]


def ends_early(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        if t == 8:
            break
    return h


def counted(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t] * t
    return h


def told_apart(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        h = h.sin() + (x[:, t] if t % 2 else x[:, t].cos())
    return h


def last_of_list(net: Net, x: Tensor) -> Tensor:
    out: list[Tensor] = []
    for t in range(x.shape[1]):
        before = out[-1] if out else x[:, 0]
        out.append(before.sin() + x[:, t])
    return torch.stack(out)


def hidden_dict(net: Net, x: Tensor) -> Tensor:
    h, seen = x[:, 0], {"x": x[:, 0]}
    for t in range(x.shape[1]):
        h = h + x[:, t] * seen["x"]
        seen["x"] = x[:, t]
    return h


def read_while_written(net: Net, x: Tensor) -> Tensor:
    out = x.clone()
    for t in range(x.shape[1]):
        out[:, t] = out.sum(1).sin() * x[:, t]
    return out


def shifted_while_written(net: Net, x: Tensor) -> Tensor:
    out = x.clone()
    for t in range(1, x.shape[1]):
        out[:, t] = out[:, t - 1] * 0.5 + x[:, t]
    return out


def counting_buffer(net: Net, x: Tensor) -> Tensor:
    h = x[:, 0]
    for t in range(x.shape[1]):
        net.count.add_(1.0)
        h = h.sin() + x[:, t]
    return h * net.count


def grown(net: Net, x: Tensor) -> Tensor:
    h = x[:, :1]
    for t in range(x.shape[1]):
        h = torch.cat([h, x[:, t : t + 1]], 1)
    return h


def over_layers(net: Net, x: Tensor) -> Tensor:
    for layer in range(STEPS):
        x = net.inner(x) * net.rates[layer]
    return x


def grown_in_place(net: Net, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h += net.inner(x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def view_of_carried(net: Net, x: Tensor) -> Tensor:
    w = net.inner(x).clone()
    h = w[:, 3]
    for t in range(x.shape[1]):
        h += x[:, t]
    return w + x


def two_back(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    out = [h] * 2
    for t in range(x.shape[1]):
        h = torch.tanh(F.linear(out[-2], net.inner.weight) + x[:, t])
        out.append(h)
    return torch.stack(out, 1)


def by_length(net: Net, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t] * (2.0 if len(out) > 5 else 1.0)
        out.append(h)
    return torch.stack(out, 1)


def through_a_view(net: Net, x: Tensor) -> Tensor:
    h, w = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        w[:, t][:, :2] = h[:, :2]
    return w


class Delayed(nn.Module):
    """Gives what it was given two calls before."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.p = self.q = start

    def forward(self, z: Tensor) -> Tensor:
        found, self.q, self.p = self.q * 0.5 + z, self.p, z
        return found


def stateful_cell(net: Net, x: Tensor) -> Tensor:
    norm, h = Delayed(torch.zeros_like(x[:, 0])), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = norm(F.linear(h, net.inner.weight) + x[:, t])
    return h


def stateful_method(net: Net, x: Tensor) -> Tensor:
    class Kept:
        norm = Delayed(torch.zeros_like(x[:, 0]))

    h, kept = torch.zeros_like(x[:, 0]), Kept()
    for t in range(x.shape[1]):
        h = kept.norm(h.sin() + x[:, t])
    return h


def complex_states(net: Net, x: Tensor) -> Tensor:
    turn = torch.polar(net.rates[:WIDTH], net.rates[:WIDTH])
    h, out = torch.zeros_like(x[:, 0]) * turn, []
    for t in range(x.shape[1]):
        h = turn * h + x[:, t]
        out.append(h)
    return torch.stack(out, 1).abs()


def flagged_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.inner(x[:, 0])
    first = h
    for t in range(x.shape[1]):
        h = F.leaky_relu(h, 0.5, True) + x[:, t]
    return h + first


def summed_with_another_name(net: Net, x: Tensor) -> Tensor:
    total = torch.zeros_like(x[:, 0])
    same = total
    for t in range(x.shape[1]):
        total += x[:, t].sin()
    return same * 2


def summed_where_zeros_are_kept(net: Net, x: Tensor) -> Tensor:
    kept = x[:, 1].clone()

    class Own:
        def zeros(self) -> Tensor:
            return kept

    own = Own()
    total = own.zeros()
    for t in range(x.shape[1]):
        total += x[:, t].sin()
    return kept * 2


def layer_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.inner(x[:, 0])
    first = h
    for t in range(x.shape[1]):
        h = net.in_place(h) + x[:, t]
    return h + first


def layer_with_a_hook(net: Net, x: Tensor) -> Tensor:
    h, seen = x[:, 0], [x[:, 0]]

    def hook(module: nn.Module, given: object, found: Tensor) -> Tensor:
        seen.append(found)
        return found + seen[-2]

    layer = nn.Identity()
    layer.register_forward_hook(hook)
    for t in range(x.shape[1]):
        h = layer(h.sin() * x[:, t])
    return h


def part_of_a_list(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0], [x[:, 0]]
    same = out
    for t in range(x.shape[1]):
        h = (same[-1] + h).sin() + x[:, t]
        out.append(h)
    return h


def function_of_ones_own(net: Net, x: Tensor) -> Tensor:
    calls = [0.0]

    def own(h: Tensor) -> Tensor:
        calls[0] += 1.0
        return h.sin() * calls[0]

    h = x[:, 0]
    for t in range(x.shape[1]):
        h = own(h) + x[:, t]
    return h


def counted_from_one(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t, part in enumerate(x[:, 1:].unbind(1), 1):
        h = h.sin() * part + net.rates[t]
    return h


def changed_after_it(net: Net, x: Tensor) -> Tensor:
    h, out = net.inner(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t]
        out.append(h)
    h += 1.0
    return out[-1] * out[0]


def given_before_it_is_changed(net: Net, x: Tensor) -> Tensor:
    h, out = torch.zeros_like(x[:, 0]), []
    start = h
    for t in range(x.shape[1]):
        out.append(h)
        h = h.sin() + x[:, t]
    start += 1.0
    return out[0] + out[-1]


def flag_that_is_named(net: Net, x: Tensor) -> Tensor:
    flag, h = 1, net.inner(x[:, 0])
    first = h
    for t in range(x.shape[1]):
        h = F.leaky_relu(h, 0.5, flag) + x[:, t]
    return h + first


def list_by_another_name(net: Net, x: Tensor) -> Tensor:
    h, out = x[:, 0], []
    same = out
    for t in range(x.shape[1]):
        h = h.sin() + x[:, t] * len(same)
        out.append(h)
    return torch.stack(out, 1)


def object_that_counts(net: Net, x: Tensor) -> Tensor:
    class Counts:
        count = 0

        def __rmul__(self, other: Tensor) -> Tensor:
            self.count += 1
            return other.sin() * self.count

        __torch_function__ = None

    h, counts = x[:, 0], Counts()
    for t in range(x.shape[1]):
        h = h * counts + x[:, t]
    return h


NO_LOOPS = [
    *(counted_from_one, changed_after_it, given_before_it_is_changed, flag_that_is_named, list_by_another_name),
    object_that_counts,
    *(flagged_in_place, summed_with_another_name, summed_where_zeros_are_kept),
    *(layer_in_place, layer_with_a_hook, part_of_a_list, function_of_ones_own),
    *(nested, masked, begun_with_none, grown_in_place, view_of_carried, two_back, by_length, through_a_view),
    *(stateful_cell, stateful_method, complex_states),
    *(ends_early, counted, told_apart, last_of_list, hidden_dict, read_while_written, shifted_while_written),
    *(counting_buffer, grown, over_layers),
]


@pytest.mark.parametrize("body", LOOPS)
def test_a_loop_whose_steps_are_alike_is_one_op(body: Callable[[Net, Tensor], Tensor]) -> None:
    program = held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == 2


@pytest.mark.parametrize("body", NO_LOOPS)
def test_other_loops_are_run_step_by_step(body: Callable[[Net, Tensor], Tensor]) -> None:
    program = held_against_eager(Net(body).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == 0


def test_a_loop_in_a_function_called_twice_is_two() -> None:
    program = held_against_eager(Net(twice).double(), {"x": torch.randn(3, STEPS, WIDTH, dtype=torch.float64)})
    assert num_loops(program) == 4


def test_a_loop_without_steps_leaves_names_alone() -> None:
    def empty(net: Net, x: Tensor) -> Tensor:
        h = x[:, 0]
        for t in range(x.shape[1], x.shape[1]):
            other = x[:, t] + h
            h = other
        return h

    assert num_loops(held_against_eager(Net(empty).double(), {"x": torch.randn(3, 2, WIDTH).double()})) == 0


def test_a_step_that_draws_is_not_repeated() -> None:
    def noisy(net: Net, x: Tensor) -> Tensor:
        h = x[:, 0]
        for t in range(x.shape[1]):
            h = F.dropout(h.sin(), 0.5) + x[:, t]
        return h

    program = capture(Net(noisy), {"x": torch.randn(3, STEPS, WIDTH)})
    assert num_loops(program) == 0
    drawn = [op for kind in program.kinds for op in kind.graph.ops if op.target == "paraplan.dropout"]
    assert len({op.args[3] for op in drawn}) > 1 or len(program.segments) > 1


def test_a_cell_of_torch_keeps_nothing_from_call_to_call() -> None:
    model = LSTM().double()
    tokens = torch.randint(0, 48, (4, 2 + STEPS))
    assert num_loops(held_against_eager(model, {"tokens": tokens})) == 2


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (function_of_ones_own, "a step calls own, which may keep something"),
        (ends_early, "`if t == 8:`, may do more than"),
        (view_of_carried, r"line \d+, `h \+= x\[:, t\]`"),
        (listed, None),
    ],
)
def test_a_long_loop_that_is_run_step_by_step_is_told_of(
    body: Callable[[Net, Tensor], Tensor], why: str | None
) -> None:
    given = {"x": torch.randn(3, 64, WIDTH)}
    if why is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            capture(Net(body), given)
    else:
        with pytest.warns(UserWarning, match=rf"test_python_loops.py:\d+: this loop.* step by step, 64 of them.*{why}"):
            capture(Net(body), given)


def test_the_code_of_functions_is_as_before() -> None:
    before = listed.__code__, written.__code__
    capture(Net(listed), {"x": torch.randn(3, STEPS, WIDTH)})
    assert (listed.__code__, written.__code__) == before
    assert "__paraplan_loop__" not in globals()
