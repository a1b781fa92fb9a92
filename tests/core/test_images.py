"""Images on their way into a model: crops, flips, brightness, contrast, standardisation."""

from __future__ import annotations

import pytest
import torch

from dfca.base.errors import ConfigError
from dfca.core.learning.images import NUMBERS, CentreCrop, Standardise, augmented, draw_changes
from dfca.core.method import Augment
from dfca.core.rng import stream

IMAGES = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).view(2, 3, 4, 5)


def drawn(**numbers: list[float]) -> torch.Tensor:
    """Give the random numbers of two images by hand; 0.5 where nothing is said."""
    order = ("top", "left", "flip", "brightness", "contrast")
    return torch.tensor([numbers.get(name, [0.5, 0.5]) for name in order])


def test_a_crop_is_where_it_was_drawn() -> None:
    changed = augmented(IMAGES, drawn(top=[0.0, 0.99], left=[0.99, 0.4]), Augment(crop=3))
    assert torch.equal(changed[0], IMAGES[0, :, 0:3, 2:5])
    assert torch.equal(changed[1], IMAGES[1, :, 1:4, 1:4])


def test_every_second_image_is_mirrored() -> None:
    changed = augmented(IMAGES, drawn(flip=[0.49, 0.5]), Augment(flip=True))
    assert torch.equal(changed[0], IMAGES[0].flip(2))
    assert torch.equal(changed[1], IMAGES[1])
    crop = augmented(IMAGES, drawn(top=[0.0, 0.0], left=[0.0, 0.0], flip=[0.0, 1.0]), Augment(crop=3, flip=True))
    assert torch.equal(crop[0], IMAGES[0, :, 0:3, 0:3].flip(2))


def test_brightness_is_added_and_contrast_is_about_the_mean_of_a_channel() -> None:
    changed = augmented(IMAGES, drawn(brightness=[1.0, 0.25]), Augment(brightness=4.0))
    torch.testing.assert_close(changed, IMAGES + torch.tensor([4.0, -2.0])[:, None, None, None])
    how = Augment(brightness=4.0, contrast=(0.5, 1.5))
    changed = augmented(IMAGES, drawn(brightness=[1.0, 0.5], contrast=[0.0, 1.0]), how)
    mean = IMAGES.mean(dim=(2, 3), keepdim=True)
    torch.testing.assert_close(changed[0], (mean + 0.5 * (IMAGES - mean))[0] + 4)
    torch.testing.assert_close(changed[1], (mean + 1.5 * (IMAGES - mean))[1])


def test_stacked_images_are_changed_like_single_ones_and_the_originals_stay() -> None:
    how = Augment(crop=3, flip=True, brightness=1.0, contrast=(0.2, 1.8))
    stacked = torch.stack([IMAGES, IMAGES + 100])
    before, numbers = stacked.clone(), draw_changes(2, 4, stream(0, "augment"))  # for 2 more images than there are
    changed = augmented(stacked, numbers, how)
    assert changed.shape == (2, 2, 3, 3, 3)
    for client in range(2):
        assert torch.equal(changed[client], augmented(stacked[client], numbers[client], how))
    assert torch.equal(stacked, before)


def test_what_is_drawn_follows_the_stream_and_covers_every_place() -> None:
    numbers = draw_changes(3, 4, stream(1, "augment", 0))
    assert numbers.shape == (3, NUMBERS, 4)
    assert torch.equal(numbers, draw_changes(3, 4, stream(1, "augment", 0)))
    image = torch.arange(25.0).view(1, 1, 5, 5)
    how = Augment(crop=4)
    corners = {float(augmented(image, one, how)[0, 0, 0, 0]) for one in draw_changes(100, 1, stream(1, "augment", 1))}
    assert corners == {0.0, 1.0, 5.0, 6.0}
    last = torch.full((NUMBERS, 1), 1 - 2**-24)  # the largest that is drawn
    assert augmented(image, last, how)[0, 0, 0, 0] == 6


def test_centres_and_standardised_images() -> None:
    assert torch.equal(CentreCrop(2)(IMAGES), IMAGES[..., 1:3, 1:3])
    assert CentreCrop(4)(IMAGES[..., :4]).shape == (2, 3, 4, 4)
    changed = Standardise()(IMAGES)
    torch.testing.assert_close(changed.mean(dim=(1, 2, 3)), torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(changed.std(dim=(1, 2, 3), correction=0), torch.ones(2, dtype=torch.float64))
    assert torch.equal(Standardise()(torch.full((1, 1, 3, 3), 7.0)), torch.zeros(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"crop": 0}, "data.augment.crop must be >= 1, got 0"),
        ({"brightness": -1.0}, "data.augment.brightness must be >= 0 and finite, got -1.0"),
        ({"contrast": (1.8, 0.2)}, "data.augment.contrast must be two factors 0 <= low <= high, got 1.8 and 0.2"),
    ],
)
def test_bad_options(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Augment(**options)
    assert str(error.value) == sentence
