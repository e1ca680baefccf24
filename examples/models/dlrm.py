"""DLRM (Naumov et al. 2019): dense features and many categorical ones, whose pairwise products are scored.

Categories of one size share a stack of tables [table, row, column], so that whole tables can lie on different ranks
(table-wise sharding) as well as rows or columns of each; others have tables of their own.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tables(nn.Module):
    """One row of each of several equal tables.

    Args:
        tables: how many.
        rows, columns: of each.
    """

    def __init__(self, tables: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tables, rows, columns) * columns**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, table] -> [batch, table, column]."""
        return self.weight[torch.arange(self.weight.shape[0], device=ids.device), ids]


def mlp(widths: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with ReLU after each."""
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain.from_iterable(layers))


class DLRM(nn.Module):
    """Clicks from features.

    Args:
        stack: (tables, rows) of the categories of one size.
        others: rows of the tables of their own; the last is read as a bag of several ids.
        columns: of every table.
        dense: number of dense features.
        hidden: width of the two perceptrons.
    """

    def __init__(
        self,
        stack: tuple[int, int] = (4, 24),
        others: tuple[int, ...] = (40, 16),
        columns: int = 8,
        dense: int = 6,
        hidden: int = 16,
    ) -> None:
        super().__init__()
        self.bottom = mlp((dense, hidden, columns))
        self.stack = Tables(*stack, columns)
        self.singles = nn.ModuleList(nn.Embedding(rows, columns) for rows in others[:-1])
        self.bag = nn.EmbeddingBag(others[-1], columns, mode="sum")
        count = 2 + stack[0] + len(self.singles)
        self.register_buffer("pairs", torch.tensor(list(itertools.combinations(range(count), 2))).t().contiguous())
        self.top = nn.Sequential(mlp((columns + count * (count - 1) // 2, hidden)), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, stacked: Tensor, single: Tensor, bag: Tensor, clicked: Tensor) -> Tensor:
        """The mean cross-entropy of the clicks.

        Args:
            dense: [batch, feature].
            stacked: [batch, table] ids of the stack.
            single: [batch, table] ids of the tables of their own.
            bag: [batch, id] ids of the bag.
            clicked: [batch].
        """
        x = self.bottom(dense)
        own = [table(single[:, index]) for index, table in enumerate(self.singles)]
        features = torch.cat([torch.stack([x, *own, self.bag(bag)], 1), self.stack(stacked)], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        crossed = products[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([x, crossed], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


def factory(batch: int = 8) -> tuple[DLRM, dict[str, Tensor]]:
    """A small model and a batch, for `paraplan plan examples.models.dlrm:factory`."""
    draw = torch.Generator().manual_seed(1)
    return DLRM(), {
        "dense": torch.randn(batch, 6, generator=draw),
        "stacked": torch.randint(0, 24, (batch, 4), generator=draw),
        "single": torch.randint(0, 40, (batch, 1), generator=draw),
        "bag": torch.randint(0, 16, (batch, 3), generator=draw),
        "clicked": torch.rand(batch, generator=draw).round(),
    }
