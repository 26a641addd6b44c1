"""Your own images in class folders: splits, formats, augmentation at any size, and folders that are wrong."""

import io
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from iterand.errors import DataError, NotEnoughMemoryError
from iterand.lab.data import image_folder, load_data
from iterand.lab.data.decoding import decode, decode_square
from iterand.lab.data.images import Resampler, box_weights
from iterand.lab.data.packs import Scaling
from made_up_data import picture, write_image_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_image_folder(tmp_path_factory.mktemp("photos"), {"train": 12, "test": 3})


@pytest.fixture
def own(photos, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(photos, tmp_path / "photos")


def load(root, **options):
    return load_data("image_folder", CPU, root, **({"image_size": 8} | options))


def images(split):
    return next(split.batches(torch.arange(len(split)), len(split)))


class TestSplits:
    def test_a_tenth_of_train_validates_and_test_tests(self, photos):
        data = load(photos)
        assert (len(data.train), len(data.validation), len(data.test)) == (33, 3, 9)
        assert data.classes == 3
        assert data.train.image_shape == (3, 8, 8)
        assert images(data.validation).labels.tolist() == [0, 1, 2]
        assert images(data.test).labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    @pytest.mark.parametrize("name", ["val", "valid", "validation"])
    def test_other_names_of_the_test_split(self, own, name):
        before = load(own)
        (own / "test").rename(own / name)
        assert torch.equal(images(load(own).test).inputs[0], images(before.test).inputs[0])

    def test_three_splits(self, tmp_path):
        data = load(write_image_folder(tmp_path, {"train": 4, "val": 3, "test": 2}))
        assert (len(data.train), len(data.validation), len(data.test)) == (12, 9, 6)

    def test_class_folders_without_a_split(self, tmp_path):
        root = write_image_folder(tmp_path, {"": 20})
        data = load(root)
        assert (len(data.train), len(data.validation), len(data.test)) == (48, 6, 6)
        parts = image_folder.open_folder(root)
        names = [{str(part.tree.path(int(index))) for index in part.chosen} for part in parts]
        assert sum(map(len, names)) == len(set.union(*names)) == 60
        again = image_folder.open_folder(root)
        assert all(torch.equal(one.chosen, other.chosen) for one, other in zip(parts, again))

    def test_a_class_may_be_called_train(self, tmp_path):
        assert load(write_image_folder(tmp_path, {"": 4}, ("car", "plane", "train"))).classes == 3

    def test_limit_keeps_all_classes(self, photos):
        assert images(load(photos, limit=6).train).labels.tolist() == [0, 0, 1, 1, 2, 2]
        few, whole = load(photos, train_limit=6), load(photos)
        assert images(few.train).labels.tolist() == [0, 0, 1, 1, 2, 2]
        assert len(few.test) == len(whole.test)

    def test_colours_are_those_of_the_classes(self, photos):
        batch = images(load(photos).test)
        brightest = batch.inputs[0].mean((2, 3)).argmax(1)
        assert brightest.tolist() == [2 - label for label in batch.labels.tolist()]


class TestFiles:
    def saved(self, image, form, **options):
        file = io.BytesIO()
        image.save(file, form, **options)
        return file.getvalue()

    @pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "TIFF", "WEBP", "JPEG", "PPM"])
    def test_usual_formats(self, form):
        pixels = decode_square(self.saved(Image.new("RGB", (30, 20), (200, 100, 40)), form), 10)
        assert pixels.shape == (10, 10, 3)
        assert np.abs(pixels.astype(int) - [200, 100, 40]).max() <= 6

    @pytest.mark.parametrize(
        ("mode", "colour", "form", "expected"),
        [
            ("L", 90, "PNG", (90, 90, 90)),
            ("1", 1, "PNG", (255, 255, 255)),
            ("LA", (90, 10), "PNG", (90, 90, 90)),
            ("RGBA", (10, 20, 30, 128), "PNG", (10, 20, 30)),
            ("CMYK", (0, 255, 255, 0), "TIFF", (255, 0, 0)),
            ("I;16", 40_000, "PNG", (156, 156, 156)),
            ("I;16", 40_000, "TIFF", (156, 156, 156)),
            ("I", 40_000, "PPM", (156, 156, 156)),
        ],
    )
    def test_modes_become_rgb(self, mode, colour, form, expected):
        pixels = decode_square(self.saved(Image.new(mode, (12, 12), colour), form), 8)
        assert pixels.reshape(-1, 3).tolist() == [list(expected)] * 64
        large = self.saved(Image.new(mode, (300, 300), colour), form)
        assert (decode(large, None).pixels == expected).all()
        scaled = decode_square(Scaling(short_side=240)(large), 8)
        assert np.abs(scaled.astype(int) - expected).max() <= 2  # as JPEG

    @pytest.mark.parametrize(("mode", "kind"), [("I", "signed or 32-bit integers"), ("F", "floating-point numbers")])
    def test_pixels_of_unknown_range_are_refused(self, mode, kind):
        """Integers up to 255 or up to 2³² - 1 look alike, so that one of them would be black."""
        content = self.saved(Image.new(mode, (12, 12), 200), "TIFF")
        with pytest.raises(ValueError, match=f"its pixels are {kind}, whose range is unknown"):
            decode_square(content, 8)
        assert kind in decode(content, None).problem

    def test_palette_with_transparency(self):
        image = Image.new("P", (12, 12), 1)
        image.putpalette([0, 0, 0, 10, 200, 30])
        pixels = decode_square(self.saved(image, "PNG", transparency=bytes([255, 0])), 8)
        assert pixels[0, 0].tolist() == [10, 200, 30]

    def test_short_side_is_resized_and_the_middle_cut_out(self):
        image = picture(3, 60, 20)
        expected = np.asarray(image.crop((20, 0, 40, 20)))
        assert np.array_equal(decode_square(self.saved(image, "PNG"), 20), expected)

    def test_exif_orientation(self):
        image, exif = Image.new("RGB", (20, 20), (255, 255, 255)), Image.Exif()
        image.paste((0, 0, 0), (0, 0, 20, 10))  # black on top
        exif[0x0112] = 6  # turn by 90° clockwise: black is on the right
        pixels = decode_square(self.saved(image, "PNG", exif=exif), 20)
        assert pixels[10, 2].tolist() == [255, 255, 255]
        assert pixels[10, 17].tolist() == [0, 0, 0]

    def test_a_large_jpeg_is_as_if_decoded_in_full(self):
        image = picture(1, 640, 480)
        reduced = decode_square(self.saved(image, "JPEG", quality=95), 32).astype(int)
        whole = decode_square(self.saved(image, "PNG"), 32).astype(int)
        assert np.abs(reduced - whole).mean() < 4


