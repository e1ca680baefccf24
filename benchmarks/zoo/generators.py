"""Images made and unmade: a GAN's generator and critic, autoencoders, all kinds of norms and convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.zoo.small import Small, made

BATCH, SIZE, WIDTH, LATENT = 8, 8, 8, 4


def pictures() -> Tensor:
    """Small pictures."""
    return torch.randn(BATCH, 3, SIZE, SIZE)


class Generator(nn.Module):
    """DCGAN's generator (Radford et al. 2016) against a critic whose weights are frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.start = nn.Linear(LATENT, WIDTH * 4)
        self.body = nn.Sequential(
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.Dropout(dropout),
            nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(WIDTH, 1, 4))
        self.critic.requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        """The loss of being found out."""
        x = self.body(self.start(noise).view(-1, WIDTH, 2, 2))
        judged = self.critic(x).flatten()
        return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


def generator(dropout: float) -> Small:
    """Noise."""
    return made("generator", lambda: Generator(dropout), {"noise": lambda: torch.randn(BATCH, LATENT)})


class Critic(nn.Module):
    """A discriminator under spectral norm (Miyato et al. 2018), hinge loss, real and made pictures in one batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(3, WIDTH, 3, 2, 1)),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Dropout2d(dropout),
            parametrizations.spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(WIDTH * 4, 1)),
        )

    def forward(self, real: Tensor, made_up: Tensor) -> Tensor:
        """Hinge loss."""
        right, wrong = self.body(torch.cat([real, made_up])).chunk(2)
        return F.relu(1 - right).mean() + F.relu(1 + wrong).mean()


def critic(dropout: float) -> Small:
    """Pictures and made-up ones."""
    return made("critic", lambda: Critic(dropout), {"real": pictures, "made_up": pictures})


class Autoencoder(nn.Module):
    """A variational autoencoder (Kingma, Welling 2014) that takes its noise as an input, or draws it."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.down = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.SiLU(), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1), nn.SiLU())
        self.mean, self.log_var = nn.Linear(WIDTH * 4, LATENT), nn.Linear(WIDTH * 4, LATENT)
        self.back = nn.Linear(LATENT, WIDTH * 4)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, WIDTH, 3, 2, 1, output_padding=1),
            nn.SiLU(),
            nn.Upsample(scale_factor=2, mode="nearest"),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
        )

    def forward(self, pixels: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Reconstruction and divergence."""
        x = self.down(pixels).flatten(1)
        mean, log_var = self.mean(x), self.log_var(x)
        noise = torch.randn_like(mean) if self.draws else noise
        z = mean + noise * torch.exp(0.5 * log_var)
        made_up = self.up(self.back(z).view(-1, WIDTH, 2, 2))
        apart = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), dim=1).mean()
        return {"loss": F.mse_loss(made_up, pixels) + 0.1 * apart, "latent": z}


def autoencoder(draws: bool) -> Small:
    """Pictures and noise."""
    inputs = {"pixels": pictures, "noise": lambda: torch.randn(BATCH, LATENT)}
    return made("autoencoder", lambda: Autoencoder(draws), inputs)


class Quantiser(nn.Module):
    """VQ-VAE (van den Oord et al. 2017): the nearest code by argmin, gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Conv2d(3, WIDTH, 2, 2), nn.ConvTranspose2d(WIDTH, 3, 2, 2)
        self.codes = nn.Embedding(12, WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """Reconstruction, codebook and commitment."""
        x = self.into(pixels).permute(0, 2, 3, 1)
        far = torch.cdist(x.detach().flatten(0, 2), self.codes.weight.detach())
        code = self.codes(far.argmin(-1)).view(x.shape)
        apart = F.mse_loss(code, x.detach()) + 0.25 * F.mse_loss(x, code.detach())
        through = x + (code - x).detach()
        return F.l1_loss(self.back(through.permute(0, 3, 1, 2)), pixels) + apart


def quantiser(dropout: float) -> Small:
    """Pictures; there is no dropout."""
    return made("quantiser", Quantiser, {"pixels": pictures})


class Norms(nn.Module):
    """Depthwise, grouped, dilated, 1-d and 3-d convolutions; group, instance, layer, local and RMS norms."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.GroupNorm(2, WIDTH),
            nn.PReLU(WIDTH),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=WIDTH),
            nn.InstanceNorm2d(WIDTH, affine=True),
            nn.Hardswish(),
            nn.Conv2d(WIDTH, WIDTH, 1, groups=2),
            nn.LayerNorm([WIDTH, SIZE, SIZE]),
            nn.ELU(),
            nn.Dropout2d(dropout),
            nn.AvgPool2d(2),
            nn.LocalResponseNorm(3),
            nn.Mish(),
        )
        self.volume = nn.Conv3d(1, 2, (3, 1, 1), padding=(1, 0, 0))
        self.line = parametrizations.weight_norm(nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1, padding_mode="reflect"))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Bilinear(WIDTH, WIDTH, 1)

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        """Huber loss of one number a picture."""
        x = self.volume(self.body(pixels).unsqueeze(1)).flatten(1, 2).flatten(2)
        x = self.norm(self.line(x).amax(-1))
        return F.huber_loss(self.head(x, F.softplus(x)).squeeze(-1), target)


def norms(dropout: float) -> Small:
    """Pictures and a number for each."""
    return made("norms", lambda: Norms(dropout), {"pixels": pictures, "target": lambda: torch.randn(BATCH)})


class Resampler(nn.Module):
    """Pixel shuffling, bilinear resampling, a spatial transformer (Jaderberg et al. 2015), total variation."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(3 * SIZE * SIZE, 6)
        nn.init.zeros_(self.place.weight)
        self.place.bias.data = torch.tensor([0.9, 0.1, 0.05, -0.1, 0.9, 0.05])
        self.fine = nn.Conv2d(3, 12, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """The picture again, at twice its size."""
        grid = F.affine_grid(self.place(pixels.flatten(1)).view(-1, 2, 3), list(pixels.shape), align_corners=False)
        x = F.pixel_shuffle(self.fine(F.grid_sample(pixels, grid, align_corners=False)), 2)
        wanted = F.interpolate(pixels, scale_factor=2, mode="bilinear", align_corners=False)
        rough = x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()
        return F.mse_loss(x, wanted) + 0.01 * rough


def resampler(dropout: float) -> Small:
    """Pictures; there is no dropout."""
    return made("resampler", Resampler, {"pixels": pictures})


MODELS: dict[str, Callable[[float], Small]] = {
    "generator": generator,
    "critic": critic,
    "vae": lambda dropout: autoencoder(draws=bool(dropout)),
    "quantiser": quantiser,
    "norms": norms,
    "resampler": resampler,
}
