"""Crops, resized crops, flips and normalisation, against plain loops, Pillow and pinned bytes."""

import hashlib
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from iterand import philox
from iterand.lab.data.dataset import Normalizer
from iterand.lab.data.decoding import resized_crop
from iterand.lab.data.images import ImageSplit, Resampler, crops, cutout_masks, resized_crops, words_of
from made_up_data import DEVIATION, MEAN, pixels, seeded

CPU = torch.device("cpu")
NORMALIZER = Normalizer("imagenet", CPU)


def words(index):
    """Made-up random words that depend on the index alone."""
    digests = [hashlib.sha256(b"words %d" % i).digest() for i in index.tolist()]
    columns = ([int.from_bytes(digest[4 * k : 4 * k + 4], "little") for digest in digests] for k in range(4))
    return [torch.tensor(column, dtype=torch.int64) for column in columns]


def made_up(count, side=32):
    return torch.from_numpy(np.random.PCG64(1).random_raw(count * 3 * side * side).astype(np.uint8)).view(
        count, 3, side, side
    )


def plain_crop(index, side, size):
    first, second, third, _ = (int(word) for word in words(torch.tensor([index])))
    places = side - size + 1
    return [second * places // 2**32, third * places // 2**32, size, size, int(first >= 2**31)]


def plain_resized_crop(index, height, width):
    """The same rule, in plain Python: one attempt after the other."""
    blocks = [[int(word) for word in words(torch.tensor([index + (k << 32)]))] for k in range(4)]
    attempts = [word for block in blocks[1:] for word in block][:10]
    flip, place_top, place_left = int(blocks[0][0] >= 2**31), blocks[0][1], blocks[0][2]
    for word in attempts:
        area = height * width * (0.08 + 0.92 * (word // 2**16 + 0.5) / 2**16)
        aspect = math.exp(math.log(3 / 4) + math.log(16 / 9) * (word % 2**16 + 0.5) / 2**16)
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = place_top * (height - box_height + 1) // 2**32
            left = place_left * (width - box_width + 1) // 2**32
            return [top, left, box_height, box_width, flip]
    if width / height < 3 / 4:
        box_height, box_width = round(width * 4 / 3), width
    elif width / height > 4 / 3:
        box_height, box_width = height, round(height * 4 / 3)
    else:
        box_height, box_width = height, width
    return [(height - box_height) // 2, (width - box_width) // 2, box_height, box_width, flip]


def half_up(value):
    return math.floor(value + Fraction(1, 2))


def plain_line(pixels, start, extent, size):
    """One line of 8-bit pixels resampled with a triangle, in fractions; the weights are multiples of 1 / 2**22."""
    scale = Fraction(extent, size)
    reach = max(scale, Fraction(1))
    line = []
    for x in range(size):
        centre = (x + Fraction(1, 2)) * scale
        shares = [max(Fraction(0), 1 - abs(i + Fraction(1, 2) - centre) / reach) for i in range(extent)]
        weights = [Fraction(half_up(share / sum(shares) * 2**22), 2**22) for share in shares]
        line.append(half_up(sum(weight * pixel for weight, pixel in zip(weights, pixels[start:]))))
    return line


class TestViews:
    def test_crops_follow_the_words(self):
        index = torch.arange(200)
        views = crops(words_of(index, words), 40, 40, 32)
        assert views.tolist() == [plain_crop(i, 40, 32) for i in range(200)]

    @pytest.mark.parametrize(("height", "width"), [(40, 40), (375, 500), (500, 375), (1200, 100), (60, 900), (1, 7)])
    def test_resized_crops_follow_the_words(self, height, width):
        index = torch.arange(300)
        views = resized_crops(words_of(index, words), height, width)
        assert views.tolist() == [plain_resized_crop(i, height, width) for i in range(300)]
        assert views.tolist() == [resized_crop(row, height, width) for row in words_of(index, words).tolist()]

    def test_an_image_too_long_for_any_attempt_is_cut_in_the_middle(self):
        views = resized_crops(words_of(torch.arange(50), words), 3000, 30)
        assert views[:, :4].tolist() == [[1480, 0, 40, 30]] * 50

    @given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**40))
    def test_boxes_lie_inside(self, height, width, epoch):
        top, left, box_height, box_width, flip = resized_crops(
            words_of(torch.arange(20), lambda index: philox.philox(index, epoch & 0xFFFFFFFF, (1, 2), 2)), height, width
        ).unbind(1)
        assert bool(((top >= 0) & (left >= 0) & (box_height >= 1) & (box_width >= 1)).all())
        assert bool(((top + box_height <= height) & (left + box_width <= width)).all())
        assert set(flip.tolist()) <= {0, 1}

    def test_every_place_and_both_flips_are_equally_likely(self):
        views = crops(words_of(torch.arange(81 * 2 * 500), seeded(0)), 40, 40, 32)
        counts = Counter(map(tuple, views[:, [0, 1, 4]].tolist()))
        assert len(counts) == 162
        statistic = sum((count - 500) ** 2 / 500 for count in counts.values())
        assert statistic < 240  # chi-square with 161 degrees of freedom: 1 in 20,000 is above

    def test_areas_and_aspects_have_the_authors_ranges(self):
        *_, height, width, flip = (
            resized_crops(words_of(torch.arange(20_000), seeded(0)), 4000, 4000).double().unbind(1)
        )
        share, aspect = height * width / 4000**2, width / height
        assert share.min() == pytest.approx(0.08, abs=1e-3)
        assert share.max() == pytest.approx(1, abs=1e-2)
        assert aspect.min() == pytest.approx(3 / 4, abs=2e-3)
        assert aspect.max() == pytest.approx(4 / 3, abs=2e-3)
        assert aspect.log().mean() == pytest.approx(0, abs=4e-3)
        assert flip.mean() == pytest.approx(0.5, abs=0.02)

    def test_views_do_not_depend_on_the_batch(self):
        index = torch.tensor([5, 900, 17, 44_999])
        together = resized_crops(words_of(index, seeded(3)), 40, 40)
        alone = [resized_crops(words_of(index[i : i + 1], seeded(3)), 40, 40)[0].tolist() for i in range(4)]
        assert together.tolist() == alone


class TestHoles:
    def test_against_a_loop(self):
        found = cutout_masks(words_of(torch.arange(60), words), 8)
        for index, left in enumerate(found[:, 0].tolist()):
            word = int(words(torch.tensor([index]))[3])
            row, column = (word // 2**16) * 8 // 2**16, (word % 2**16) * 8 // 2**16
            for y in range(8):
                for x in range(8):
                    hole = row - 2 <= y < row + 2 and column - 2 <= x < column + 2
                    assert left[y][x] == (not hole)

    def test_every_centre_is_equally_likely(self):
        holes = ~cutout_masks(words_of(torch.arange(64 * 500), seeded(0)), 8)[:, 0]
        shown = torch.stack((holes.any(2).sum(1), holes.any(1).sum(1)))  # rows and columns of the hole that are inside
        assert shown.min() == 2
        assert shown.max() == 4
        sizes = Counter(map(tuple, shown.T.tolist()))
        for (high, wide), count in sizes.items():
            ways = {2: 1, 3: 2, 4: 5}  # centres 0; 1 and 7; 2 to 6
            assert count == pytest.approx(500 * ways[high] * ways[wide], rel=0.15)

    def test_a_cut_out_batch_is_the_cropped_one_with_holes_of_zero(self):
        images, labels, order = made_up(40), torch.arange(40) % 10, torch.arange(40)
        plain, holed = (
            torch.cat(
                [batch.inputs[0] for batch in ImageSplit(images, labels, NORMALIZER, name).batches(order, 7, words)]
            )
            for name in ("crop", "crop_cutout")
        )
        left = cutout_masks(words_of(order, words), 32).expand_as(plain)
        assert torch.equal(holed[left], plain[left])
        assert bool((holed[~left] == 0).all())
        assert 0.1 < float((~left).float().mean()) < 0.25


class TestResampling:
    def test_against_fractions(self):
        side, padding = 6, 2
        images = made_up(40, side)
        views = resized_crops(words_of(torch.arange(40), words), side + 2 * padding, side + 2 * padding)
        found = Resampler(side, padding, CPU)(images, views)
        framed = np.pad(images.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        for number, (top, left, height, width, flip) in enumerate(views.tolist()):
            for channel in range(3):
                plane = framed[number, channel].tolist()
                lines = [plain_line(row, left, width, side) for row in plane]
                lines = [line[::-1] if flip else line for line in lines]
                columns = [plain_line(column, top, height, side) for column in zip(*lines)]
                assert found[number, channel].tolist() == [list(row) for row in zip(*columns)]

    def test_pillow_says_the_same(self):
        images = made_up(200)
        views = resized_crops(words_of(torch.arange(200), words), 40, 40)
        found = Resampler(32, 4, CPU)(images, views).permute(0, 2, 3, 1).numpy()
        framed = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4))).transpose(0, 2, 3, 1)
        pillow = []
        for image, (top, left, height, width, flip) in zip(framed, views.tolist()):
            cut = Image.fromarray(image).crop((left, top, left + width, top + height))
            cut = cut.resize((32, 32), Image.Resampling.BILINEAR)
            pillow.append(np.asarray(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else cut))
        difference = np.abs(np.stack(pillow) - found)
        assert difference.max() <= 1  # it rounds after rows or after columns, whichever is less work
        assert (difference == 0).mean() > 0.95

    def test_a_view_of_the_same_size_is_a_slice(self):
        images = made_up(50)
        views = crops(words_of(torch.arange(50), words), 40, 40, 32)
        found = Resampler(32, 4, CPU)(images, views)
        framed = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
        for image, (top, left, _, _, flip), ours in zip(framed, views.tolist(), found):
            cut = image[:, top : top + 32, left : left + 32]
            assert np.array_equal(cut[:, :, ::-1] if flip else cut, ours.numpy())

    @pytest.mark.parametrize("value", [0, 1, 127, 255])
    def test_an_even_picture_stays_even(self, value):
        images = torch.full((100, 3, 12, 12), value, dtype=torch.uint8)
        views = resized_crops(words_of(torch.arange(100), words), 12, 12)
        assert bool((Resampler(12, 0, CPU)(images, views) == value).all())


class TestBatches:
    @pytest.fixture
    def split(self, request):
        labels = torch.arange(300) % 10
        return ImageSplit(made_up(300), labels, Normalizer("imagenet", CPU), getattr(request, "param", "crop"))

    def test_normalisation_against_a_loop(self, split):
        batch = next(iter(split.batches(torch.tensor([3, 250]), 2)))
        (images,) = batch.inputs
        assert images.dtype == torch.float32
        assert batch.labels.tolist() == [3, 0]
        for row, example in enumerate((3, 250)):
            for channel in range(3):
                for y, x in ((0, 0), (13, 29), (31, 31)):
                    pixel = int(split.images[example, channel, y, x])
                    expected = (pixel / 255 - MEAN[channel]) / DEVIATION[channel]
                    assert float(images[row, channel, y, x]) == pytest.approx(expected, rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize("split", ["crop", "crop_cutout", "resized_crop"], indirect=True)
    def test_an_example_is_augmented_alike_in_any_batch(self, split):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
        small = torch.cat([batch.inputs[0] for batch in split.batches(order, 7, words)])
        large = torch.cat([batch.inputs[0] for batch in split.batches(order.flip(0), 299, words)]).flip(0)
        assert torch.equal(small, large)

    def test_sizes_of_batches(self, split):
        sizes = [len(batch.labels) for batch in split.batches(torch.arange(300), 128, words)]
        assert sizes == [128, 128, 44]
        assert list(split.batches(torch.arange(0), 128, words)) == []

    @pytest.mark.parametrize("split", ["none", "crop", "crop_cutout", "resized_crop"], indirect=True)
    def test_without_random_words_nothing_is_augmented(self, split):
        (images,) = next(iter(split.batches(torch.arange(10), 10))).inputs
        assert torch.equal(pixels(images), split.images[:10])

    @pytest.mark.parametrize(
        ("split", "expected"),
        [
            ("none", "49dd3ff657c926e4"),
            ("crop", "356b6b0ac76b44e5"),
            ("crop_cutout", "fd2caef6f54cc6df"),
            ("resized_crop", "e6f65e7743aa739f"),
        ],
        indirect=["split"],
    )
    def test_the_first_batch_of_a_seeded_run_is_pinned(self, split, expected):
        order = philox.permutation(300, philox.key(7, "data order"), 0)
        batch = next(iter(split.batches(order, 128, seeded(0))))
        assert batch.labels[:8].tolist() == [3, 8, 2, 4, 1, 5, 3, 5]
        assert hashlib.sha256(pixels(batch.inputs[0]).numpy().tobytes()).hexdigest()[:16] == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("augmentation", ["none", "crop", "crop_cutout", "resized_crop"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_gpu_gives_the_same_bits(augmentation, precision):
    images, labels, order = made_up(5000), torch.arange(5000) % 10, torch.randperm(5000)
    torch.set_float32_matmul_precision(precision)
    try:
        parts = [
            ImageSplit(images.to(device), labels.to(device), Normalizer("imagenet", device), augmentation)
            for device in (CPU, torch.device("cuda"))
        ]
        for one, other in zip(*(part.batches(order, 128, seeded(1)) for part in parts)):
            assert torch.equal(one.inputs[0], other.inputs[0].cpu())
            assert torch.equal(one.labels, other.labels.cpu())
    finally:
        torch.set_float32_matmul_precision("highest")