class TestWrongFolders:
    """Each gets one sentence about this folder."""

    def sentence(self, root, **options):
        with pytest.raises(DataError) as caught:
            load(root, **options)
        found = str(caught.value)
        assert "\n" not in found
        assert "image-net" not in found
        return found

    def test_missing(self, tmp_path):
        assert self.sentence(tmp_path / "none") == (
            f"the folder {tmp_path / 'none'} does not exist; images are in train/CLASS/ and val/CLASS/ (or "
            "test/CLASS/) of data.path, or in CLASS/ for a split by iterand"
        )

    def test_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        assert "file is a file; images are in train/CLASS/" in self.sentence(tmp_path / "file")

    def test_empty(self, tmp_path):
        assert "has no class folders; images are in train/CLASS/" in self.sentence(tmp_path)

    def test_images_without_class_folders(self, own):
        for image in (own / "train" / "red").iterdir():
            image.rename(own / "train" / f"red{image.name}")
        shutil.rmtree(own / "test")
        for name in ("blue", "green", "red"):
            shutil.rmtree(own / "train" / name)
        assert "has one class folder only, train" in self.sentence(own)
        assert "train has no class folders" in self.sentence(own / "train")

    def test_one_class(self, tmp_path):
        found = self.sentence(write_image_folder(tmp_path, {"": 5}, ("cat",)))
        assert found.endswith("has one class folder only, cat; a classifier needs at least two classes")

    def test_train_alone(self, own):
        shutil.rmtree(own / "test")
        found = self.sentence(own)
        assert "has train but neither val nor test beside it" in found
        assert found.endswith(f"or set data.path to {own / 'train'}")
        assert load(own / "train").classes == 3

    def test_a_class_is_missing_in_the_test_part(self, own):
        shutil.rmtree(own / "test" / "red")
        assert "test has no class folder red, but" in self.sentence(own)

    def test_a_class_without_images(self, own):
        (own / "train" / "yellow").mkdir()
        assert self.sentence(own).endswith("yellow has no images; put some there or remove the folder")

    def test_too_few_images_to_hold_some_out(self, tmp_path):
        found = self.sentence(write_image_folder(tmp_path, {"": 2}))
        assert found.endswith("blue has 2 images; a class needs at least 3, so that two of them validate and test")

    def test_a_folder_in_a_class_folder(self, own):
        (own / "train" / "red" / "2020").mkdir()
        assert "red has a folder 2020 inside, which would be left out" in self.sentence(own)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
    def test_what_is_no_file_is_not_read(self, own):
        os.mkfifo(own / "train" / "red" / "pipe.png")
        assert "red has pipe.png, which is no file but a pipe, a device or a broken link" in self.sentence(own)

    @pytest.mark.parametrize("part", ["train", "test"])
    def test_an_image_outside_the_class_folders(self, own, part):
        shutil.copy(own / "train" / "red" / "000.png", own / part / "Stray.PNG")
        found = self.sentence(own)
        assert f"{own / part} has an image Stray.PNG outside its class folders, which would be left out" in found

    def test_other_files_beside_the_class_folders_are_skipped(self, own):
        (own / "train" / "LICENSE.txt").write_text("free")
        (own / "train" / "._hidden.png").touch()
        assert len(load(own).train) == 33

    def test_files_that_are_no_images_are_named(self, own):
        cut = own / "train" / "blue" / "000.png"
        cut.write_bytes(cut.read_bytes()[:300])
        (own / "train" / "red" / "notes.txt").write_text("not an image")
        (own / "test" / "green" / "empty.jpg").touch()
        found = self.sentence(own)
        assert f"{own}/train/blue/000.png: " in found
        assert f"{own}/train/red/notes.txt: it is no image in a format that Pillow knows" in found
        assert f"{own}/test/green/empty.jpg: " in found
        assert "3 of 47 files cannot be decoded as images" in found
        assert found.endswith("; replace or remove them")

    def test_many_bad_files_make_one_short_sentence(self, own):
        for image in (own / "test").rglob("*.png"):
            image.write_bytes(b"")
        found = self.sentence(own)
        assert "9 of 45 files" in found
        assert " and 6 more; replace" in found

    def test_what_systems_leave_in_folders_is_skipped(self, own):
        before = len(load(own).train)
        for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
            (own / "train" / "red" / name).touch()
        assert len(load(own).train) == before

    def test_more_images_than_memory(self, photos, monkeypatch):
        monkeypatch.setattr("iterand.memory.available", lambda device=None: 1000)
        with pytest.raises(NotEnoughMemoryError, match=r"45 images of 8×8 takes at least .* lower image_size or limit"):
            load(photos)

    def test_options(self, photos):
        with pytest.raises(ValueError, match="image_size is 4; it is a whole number of pixels from 8 to 1024"):
            load(photos, image_size=4)
        with pytest.raises(ValueError, match="augmentation is 'mirror'; image_folder knows none, crop"):
            load(photos, augmentation="mirror")


