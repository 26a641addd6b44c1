"""CIFAR-10 in every layout, its split, and everything that can be wrong with its files."""

import hashlib
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

import made_up_data
from iterand.errors import DataError
from iterand.lab.data import cifar10, digits, load_data
from iterand.lab.data.cifar10 import load_arrays
from iterand.lab.data.dataset import data_folder, fixed_order, limited

CPU = torch.device("cpu")
COUNT = 20


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", COUNT)


@pytest.fixture
def records():
    return made_up_data.cifar_records(COUNT)


def write(layout, root, records):
    """One of the six ways CIFAR-10 may lie in a folder of data sets."""
    kind, _, ending = layout.partition(".")
    folder = root / "cifar10" if "deep" in kind else root
    write_folder = made_up_data.write_cifar_python if "python" in kind else made_up_data.write_cifar_binary
    written = write_folder(folder, records)
    if not ending:
        return written
    name = "cifar-10-python" if "python" in kind else "cifar-10-binary"
    archive = made_up_data.pack(written, folder / f"{name}.{ending}")
    shutil.rmtree(written)
    return archive


LAYOUTS = ["binary", "python", "binary.tar.gz", "python.tar.gz", "binary.tar", "python.tar", "deep binary"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_images(tmp_path, records, layout):
    write(layout, tmp_path, records)
    data = load_data("cifar10", CPU, tmp_path)
    assert (len(data.train), len(data.validation), len(data.test), data.classes) == (90, 10, 20, 10)
    train = np.concatenate([records[name] for name in made_up_data.CIFAR_FILES[:5]])
    order = fixed_order(100).tolist()
    for part, rows in (
        (data.train, train[order[10:]]),
        (data.validation, train[order[:10]]),
        (data.test, records["test_batch"]),
    ):
        assert part.images.dtype == torch.uint8
        assert part.labels.tolist() == rows[:, 0].tolist()
        for row, image in zip(rows, part.images):
            red, green, blue = row[1:1025], row[1025:2049], row[2049:]
            assert np.array_equal(image.numpy(), np.stack([plane.reshape(32, 32) for plane in (red, green, blue)]))


class TestSplit:
    def test_the_fixed_order_is_pinned(self):
        order = fixed_order(50_000)
        assert sorted(order.tolist()) == list(range(50_000))
        assert order[:8].tolist() == [25556, 20554, 16026, 47310, 38162, 6037, 28142, 34945]
        assert hashlib.sha256(order.numpy().astype("<i8").tobytes()).hexdigest()[:16] == "005f08ab93052246"

    def test_validation_is_a_tenth(self, tmp_path, records):
        write("binary", tmp_path, records)
        one, other = (load_data("cifar10", CPU, tmp_path) for _ in range(2))
        assert torch.equal(one.validation.images, other.validation.images)
        seen = {image.numpy().tobytes() for part in (one.train, one.validation) for image in part.images}
        assert len(seen) == 100

    def test_a_limit_takes_evenly_spaced_examples_of_every_part(self, tmp_path, records):
        write("binary", tmp_path, records)
        whole, few = load_data("cifar10", CPU, tmp_path), load_data("cifar10", CPU, tmp_path, limit=4)
        assert (len(few.train), len(few.validation), len(few.test)) == (4, 4, 4)
        assert torch.equal(few.train.images, whole.train.images[[0, 22, 45, 67]])
        assert torch.equal(few.test.labels, whole.test.labels[[0, 5, 10, 15]])

    @pytest.mark.parametrize(("limit", "expected"), [(None, [5, 6, 7]), (3, [5, 6, 7]), (9, [5, 6, 7]), (2, [5, 6])])
    def test_limited(self, limit, expected):
        assert limited(torch.tensor([5, 6, 7]), limit).tolist() == expected


@pytest.mark.parametrize(
    ("normalization", "mean", "deviation"),
    [
        ("default", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ],
)
def test_normalisation(tmp_path, records, normalization, mean, deviation):
    write("binary", tmp_path, records)
    test = load_data("cifar10", CPU, tmp_path, normalization=normalization).test
    (images,) = next(iter(test.batches(torch.tensor([7]), 1))).inputs
    for channel in range(3):
        pixel = int(records["test_batch"][7, 1 + 1024 * channel + 33])
        expected = (pixel / 255 - mean[channel]) / deviation[channel]
        assert float(images[0, channel, 1, 1]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


class TestWhereItLies:
    def test_given_then_variable_then_data(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ITERAND_DATA", "from-variable")
        assert str(data_folder(tmp_path)) == str(tmp_path)
        assert str(data_folder()) == "from-variable"
        monkeypatch.delenv("ITERAND_DATA")
        assert str(data_folder()) == "data"

    def test_any_kind_of_path(self, tmp_path, records):
        write("binary", tmp_path, records)
        (entry,) = [entry for entry in os.scandir(tmp_path.parent) if entry.name == tmp_path.name]
        assert load_data("cifar10", CPU, str(tmp_path)).classes == load_data("cifar10", CPU, entry).classes == 10

    def test_missing(self, tmp_path):
        with pytest.raises(
            DataError, match=r"cifar10 is not in .*; download it with 'iterand data fetch cifar10 --data-"
        ):
            load_data("cifar10", CPU, tmp_path)


class TestBadFiles:
    @pytest.mark.parametrize("size", [0, 100, 3073 * COUNT - 1, 3073 * (COUNT - 1), 3073 * (COUNT + 1)])
    def test_wrong_length(self, tmp_path, records, size):
        folder = write("binary", tmp_path, records)
        content = (folder / "data_batch_3.bin").read_bytes() + bytes(3073)
        (folder / "data_batch_3.bin").write_bytes(content[:size])
        with pytest.raises(
            DataError, match=rf"^data_batch_3\.bin in .*cifar-10-batches-bin has {size:,} bytes, not 61"
        ):
            load_data("cifar10", CPU, tmp_path)

    @pytest.mark.parametrize("layout", ["binary.tar.gz", "python.tar", "python.tar.gz"])
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
    def test_archives_cut_short(self, tmp_path, records, layout, share):
        archive = write(layout, tmp_path, records)
        content = archive.read_bytes()
        archive.write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError, match=archive.name) as caught:
            load_data("cifar10", CPU, tmp_path)
        assert "fetch it again" in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_not_an_archive_at_all(self, tmp_path):
        (tmp_path / "cifar-10-binary.tar.gz").write_text("<html>the server is busy</html>")
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is cut short or damaged"):
            load_data("cifar10", CPU, tmp_path)

    @pytest.mark.parametrize("layout", LAYOUTS[:3])
    def test_a_file_is_missing(self, tmp_path, records, layout):
        del records["data_batch_5"]
        write(layout, tmp_path, records)
        with pytest.raises(DataError, match=r"has no data_batch_5"):
            load_data("cifar10", CPU, tmp_path)

    @pytest.mark.parametrize("layout", ["binary", "python"])
    def test_a_label_out_of_range(self, tmp_path, records, layout):
        records["test_batch"][13, 0] = 10
        write(layout, tmp_path, records)
        with pytest.raises(DataError, match=r"test_batch.* says that image 13 has label 10, but labels are 0 to 9"):
            load_data("cifar10", CPU, tmp_path)

    @pytest.mark.parametrize("label", [-1, 256, 10**12])
    def test_a_label_that_is_no_byte(self, tmp_path, records, label):
        folder = write("python", tmp_path, records)
        values = {b"labels": [0] * (COUNT - 1) + [label], b"data": np.zeros((COUNT, 3072), np.uint8)}
        (folder / "test_batch").write_bytes(pickle.dumps(values, protocol=2))
        with pytest.raises(DataError, match=rf"test_batch.* says that image {COUNT - 1} has label"):
            load_data("cifar10", CPU, tmp_path)

    @pytest.mark.parametrize(
        "values",
        [
            {b"labels": [0] * COUNT},
            {b"labels": [0], b"data": np.zeros((COUNT, 3072), np.uint8)},
            {b"labels": [0] * COUNT, b"data": np.zeros((COUNT, 3071), np.uint8)},
            {b"labels": ["cat"] * COUNT, b"data": np.zeros((COUNT, 3072), np.uint8)},
            {b"labels": [0] * COUNT, b"data": [1, 2, 3]},
            [1, 2, 3],
            None,
        ],
    )
    def test_a_pickle_of_something_else(self, tmp_path, records, values):
        folder = write("python", tmp_path, records)
        (folder / "data_batch_1").write_bytes(pickle.dumps(values, protocol=2))
        with pytest.raises(DataError, match=r"data_batch_1 in .* holds no 20 images with labels"):
            load_data("cifar10", CPU, tmp_path)

    def test_a_file_nobody_may_read(self, tmp_path, records):
        folder = write("binary", tmp_path, records)
        (folder / "data_batch_2.bin").unlink()
        (folder / "data_batch_2.bin").mkdir()
        with pytest.raises(DataError, match=r"cannot read .*data_batch_2\.bin: Is a directory"):
            load_data("cifar10", CPU, tmp_path)


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class TestPickles:
    """A pickle is a program; ours may build arrays of bytes and nothing else."""

    @pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
    def test_one_that_runs_a_command_is_refused(self, tmp_path, records, protocol):
        folder = write("python", tmp_path, records)
        touched = tmp_path / "touched"
        evil = {b"labels": [0] * COUNT, b"data": Evil(os.system, f"touch {touched}")}
        (folder / "data_batch_4").write_bytes(pickle.dumps(evil, protocol=protocol))
        with pytest.raises(DataError, match=r"data_batch_4 in .* asks to run posix\.system, but .* arrays only"):
            load_data("cifar10", CPU, tmp_path)
        assert not touched.exists()

    @pytest.mark.parametrize(
        "evil",
        [
            b"cbuiltins\neval\n(S'1+1'\ntR.",
            b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
            b"cnumpy.core.multiarray\n_reconstruct.__globals__\n.",
            b"\x80\x04\x8c\x05numpy\x8c\x0bndarray.dot\x93.",
            b"(inumpy\ndiag\n.",
            b"cnumpy\nndarray\n(tRcnumpy\nload\nb.",
            b"Pidentity\n.",
        ],
    )
    def test_other_names_are_refused(self, evil):
        with pytest.raises(DataError, match=r"^it (asks to run|is cut short or damaged)"):
            load_arrays(evil, "it")

    @pytest.mark.parametrize("kind", ["O", "f8", "V1", "u2"])
    def test_arrays_of_anything_but_bytes_are_refused(self, kind):
        with pytest.raises(DataError, match=f"an array of type .*{kind}"):
            load_arrays(pickle.dumps(np.zeros(8, kind), protocol=2), "it")

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_arrays_keep_their_shape_and_order(self, order):
        array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4).copy(order=order)
        assert np.array_equal(load_arrays(pickle.dumps({b"x": array}, protocol=2), "it")[b"x"], array)

    def test_every_way_of_cutting_one_short_is_an_error(self):
        whole = pickle.dumps({b"labels": [1, 2], b"data": np.zeros((2, 5), np.uint8)}, protocol=2)
        for length in range(len(whole)):
            with pytest.raises(DataError):
                load_arrays(whole[:length], "it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmentation": "croop"}, "augmentation is 'croop'; cifar10 knows none, crop, crop_cutout, resized_crop"),
        ({"normalization": "zero"}, "normalization is 'zero'; cifar10 knows default, imagenet, cifar10"),
        ({"limit": 0}, "limit is 0; it is how many examples of each part to use, at least 1"),
        ({"limit": -3}, "limit is -3"),
        ({"limit": 2.5}, "limit is 2.5"),
        ({"limit": True}, "limit is True"),
        ({"train_limit": 0}, "train_limit is 0; it is how many training examples to use, at least 1"),
    ],
)
def test_bad_options(tmp_path, records, options, message):
    write("binary", tmp_path, records)
    with pytest.raises(ValueError, match=message):
        load_data("cifar10", CPU, tmp_path, **options)


