"""Trees of class folders: labels, split, decoding in the background, and images that are broken."""

import io
import threading
import time
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import iterand
import made_up_data
from iterand import philox
from iterand.errors import DataError
from iterand.lab.data import load_data
from iterand.lab.data.dataset import fixed_order
from iterand.lab.data.decoding import GRAY, decode
from iterand.lab.data.imagenet import DataWarning
from iterand.lab.data.images import resized_crops, words_of
from iterand.lab.data.workers import prefetched
from iterand.lab.networks import build_network
from iterand.lab.training.run import evaluate_run
from made_up_data import DEVIATION, MEAN, pixels, seeded

CPU = torch.device("cpu")


@pytest.fixture
def own_tree(tmp_path):
    made_up_data.write_imagenet(tmp_path, train=6, val=2)
    return tmp_path


class TestParts:
    def test_labels_follow_the_folders_and_the_split_is_99_to_1(self, tree):
        data = load_data("imagenet", CPU, tree)
        assert (len(data.train), len(data.validation), len(data.test), data.classes) == (119, 1, 12, 3)
        order = fixed_order(120)  # 40 files a class, sorted
        labels = torch.cat([batch.labels for batch in data.train.batches(torch.arange(119), 50)])
        assert labels.tolist() == [int(place) // 40 for place in order[1:]]
        assert next(iter(data.validation.batches(torch.arange(1), 1))).labels.tolist() == [int(order[0]) // 40]
        test = torch.cat([batch.labels for batch in data.test.batches(torch.arange(12), 5)])
        assert test.tolist() == [0] * 4 + [1] * 4 + [2] * 4

    def test_a_limited_test_part_has_all_classes(self, tree):
        assert len(load_data("imagenet", CPU, tree, train_limit=3).train) == 3
        data = load_data("imagenet", CPU, tree, limit=3)
        assert (len(data.train), len(data.validation), len(data.test)) == (3, 1, 3)
        assert next(iter(data.test.batches(torch.arange(3), 3))).labels.tolist() == [0, 1, 2]

    def test_the_folder_itself_may_be_the_tree(self, tree):
        assert len(load_data("imagenet", CPU, tree / "imagenet").test) == 12

    def test_a_network_for_small_images_is_refused(self, cli, tree):
        sentence = (
            "error: network.name is 'conv6', which is not made for the images of imagenet, 3×224×224; choose another\n"
        )
        settings = ["data.name=imagenet", "augmentation=none", "batch_size=2"]
        options = [part for setting in settings for part in ("--set", setting)]
        assert cli("train", "conv6", *options, "--data-dir", tree) == (1, "", sentence)

    def test_plain_crop_is_not_for_images_of_all_sizes(self, tree):
        with pytest.raises(ValueError, match="augmentation is 'crop'; imagenet knows none, resized_crop"):
            load_data("imagenet", CPU, tree, augmentation="crop")


class TestViews:
    @pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (256, 256), (224, 224), (90, 301), (1, 2)])
    def test_the_middle_of_a_test_image(self, width, height):
        file = io.BytesIO()
        made_up_data.picture(3, width, height).save(file, "PNG")
        short = min(width, height)
        size = (int(256 * width / short), int(256 * height / short))
        scaled = np.asarray(made_up_data.picture(3, width, height).resize(size, Image.Resampling.BILINEAR))
        top, left = round((size[1] - 224) / 2), round((size[0] - 224) / 2)
        assert np.array_equal(decode(file.getvalue(), None).pixels, scaled[top : top + 224, left : left + 224])

    def test_a_training_image_is_cut_by_its_words(self):
        flips = set()
        for index in range(8):
            words = words_of(torch.tensor([index]), seeded())
            top, left, height, width, flip = resized_crops(words, 375, 500)[0].tolist()
            image = made_up_data.picture(5, 500, 375)
            view = image.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
            expected = np.asarray(view)[:, ::-1] if flip else np.asarray(view)
            file = io.BytesIO()
            image.save(file, "PNG")
            assert np.array_equal(decode(file.getvalue(), words[0].tolist()).pixels, expected)
            flips.add(flip)
        assert flips == {0, 1}

    @pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA"])
    def test_other_colours_become_rgb(self, mode):
        file = io.BytesIO()
        made_up_data.picture(1, 300, 300).convert(mode).save(file, "JPEG" if mode in ("L", "CMYK") else "PNG")
        found = decode(file.getvalue(), None)
        assert found.pixels.shape == (224, 224, 3)
        assert found.problem is None

    def test_an_example_is_augmented_alike_in_any_batch(self, tree):
        train = load_data("imagenet", CPU, tree, augmentation="resized_crop").train
        small = torch.cat([batch.inputs[0] for batch in train.batches(torch.arange(10), 3, seeded())])
        large = torch.cat([batch.inputs[0] for batch in train.batches(torch.arange(10).flip(0), 10, seeded())])
        assert torch.equal(small, large.flip(0))
        other = torch.cat([batch.inputs[0] for batch in train.batches(torch.arange(10), 10, seeded(1))])
        assert not torch.equal(small, other)

    def test_normalisation(self, tree):
        data = load_data("imagenet", CPU, tree)
        (images,) = next(iter(data.test.batches(torch.tensor([5]), 1, seeded()))).inputs
        content = (tree / "imagenet" / "val" / "n02" / "0001.JPEG").read_bytes()
        expected = decode(content, None).pixels
        for channel in range(3):
            value = (int(expected[17, 100, channel]) / 255 - MEAN[channel]) / DEVIATION[channel]
            assert float(images[0, channel, 17, 100]) == pytest.approx(value, rel=1e-5, abs=1e-6)

    @pytest.mark.parametrize(
        ("augmentation", "expected"),
        [
            ("none", [[120.54, 128.46, 52.0], [130.25, 164.5, 50.63], [33.59, 122.71, 52.91], [142.97, 121.56, 53.54]]),
            (
                "resized_crop",
                [[130.22, 80.66, 89.76], [115.02, 195.51, 81.47], [37.64, 99.51, 44.04], [95.09, 149.52, 45.77]],
            ),
        ],
    )
    def test_the_first_batch_of_a_seeded_run_is_pinned(self, tmp_path, augmentation, expected):
        """By the mean of its colours: versions of Pillow differ in how they round a pixel."""
        for part in ("train", "val"):
            folder = tmp_path / "imagenet" / part / "n01"
            folder.mkdir(parents=True)
            for number in range(20):
                made_up_data.picture(number, 80 + number, 100 - number).save(folder / f"{number:02}.png")
        train = load_data("imagenet", CPU, tmp_path, augmentation=augmentation).train
        order = philox.permutation(len(train), philox.key(7, "data order"), 0)
        (images,) = next(iter(train.batches(order, 4, seeded()))).inputs
        left_top = pixels(images)[:, :, :112, :112].double().mean((2, 3))
        assert left_top.tolist() == [pytest.approx(row, abs=0.3) for row in expected]


