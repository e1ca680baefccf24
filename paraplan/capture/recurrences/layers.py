"""Recurrent layers and cells taken apart while exporting: products and gates, in a marked loop or step by step.

torch keeps `nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells as single ops in an exported graph, with a loop over time
inside. A long sequence is a loop that is marked (`recurrences.markers`); the steps of a short one are ordinary ops, and
equal steps become segments of one kind. The products with the inputs are made for all steps at once, as torch's own
loop does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paraplan.capture.recurrences.markers import BEGIN, END, MIN_STEPS, STEP
from paraplan.kernels.torch_private import OpOverload

aten = torch.ops.aten
State = tuple[Tensor, ...]
# (products with the input, state, hidden weight, hidden bias) -> state, its first the step's result.
Step = Callable[[Tensor, State, Tensor, Tensor | None], State]


def _lstm_step(inner: Tensor, state: State, w: Tensor, b: Tensor | None) -> State:
    i, f, g, o = (inner + F.linear(state[0], w, b)).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(inner: Tensor, state: State, w: Tensor, b: Tensor | None) -> State:
    (r, z, n), (hr, hz, hn) = inner.chunk(3, -1), F.linear(state[0], w, b).chunk(3, -1)
    update, fresh = (z + hz).sigmoid(), (n + (r + hr).sigmoid() * hn).tanh()
    return (fresh + update * (state[0] - fresh),)


def _plain_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(inner: Tensor, state: State, w: Tensor, b: Tensor | None) -> State:
        return (activation(inner + F.linear(state[0], w, b)),)

    return step


_TANH, _RELU = _plain_step(torch.tanh), _plain_step(torch.relu)


def _cell(step: Step, many: bool) -> Callable[..., object]:
    def cell(
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> object:
        state = step(F.linear(x, w_ih, b_ih), tuple(hx) if many else (hx,), w_hh, b_hh)  # type: ignore[arg-type]
        return state if many else state[0]

    return cell


def _direction(
    step: Step,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    biased: bool,
    back: bool,
    loops: Iterator[int] | None,
) -> tuple[Tensor, State]:
    """One layer in one direction over x: [time, batch, width]; the results, and the last state."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = (rest[0], rest[1]) if biased else (None, None)
    project = rest[2 if biased else 0] if len(rest) > (2 if biased else 0) else None
    inner = F.linear(x, w_ih, b_ih)
    if loops is not None and x.shape[0] >= MIN_STEPS:

        def one(given: Tensor, carried: State) -> State:
            return _projected(step(given, carried, w_hh, b_hh), project)

        return _marked(one, inner, state, back, next(loops))
    results = []
    for time in reversed(range(x.shape[0])) if back else range(x.shape[0]):
        state = _projected(step(inner.select(0, time), state, w_hh, b_hh), project)
        results.append(state[0])
    return torch.stack(results[::-1] if back else results), state


def _projected(state: State, project: Tensor | None) -> State:
    """A state with its first projected."""
    return state if project is None else (F.linear(state[0], project), *state[1:])


def _marked(
    step: Callable[[Tensor, State], State], inner: Tensor, state: State, back: bool, loop: int
) -> tuple[Tensor, State]:
    """A direction as a marked loop over time."""
    carried = BEGIN(list(state), loop, 0)
    made = step(STEP(inner, 0, loop, 0), tuple(carried))
    *ends, results = END([*made, made[0]], [], len(made), inner.shape[0], back, loop, "")
    return results, tuple(ends)


def _layers(step: Step, many: bool, loops: Iterator[int] | None) -> Callable[..., tuple[Tensor, ...]]:
    def layers(  # noqa: PLR0913
        x: Tensor,
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        found = x.transpose(0, 1) if batch_first else x
        ways = 2 if bidirectional else 1
        each = len(params) // (num_layers * ways)
        first: Sequence[Tensor] = tuple(hx) if many else (hx,)  # type: ignore[assignment]
        last: list[State] = []
        for layer in range(num_layers):
            if layer and dropout and train:
                found = F.dropout(found, dropout)
            outs = []
            for way in range(ways):
                index = layer * ways + way
                weights = params[index * each : (index + 1) * each]
                begin = tuple(s[index] for s in first)
                out, state = _direction(step, found, begin, weights, has_biases, way == 1, loops)
                outs.append(out)
                last.append(state)
            found = torch.cat(outs, -1) if ways == 2 else outs[0]
        ends = (torch.stack(parts) for parts in zip(*last, strict=True))
        return (found.transpose(0, 1) if batch_first else found, *ends)

    return layers


def recurrent_layers() -> dict[OpOverload, Callable[..., object]]:
    """A decomposition table of recurrent ops, which writes all their steps out."""
    return {
        aten.lstm_cell.default: _cell(_lstm_step, True),
        aten.gru_cell.default: _cell(_gru_step, False),
        aten.rnn_tanh_cell.default: _cell(_TANH, False),
        aten.rnn_relu_cell.default: _cell(_RELU, False),
        aten.lstm.input: _layers(_lstm_step, True, None),
        aten.gru.input: _layers(_gru_step, False, None),
        aten.rnn_tanh.input: _layers(_TANH, False, None),
        aten.rnn_relu.input: _layers(_RELU, False, None),
    }


class RecurrentCalls:
    """Calls of torch's recurrent functions, with marked loops over long sequences.

    Torch works out even the shapes of a recurrent op step by step, so that none is called where loops are kept.
    """

    def __init__(self) -> None:
        loops = itertools.count(-1, -1)
        self._layers: dict[object, tuple[int, Callable[..., object]]] = {
            torch.lstm: (1, _layers(_lstm_step, True, loops)),
            torch.gru: (2, _layers(_gru_step, False, loops)),
            torch.rnn_tanh: (2, _layers(_TANH, False, loops)),
            torch.rnn_relu: (2, _layers(_RELU, False, loops)),
        }

    def of(self, func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Callable[..., object] | None:
        """What computes a call; None for other functions, and for packed sequences.

        Args:
            func, args, kwargs: the call.
        """
        place, layers = self._layers.get(func, (0, None))
        listed = place and not kwargs and len(args) > place and isinstance(args[place], (list, tuple))
        return layers if listed else None
