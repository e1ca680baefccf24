"""What models are written with: graphs, bags, dataclasses, checkpoints, functions of autograd, writes in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.small import Small, made

BATCH, WIDTH, NODES, EDGES, CLASSES = 8, 16, 6, 12, 4


class GraphNetwork(nn.Module):
    """Graph convolutions (Kipf, Welling 2017) over one graph whose edges are a tensor: index_select and index_add."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.drop = nn.Dropout(dropout)

    def spread(self, x: Tensor, edges: Tensor) -> Tensor:
        """Means over the neighbours, itself included."""
        ones = x.new_ones(edges.shape[1], 1)
        degree = torch.ones(x.shape[0], 1, dtype=x.dtype).index_add(0, edges[1], ones)
        return torch.zeros_like(x).index_add_(0, edges[1], x.index_select(0, edges[0])).add_(x) / degree

    def forward(self, nodes: Tensor, labels: Tensor, edges: Tensor) -> Tensor:
        """Loss of the nodes' classes."""
        x = F.relu(self.spread(self.first(nodes), edges))
        return F.cross_entropy(self.spread(self.second(self.drop(x)), edges), labels)


def graph(dropout: float) -> Small:
    """One graph: nodes are the batch, edges go to all."""
    inputs = {
        "nodes": lambda: torch.randn(BATCH, WIDTH),
        "labels": lambda: torch.randint(0, CLASSES, (BATCH,)),
        "edges": lambda: torch.randint(0, BATCH, (2, EDGES)),
    }
    return made("graph", lambda: GraphNetwork(dropout), inputs, batch_dims={"edges": None})


class GraphAttention(nn.Module):
    """Graph attention (Velickovic et al. 2018) over batches of graphs: scatter_add, scatter_reduce, gather."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into, self.score = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2 * WIDTH, 1)
        self.head, self.drop = nn.Linear(WIDTH, CLASSES), nn.Dropout(dropout)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        """Loss of the graphs' classes."""
        x = self.into(nodes)
        at = edges.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
        sender, receiver = x.gather(1, at[:, 0]), x.gather(1, at[:, 1])
        score = F.leaky_relu(self.score(torch.cat([sender, receiver], -1)).squeeze(-1), 0.2)
        most = score.new_full(x.shape[:2], -1e9).scatter_reduce(1, edges[:, 1], score, "amax")
        weight = (score - most.gather(1, edges[:, 1]).detach()).exp()
        total = torch.zeros_like(x[..., 0]).scatter_add_(1, edges[:, 1], weight)
        weight = self.drop(weight / total.gather(1, edges[:, 1]))
        mixed = torch.zeros_like(x).scatter_add(1, at[:, 1], weight.unsqueeze(-1) * sender)
        return F.nll_loss(F.log_softmax(self.head(F.elu(mixed).mean(1)), -1), labels)


def graphs(dropout: float) -> Small:
    """Small graphs of equal size."""
    inputs = {
        "nodes": lambda: torch.randn(BATCH, NODES, WIDTH),
        "edges": lambda: torch.randint(0, NODES, (BATCH, 2, EDGES)),
        "labels": lambda: torch.randint(0, CLASSES, (BATCH,)),
    }
    return made("graphs", lambda: GraphAttention(dropout), inputs)


class Bags(nn.Module):
    """EmbeddingBag in its modes, a lookup table with weights, and a margin ranking loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total = nn.EmbeddingBag(30, WIDTH, mode="mean"), nn.EmbeddingBag(30, WIDTH, mode="sum")
        self.most = nn.EmbeddingBag(30, WIDTH, mode="max")
        self.head = nn.Linear(3 * WIDTH, 1)

    def forward(self, bags: Tensor, weights: Tensor, sign: Tensor) -> Tensor:
        """Ranking loss of neighbours."""
        x = torch.cat([self.mean(bags), self.total(bags, per_sample_weights=weights), self.most(bags)], -1)
        score = self.head(torch.tanh(x)).squeeze(-1)
        return F.margin_ranking_loss(score, score.roll(1, 0), sign, margin=0.1)


def bags(dropout: float) -> Small:
    """Bags of five."""
    inputs = {
        "bags": lambda: torch.randint(0, 30, (BATCH, 5)),
        "weights": lambda: torch.rand(BATCH, 5),
        "sign": lambda: torch.randint(0, 2, (BATCH,)) * 2.0 - 1,
    }
    return made("bags", Bags, inputs)


@dataclass
class Found:
    """What `Checkpointed` returns."""

    loss: Tensor
    scores: Tensor


class Checkpointed(nn.Module):
    """Blocks under torch's checkpoint(), keyword inputs, a dataclass returned."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, WIDTH)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, *, labels: Tensor | None = None) -> Found:
        """The loss and the scores."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        scores = self.head(x)
        return Found(F.cross_entropy(scores, labels), scores)


def features(width: int = WIDTH) -> Tensor:
    """Rows of features."""
    return torch.randn(BATCH, width)


def labels() -> Tensor:
    """A class for each row."""
    return torch.randint(0, CLASSES, (BATCH,))


def checkpointed(dropout: float) -> Small:
    """Features and classes."""
    return made("checkpointed", lambda: Checkpointed(dropout), {"x": features, "labels": labels})


class Surrogate(torch.autograd.Function):
    """A step forward and a fast sigmoid backward (Zenke, Ganguli 2018)."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """One where positive."""
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        """The surrogate's slope."""
        (x,) = ctx.saved_tensors
        return grad / (1 + 5 * x.abs()) ** 2


