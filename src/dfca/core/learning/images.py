"""Images on their way into a model: crops and standardisation as its first layers, random changes in training.

A model with a crop takes whole images: its first layer cuts out their centres, so that it is chosen, scored, exported
and deployed on them. In the local steps of a round `augmented` cuts the crop before, at random, and the layer lets it
pass. What is drawn depends on the stream alone: a run that is resumed draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dfca.core.method import Augment

NUMBERS = 5
"""Numbers drawn for an image: row and column of the crop, flip, brightness, contrast."""


class CentreCrop(nn.Module):
    """Cut out the centres (n, c, side, side) of images (n, c, h, w)."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Cut; images of that side pass as they are."""
        top, left = (x.shape[-2] - self.side) // 2, (x.shape[-1] - self.side) // 2
        return x[..., top : top + self.side, left : left + self.side]


class Standardise(nn.Module):
    """Standardise each image x of m pixels and channels: (x - mean(x)) / max(std(x), 1 / sqrt(m))."""

    def forward(self, x: Tensor) -> Tensor:
        """Standardise images (n, *shape)."""
        dimensions = tuple(range(1, x.dim()))
        variance, mean = torch.var_mean(x, dim=dimensions, correction=0, keepdim=True)
        return (x - mean) / variance.clamp_min(1 / x[0].numel()).sqrt()


def draw_changes(steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """Draw the random numbers of local steps, evenly in [0, 1): (steps, NUMBERS, batch)."""
    return torch.rand(steps, NUMBERS, batch, generator=generator)


def augmented(x: Tensor, drawn: Tensor, how: Augment) -> Tensor:
    """Change images at random: x (..., n, c, h, w) -> (..., n, c, side, side), drawn (..., NUMBERS, n)."""
    drawn = drawn[..., : x.shape[-4]].to(x.device, x.dtype)
    if x.dim() > 4:
        lead = x.shape[:-3]
        flat = augmented(x.flatten(0, -4), drawn.transpose(0, -2).flatten(1), how)
        return flat.view(*lead, *flat.shape[1:])
    if how.crop is not None or how.flip:
        x = _cut(x, drawn, how)
    low, high = how.contrast
    if (low, high) != (1, 1):
        factor = low + (high - low) * drawn[4, :, None, None, None]
        shift = x.mean(dim=(2, 3), keepdim=True) * (1 - factor)
        if how.brightness:
            shift = shift + how.brightness * (2 * drawn[3, :, None, None, None] - 1)
        return torch.addcmul(shift, x, factor)
    return x + how.brightness * (2 * drawn[3, :, None, None, None] - 1) if how.brightness else x


def _cut(x: Tensor, drawn: Tensor, how: Augment) -> Tensor:
    """Crop and flip images by one gather."""
    count, channels, height, width = x.shape
    rows = torch.arange(how.crop or height, device=x.device)
    columns = torch.arange(how.crop or width, device=x.device).expand(count, -1)
    if how.flip:
        columns = torch.where(drawn[2, :, None] < 0.5, columns.flip(1), columns)
    top, left = _offsets(drawn[0], height - len(rows)), _offsets(drawn[1], width - columns.shape[1])
    places = ((rows + top) * width)[:, :, None] + (columns + left)[:, None, :]
    chosen = x.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, channels, -1))
    return chosen.view(count, channels, len(rows), columns.shape[1])


def _offsets(u: Tensor, most: int) -> Tensor:
    """Turn numbers in [0, 1) into offsets 0..most: (n,) -> (n, 1); rounding may reach the upper end."""
    return (u * (most + 1)).long().clamp_max(most)[:, None]