def test_digits_and_texts_are_not_augmented():
    with pytest.raises(ValueError, match="augmentation is 'crop'; digits knows none"):
        load_data("digits", CPU, augmentation="crop")


def test_an_unknown_set_gets_a_hint():
    with pytest.raises(ValueError, match=r"unknown data set 'cifar100'; did you mean 'cifar10'\?"):
        load_data("cifar100", CPU)


def test_training_examples_can_be_limited(tmp_path, records):
    write("binary", tmp_path, records)
    whole, few = load_data("cifar10", CPU, tmp_path), load_data("cifar10", CPU, tmp_path, train_limit=4)
    assert (len(few.train), len(few.validation), len(few.test)) == (4, len(whole.validation), len(whole.test))
    assert torch.equal(few.train.images, whole.train.images[[0, 22, 45, 67]])
    both = load_data("digits", CPU, train_limit=100, limit=30)
    assert (len(both.train), len(both.validation), len(both.test)) == (30, 30, 30)
    assert len(load_data("digits", CPU, train_limit=100).train) == 100


def test_digits_can_be_limited():
    data = load_data("digits", CPU, limit=30)
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 30, 30)
    whole = load_data("digits", CPU)
    assert (len(whole.train), len(whole.validation), len(whole.test)) == (1197, 200, 400)
    assert float(whole.train.inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(whole.train.inputs.std()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(data.test.inputs[1], whole.test.inputs[400 // 30])


def test_digits_are_those_of_scikit_learn(tmp_path):
    """Read from its files or, where these lie elsewhere, with its function."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for folder in (digits.locate(tmp_path).path, tmp_path):
        rows = digits._read(folder)
        np.testing.assert_array_equal(rows[:, :64], images)
        np.testing.assert_array_equal(rows[:, 64], labels)


def test_the_real_set(monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", 10_000)
    located = cifar10.locate(data_folder())
    if located is None:
        pytest.skip("CIFAR-10 is not in $ITERAND_DATA")
    assert cifar10.check(located, lambda done, total: None) == "60,000 images, all as published"
    data = load_data("cifar10", CPU)
    assert (len(data.train), len(data.validation), len(data.test)) == (45_000, 5_000, 10_000)
    images = torch.cat([data.train.images, data.validation.images]).double() / 255
    assert images.mean((0, 2, 3)).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
    assert images.std((0, 2, 3)).tolist() == pytest.approx([0.2470, 0.2435, 0.2616], abs=5e-5)