class Spiking(nn.Module):
    """Leaky integrate-and-fire neurons: a function of autograd's own, called in a loop, state written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Loss of the rates."""
        state = torch.zeros_like(x)
        rates = x.new_zeros(x.shape[0], CLASSES)
        for _ in range(3):
            state = 0.9 * state + self.into(x)
            fired = Surrogate.apply(state - 0.5)
            state = state - fired.detach() * 0.5
            rates += self.out(fired)
        return F.cross_entropy(rates / 3, labels)


def spiking(dropout: float) -> Small:
    """Features and classes."""
    return made("spiking", Spiking, {"x": features, "labels": labels})


class InPlace(nn.Module):
    """Tensors written in place: slices, masks, fills, accumulated sums."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.drop = nn.Dropout(dropout, inplace=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        y = self.first(x)
        y[:, : WIDTH // 2] *= 2.0
        y[:, WIDTH // 2 :] = torch.tanh(y[:, WIDTH // 2 :])
        y.masked_fill_(x > 1.5, 0.0).clamp_(-3, 3)
        out = x.new_empty(x.shape)
        out[:, ::2] = y[:, ::2]
        out[:, 1::2] = y[:, 1::2].relu_()
        out = self.drop(out.cumsum(-1).mul_(0.1))
        return F.cross_entropy(self.second(out), labels)


def in_place(dropout: float) -> Small:
    """Features and classes."""
    return made("in_place", lambda: InPlace(dropout), {"x": features, "labels": labels})


class Contrast(nn.Module):
    """Two views and a momentum-free InfoNCE loss (Chen et al. 2020), einsum throughout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mix = nn.Parameter(0.3 * torch.randn(4, 4, WIDTH // 4))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.heat, self.drop = nn.Parameter(torch.tensor(1.0)), nn.Dropout(dropout)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """Every row against every other."""
        both = torch.cat([one, two]).unflatten(-1, (4, -1))
        both = torch.einsum("bhd,hgd->bgd", both, self.mix) + torch.einsum(
            "bhd,bgd,bgh->bhd", both, both, both @ both.mT
        )
        x = F.normalize(self.head(self.drop(both.flatten(1))), dim=-1)
        near = torch.einsum("id,jd->ij", x, x) * self.heat.exp()
        near = near.masked_fill(torch.eye(len(x), dtype=torch.bool), float("-inf"))
        return F.cross_entropy(near, torch.arange(len(x)).roll(len(x) // 2))


def contrast(dropout: float) -> Small:
    """Two views."""
    return made("contrast", lambda: Contrast(dropout), {"one": features, "two": features})


class Routed(nn.Module):
    """A mixture whose tokens are sent by index: topk, a loop over experts, index_add."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (
            nn.Parameter(0.1 * torch.randn(4, WIDTH, 32)),
            nn.Parameter(0.1 * torch.randn(4, 32, WIDTH)),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared error; two experts a row, slots by scatter."""
        weight, chosen = self.gate(x).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        rows = order // 2
        sent = x.index_select(0, rows)
        expert = F.one_hot(chosen.flatten().index_select(0, order), 4).to(x.dtype)
        hidden = F.silu(torch.einsum("nd,ne,edh->nh", sent, expert, self.up))
        back = torch.einsum("nh,ne,ehd->nd", hidden, expert, self.down) * weight.flatten()[order].unsqueeze(-1)
        return F.mse_loss(self.drop(torch.zeros_like(x).index_add(0, rows, back)), y)


def routed(dropout: float) -> Small:
    """Features in, features out."""
    return made("routed", lambda: Routed(dropout), {"x": features, "y": features})


class Metrics(nn.Module):
    """Triplets by distance, a quantile loss, a Cholesky factor: numbers a statistician asks for."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softsign(), nn.Dropout(dropout), nn.Linear(WIDTH, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Three losses."""
        z = self.body(x)
        triplet = F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0), margin=0.5)
        off = y[:, :6] - z
        quantile = torch.maximum(0.9 * off, -0.1 * off).mean()
        spread = torch.linalg.cholesky(z.T @ z / len(z) + torch.eye(6)).diagonal().log().sum()
        return triplet + quantile - 0.01 * spread + 0.01 * torch.logsumexp(z, 0).std()


def metrics(dropout: float) -> Small:
    """Features and targets."""
    return made("metrics", lambda: Metrics(dropout), {"x": features, "y": features})


MODELS: dict[str, Callable[[float], Small]] = {
    "graph": graph,
    "graphs": graphs,
    "bags": bags,
    "checkpointed": checkpointed,
    "spiking": spiking,
    "in_place": in_place,
    "contrast": contrast,
    "routed": routed,
    "metrics": metrics,
}
