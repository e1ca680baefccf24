"""Sequence models as a user writes them: taggers, torch's own transformers, Fourier mixing, CTC, a loop over time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.small import Small, made

WORDS, WIDTH, BATCH, SEQ, TAGS = 40, 16, 8, 6, 5


def tokens(count: int = WORDS, rows: int = BATCH, length: int = SEQ) -> Tensor:
    """Random token numbers."""
    return torch.randint(0, count, (rows, length))


class Tagger(nn.Module):
    """A recurrent layer in both directions and a tag for every word; the loss is a function of its own."""

    def __init__(self, cell: type[nn.LSTM | nn.GRU | nn.RNN], dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.drop = nn.Dropout(dropout)
        self.cell = cell(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(2 * WIDTH, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        """Scores [batch, seq, tags]."""
        return self.tags(self.cell(self.drop(self.words(words)))[0])


def tag_loss(scores: object, batch: dict[str, Tensor]) -> Tensor:
    """Tags are the words, folded."""
    assert isinstance(scores, Tensor)
    return F.cross_entropy(scores.flatten(0, 1), (batch["words"] % TAGS).flatten())


def tagger(cell: type[nn.LSTM | nn.GRU | nn.RNN], dropout: float) -> Small:
    """Words and nothing else."""
    return made("tagger", lambda: Tagger(cell, dropout), {"words": tokens}, tag_loss)


class Encoder(nn.Module):
    """nn.TransformerEncoder, with padding masked, and a class of the mean."""

    def __init__(self, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(SEQ, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout, F.gelu, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, TAGS)

    def forward(self, words: Tensor, classes: Tensor) -> Tensor:
        """The loss."""
        padding = words == 0
        x = self.layers(self.words(words) + self.places, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(x.dtype)
        return F.cross_entropy(self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1)), classes)


def encoder(dropout: float, norm_first: bool = False) -> Small:
    """Words and a class for each sentence."""
    inputs = {"words": tokens, "classes": lambda: torch.randint(0, TAGS, (BATCH,))}
    return made("encoder", lambda: Encoder(dropout, norm_first), inputs)


class Translator(nn.Module):
    """nn.Transformer: an encoder, a causal decoder, one table for both ends."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 1, 2, 32, dropout, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The loss of the next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        x = self.both(self.words(source), self.words(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        scores = F.linear(x, self.words.weight)
        return {"loss": F.cross_entropy(scores.transpose(1, 2), target[:, 1:], label_smoothing=0.1), "scores": scores}


def translator(dropout: float) -> Small:
    """Two sentences."""
    return made("translator", lambda: Translator(dropout), {"source": tokens, "target": tokens})


class SelfAttention(nn.Module):
    """nn.MultiheadAttention, sequence first, its weights looked at too."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, dropout, add_bias_kv=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A squared error and the attention's entropy."""
        x = x.transpose(0, 1)
        mixed, weights = self.attend(x, x, x)
        entropy = -(weights * (weights + 1e-6).log()).sum(-1).mean()
        return F.mse_loss(self.norm(x + mixed).transpose(0, 1), y) + 0.01 * entropy


def multihead(dropout: float) -> Small:
    """Features in, features out."""
    features = {name: lambda: torch.randn(BATCH, SEQ, WIDTH) for name in "xy"}
    return made("multihead", lambda: SelfAttention(dropout), features)


class Fourier(nn.Module):
    """FNet (Lee-Thorp et al. 2022): tokens mixed by the real part of a Fourier transform; a learned filter between."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.filter = nn.Parameter(0.02 * torch.randn(SEQ // 2 + 1, WIDTH, 2))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        """The loss of every word itself."""
        x = self.words(words)
        x = self.norm(x + torch.fft.fft2(x).real)
        x = x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter), n=SEQ, dim=1)
        x = self.norm(x + self.drop(self.down(F.gelu(self.up(x)))))
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), words.flatten())


def fourier(dropout: float) -> Small:
    """Words."""
    return made("fourier", lambda: Fourier(dropout), {"words": tokens})


class Recogniser(nn.Module):
    """Frames to letters by connectionist temporal classification (Graves et al. 2006)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.frames = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, TAGS)

    def forward(self, frames: Tensor, letters: Tensor, lengths: Tensor) -> Tensor:
        """The loss; every recording is as long as its frames."""
        x = F.relu(self.frames(frames)).transpose(1, 2)
        scores = self.head(self.drop(self.cell(x)[0])).log_softmax(-1).transpose(0, 1)
        whole = torch.full((frames.shape[0],), frames.shape[2], dtype=torch.int64)
        return F.ctc_loss(scores, letters, whole, lengths, zero_infinity=True)


def recogniser(dropout: float) -> Small:
    """Eight frames, up to three letters."""
    inputs = {
        "frames": lambda: torch.randn(BATCH, 4, 8),
        "letters": lambda: torch.randint(1, TAGS, (BATCH, 3)),
        "lengths": lambda: torch.randint(1, 4, (BATCH,)),
    }
    return made("recogniser", lambda: Recogniser(dropout), inputs)


class Controller(nn.Module):
    """A cell called in a Python loop, its states collected, with a gate that stops some rows."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.halt, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """The next input predicted at every step."""
        state, states, going = x.new_zeros(x.shape[0], WIDTH), [], x.new_ones(x.shape[0], 1)
        for step in range(x.shape[1] - 1):
            new = self.cell(self.drop(x[:, step]), state)
            state = torch.where(going > 0.2, new, state)
            going = going * torch.sigmoid(self.halt(state))
            states.append(state)
        return F.smooth_l1_loss(self.out(torch.stack(states, 1)), x[:, 1:])


def controller(dropout: float) -> Small:
    """Four steps of features."""
    return made("controller", lambda: Controller(dropout), {"x": lambda: torch.randn(BATCH, 4, WIDTH)})


MODELS: dict[str, Callable[[float], Small]] = {
    "tagger_lstm": lambda dropout: tagger(nn.LSTM, dropout),
    "tagger_gru": lambda dropout: tagger(nn.GRU, dropout),
    "tagger_rnn": lambda dropout: tagger(nn.RNN, dropout),
    "encoder": encoder,
    "encoder_prenorm": lambda dropout: encoder(dropout, norm_first=True),
    "translator": translator,
    "multihead": multihead,
    "fourier": fourier,
    "recogniser": recogniser,
    "controller": controller,
}