class TestBrokenImages:
    def broken(self, root, number=2):
        path = root / "imagenet" / "train" / "n02" / f"{number:04}.JPEG"
        path.write_bytes(path.read_bytes()[:400])
        return path

    def test_one_among_many_is_named_once_and_gray(self, own_tree):
        path = self.broken(own_tree)
        train = load_data("imagenet", CPU, own_tree, augmentation="resized_crop").train
        with pytest.warns(DataWarning) as caught:
            batches = list(train.batches(torch.arange(len(train)), 4, seeded()))
        (warning,) = caught
        assert str(warning.message).startswith(f"cannot decode {path} (")
        assert "a gray image stands in its place, as for 1 of 17 so far" in str(warning.message)
        assert list(train.corrupt) == [path]
        images = torch.cat([batch.inputs[0] for batch in batches])
        gray = (pixels(images) == torch.tensor(GRAY).view(3, 1, 1)).flatten(1).all(dim=1)
        labels = torch.cat([batch.labels for batch in batches])
        assert int(gray.sum()) == 1
        assert labels[gray].tolist() == [1]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(train.batches(torch.arange(len(train)), 4, seeded()))) == len(batches)

    @pytest.mark.parametrize("content", [b"", b"GIF89a", b"\xff\xd8\xff\xe0", b"<html>", b"\x89PNG\r\n\x1a\n"])
    def test_any_rubbish_is_survived(self, content):
        found = decode(content, None)
        assert found.problem
        assert found.pixels.shape == (224, 224, 3)
        assert found.pixels[0, 0].tolist() == list(GRAY)

    def test_a_file_that_went_away_is_an_error(self, own_tree):
        test = load_data("imagenet", CPU, own_tree).test
        path = own_tree / "imagenet" / "val" / "n03" / "0001.JPEG"
        path.unlink()
        with pytest.raises(DataError, match=r"cannot read .*val/n03/0001\.JPEG: No such file"):
            list(test.batches(torch.arange(len(test)), 2))