class TestAugmentation:
    @pytest.mark.parametrize("side", [12, 41])
    def test_weights_of_single_boxes_are_those_of_the_table(self, monkeypatch, side):
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(256, (50, 3, side, side), generator=generator, dtype=torch.uint8)
        padded = side + 8
        extent = torch.randint(1, padded + 1, (50, 2), generator=generator)
        start = (torch.rand(50, 2, generator=generator) * (padded - extent + 1)).long()
        flip = torch.randint(2, (50, 1), generator=generator)
        views = torch.cat((start, extent, flip), dim=1)
        monkeypatch.setattr("iterand.lab.data.images._LARGEST_TABLE", 0)
        computed = Resampler(side, 4, CPU)(pixels, views)
        monkeypatch.setattr("iterand.lab.data.images._LARGEST_TABLE", 64)
        assert torch.equal(computed, Resampler(side, 4, CPU)(pixels, views))
        assert box_weights(side, 4).shape == (padded, padded, side, side)

    @pytest.mark.parametrize("augmentation", ["crop", "crop_cutout", "resized_crop"])
    def test_large_images_are_augmented(self, photos, augmentation):
        data = load(photos, augmentation=augmentation, image_size=96, limit=6)

        def random(index):
            return tuple((index * 2_654_435_761 + word * 40_503) % (1 << 32) for word in range(4))

        plain, augmented = (next(data.train.batches(torch.arange(6), 6, each)).inputs[0] for each in (None, random))
        assert augmented.shape == plain.shape == (6, 3, 96, 96)
        assert not torch.equal(augmented, plain)
        assert augmented.isfinite().all()


def test_fingerprint_is_of_names_and_sizes(own, tmp_path):
    before = image_folder.fingerprint(own)
    moved = shutil.copytree(own, tmp_path / "moved")
    assert image_folder.fingerprint(moved) == before
    (moved / "test" / "red" / "000.png").unlink()
    assert image_folder.fingerprint(moved) != before


def test_check_decodes_everything(own):
    steps = []
    located = image_folder.locate(own)
    assert image_folder.check(located, lambda *step: steps.append(step)) == (
        "45 images of 3 classes, all can be decoded"
    )
    assert steps[-1] == (45, 45)
