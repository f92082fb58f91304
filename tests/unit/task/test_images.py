"""Random transforms: exact where they can be, bounded and fresh everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from doll.task.images import draw, homographies, warp

pytestmark = pytest.mark.slow  # loads torch


def _images(count: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, side, side), dtype=np.uint8)


def _identity(count: int) -> np.ndarray:
    return np.broadcast_to(np.eye(3, dtype=np.float32), (count, 3, 3)).copy()


@pytest.mark.parametrize("side", [8, 28])
def test_the_identity_changes_nothing(side: int) -> None:
    images = _images(5, side)
    assert (warp(images, _identity(5)) == images).all()


@pytest.mark.parametrize("shape", [(8, 8), (6, 10)])
def test_a_shift_by_whole_pixels_moves_the_image_and_fills_with_zero(shape: tuple[int, int]) -> None:
    height, width = shape
    images = np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8)
    maps = _identity(3)
    maps[:, 0, 2] = 2 / width  # one pixel right in the source, in half sides
    maps[:, 1, 2] = -4 / height  # two pixels up
    moved = warp(images, maps)
    assert (moved[:, 2:, :-1] == images[:, :-2, 1:]).all()
    assert not moved[:, :2].any()
    assert not moved[:, :, -1].any()


def test_half_a_pixel_is_the_mean_of_neighbours() -> None:
    image = np.zeros((1, 8, 8), np.uint8)
    image[0, 3, 3] = 200
    maps = _identity(1)
    maps[0, 0, 2] = 1 / 8
    moved = warp(image, maps)
    assert moved[0, 3, 2:4].tolist() == [100, 100]
    assert moved.sum() == 200


def test_a_map_far_outside_reads_zero_and_never_past_the_array() -> None:
    maps = _identity(2)
    maps[0, :2, 2] = 50.0
    maps[1, :2, 2] = -50.0
    assert not warp(np.full((2, 8, 8), 255, np.uint8), maps).any()


def test_draws_stay_close_to_their_original() -> None:
    """At the corners of an 8x8 image, where it is largest, the source moves by less than 3 pixels."""
    maps = homographies(2000, np.random.default_rng(1))
    corners = np.array([[-1, 1, -1, 1], [-1, -1, 1, 1], [1, 1, 1, 1]], np.float32)
    source = maps @ corners
    moved = source[:, :2] / source[:, 2:] - corners[:2]
    assert np.abs(moved).max() * 4 < 3.0
    assert np.abs(moved).mean() * 4 > 0.3


def test_draw_is_reproducible_and_labels_follow_their_images() -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    for n in range(4):
        images[n, 2:6, 2:6] = 60 * n
    labels = np.arange(4, dtype=np.uint8)
    drawn, classes = draw(images, labels, 500, np.random.default_rng(5))
    again, _ = draw(images, labels, 500, np.random.default_rng(5))
    assert (drawn == again).all()
    assert (drawn[:, 3, 3] == 60 * classes).all()
    assert set(classes.tolist()) == {0, 1, 2, 3}