class TestBadTrees:
    def test_a_class_without_images(self, own_tree):
        (own_tree / "imagenet" / "train" / "n04").mkdir()
        (own_tree / "imagenet" / "train" / "n04" / "notes.txt").write_text("none yet")
        with pytest.raises(DataError, match=r"imagenet/train/n04 has no images \(\.jpeg, \.jpg, \.png\); put some"):
            load_data("imagenet", CPU, own_tree)

    def test_an_empty_tree(self, tmp_path):
        for part in ("train", "val"):
            (tmp_path / "imagenet" / part).mkdir(parents=True)
        with pytest.raises(DataError, match="imagenet/train has no class folders; sort its images into"):
            load_data("imagenet", CPU, tmp_path)

    def test_images_that_nobody_sorted(self, own_tree):
        val = own_tree / "imagenet" / "val"
        for path in list(val.glob("*/*.JPEG")):
            path.rename(val / f"{path.parent.name}_{path.name}")
        for folder in list(val.iterdir()):
            if folder.is_dir():
                folder.rmdir()
        with pytest.raises(DataError, match="imagenet/val has no class folders"):
            load_data("imagenet", CPU, own_tree)

    @pytest.mark.parametrize(("there", "lacking"), [("train", "val"), ("val", "train")])
    def test_a_class_in_one_part_only(self, own_tree, there, lacking):
        folder = own_tree / "imagenet" / there / "n00"
        folder.mkdir()
        (folder / "a.jpg").write_bytes(made_up_data.jpeg(1))
        with pytest.raises(DataError, match=rf"imagenet/{lacking} has no class folder n00, but .*/{there} has"):
            load_data("imagenet", CPU, own_tree)

    def test_fewer_classes_than_a_network_was_trained_with(self, own_tree, tmp_path):
        options = {"name": "resnet18_imagenet", "width_factor": 0.1, "classes": 4}
        model = iterand.prune_(build_network(**options), 0.5)
        iterand.save_ticket(model, tmp_path / "a.ticket", recipe={"data": {"name": "imagenet"}, "network": options})
        with pytest.warns(UserWarning, match="the data have 3 class folders, but the network is for 4 classes; labels"):
            evaluate_run(tmp_path / "a.ticket", device=CPU, data_dir=own_tree)

    def test_no_tree(self, tmp_path):
        with pytest.raises(
            DataError, match=r"imagenet is not in .*; ILSVRC2012 .* unpack its images into .*/imagenet/t"
        ):
            load_data("imagenet", CPU, tmp_path)


class TestPrefetching:
    def test_results_come_in_order(self):
        def slow(item):
            time.sleep(0.002 * (item % 3))
            return item * item

        groups = [range(0, 5), range(5, 6), range(0), range(6, 20)]
        found = list(prefetched(slow, groups, workers=4, ahead=2))
        assert found == [[item * item for item in group] for group in groups]

    def test_at_most_so_many_groups_are_begun(self):
        asked = []

        def groups():
            for number in range(100):
                asked.append(number)
                yield [number]

        results = prefetched(lambda item: item, groups(), workers=2, ahead=3)
        assert next(results) == [0]
        assert asked == [0, 1, 2, 3]
        assert next(results) == [1]
        assert asked == [0, 1, 2, 3, 4]
        results.close()

    def test_who_stops_early_leaves_no_thread_behind(self):
        before = threading.active_count()
        list(islice(prefetched(lambda item: item, [[1, 2], [3, 4], [5]], workers=3, ahead=1), 1))
        assert threading.active_count() == before

    def test_an_error_in_the_background_reaches_the_reader(self):
        before = threading.active_count()
        with pytest.raises(ZeroDivisionError):
            list(prefetched(lambda item: 1 // item, [[1, 2], [0], [3]], workers=2, ahead=1))
        assert threading.active_count() == before


def test_paths_are_those_of_the_files(own_tree):
    """Files come sorted by class, then by name, whatever order the file system has them in."""
    test = load_data("imagenet", CPU, own_tree).test
    expected = sorted((own_tree / "imagenet" / "val").glob("*/*.JPEG"))
    assert [Path(test._images.path(index)) for index in range(6)] == expected
