"""Packs: the images of a tree in one file, written in any number of tries, refused if they are not whole."""

import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import made_up_data
from iterand.cli.data import app
from iterand.errors import DataError
from iterand.lab.data import catalog, load_data, packs
from iterand.lab.data.decoding import GRAY
from iterand.lab.data.imagenet import DataWarning
from iterand.lab.data.packs import Scaling, open_pack
from made_up_data import seeded

CPU = torch.device("cpu")


def pack(root, scaling=None):
    return catalog.pack("imagenet", root, scaling, lambda done, total: None)


def everything(root, workers=0):
    """All images and labels of all parts."""
    data = load_data("imagenet", CPU, root, augmentation="resized_crop", workers=workers)
    parts = [data.train.batches(torch.arange(len(data.train)), 7, seeded())]
    parts += [part.batches(torch.arange(len(part)), 5) for part in (data.validation, data.test)]
    batches = [batch for part in parts for batch in part]
    return torch.cat([batch.inputs[0] for batch in batches]), torch.cat([batch.labels for batch in batches])


@pytest.fixture
def root(tmp_path):
    made_up_data.write_imagenet(tmp_path, train=5, val=2)
    return tmp_path


@pytest.fixture
def packed(root):
    pack(root)
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Packs of a tree of three tiny files a part, which nobody has to decode."""
    root = tmp_path_factory.mktemp("tiny")
    for part in ("train", "val"):
        for name, content in {"a/1.jpg": b"one", "a/2.jpg": b"", "b/ü.png": b"three" * 40}.items():
            path = root / "imagenet" / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    pack(root)
    return root


class TestUse:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_pack_gives_the_same_batches_as_the_tree_with_or_without_it(self, root, workers):
        images, labels = everything(root)
        pack(root)
        opened = load_data("imagenet", CPU, root)
        assert opened.train._images.root == root / "imagenet" / "train.pack"
        assert opened.test._images.root == root / "imagenet" / "val.pack"
        for there in (True, False):
            if not there:
                for part in ("train", "val"):
                    (root / "imagenet" / part).rename(root / f"away-{part}")
            found, found_labels = everything(root, workers)
            assert torch.equal(found, images)
            assert torch.equal(found_labels, labels)

    def test_one_part_alone(self, packed):
        (packed / "imagenet" / "val.pack").unlink()
        assert catalog.status("imagenet", packed).located.layout == "class folders, train packed"
        data = load_data("imagenet", CPU, packed)
        assert data.train._images.root.name == "train.pack"
        assert data.test._images.root.name == "val"

    @pytest.mark.parametrize("change", ["added", "removed", "renamed", "replaced"])
    def test_a_tree_that_has_changed_is_used_instead(self, packed, change):
        folder = packed / "imagenet" / "train" / "n02"
        match change:
            case "added":
                (folder / "9999.JPEG").write_bytes(made_up_data.jpeg(3))
            case "removed":
                (folder / "0001.JPEG").unlink()
            case "renamed":
                (folder / "0001.JPEG").rename(folder / "00011.JPEG")
            case "replaced":
                (folder / "0001.JPEG").write_bytes(made_up_data.jpeg(9, 200, 200))
        with pytest.warns(
            DataWarning, match=r"train\.pack was written from other files .*'iterand data pack' writes it"
        ):
            data = load_data("imagenet", CPU, packed)
        assert data.train._images.root == packed / "imagenet" / "train"
        expected, _ = everything_quietly(packed)
        pack(packed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, _ = everything(packed)
        assert torch.equal(found, expected)

    def test_an_image_whose_bytes_have_changed_is_gray_and_named(self, packed):
        path = packed / "imagenet" / "val.pack"
        images = open_pack(path)
        content = bytearray(path.read_bytes())
        content[int(images.index["start"][3]) + 200] ^= 1
        path.write_bytes(content)
        test = load_data("imagenet", CPU, packed).test
        with pytest.warns(
            DataWarning, match=r"cannot decode .*val\.pack/n02/0001\.JPEG \(its bytes are not those that"
        ):
            (batch,) = test.batches(torch.arange(6), 6)
        pixels = batch.inputs[0][3] * 255 * torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        pixels += 255 * torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        assert torch.allclose(pixels.flatten(1).mean(1), torch.tensor(GRAY).float(), atol=0.01)
        with pytest.raises(DataError, match=r"1 of 21 images cannot be decoded: .*val\.pack/n02/0001\.JPEG; replace"):
            catalog.check("imagenet", packed, lambda done, total: None)

    def test_a_broken_image_is_packed_as_it_is(self, root):
        broken = root / "imagenet" / "train" / "n03" / "0002.JPEG"
        broken.write_bytes(broken.read_bytes()[:300])
        pack(root)
        with pytest.warns(DataWarning, match=r"cannot decode .*train\.pack/n03/0002\.JPEG"):
            everything(root)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_one_that_is_cut_short_or_replaced_while_in_use_is_an_error(self, packed, workers):
        for change in ("cut short", "replaced"):
            test = load_data("imagenet", CPU, packed, workers=workers).test
            path = packed / "imagenet" / "val.pack"
            content, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
            path.write_bytes(content[:2000])
            if change == "cut short":
                os.utime(path, ns=times)
            with pytest.raises(DataError, match=rf"val\.pack was {change} while it was in use; start again"):
                list(test.batches(torch.arange(6), 6))
            path.write_bytes(content)


def everything_quietly(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        return everything(root)


class TestFormat:
    def test_as_it_is_written_down(self, tiny):
        """Read by a plain loop over the layout in the documentation."""
        content = (tiny / "imagenet" / "train.pack").read_bytes()
        magic, version, length = struct.unpack("<8sII", content[:16])
        assert (magic, version) == (b"ITERPACK", 1)
        listing = b"a/1.jpg\x003\na/2.jpg\x000\nb/\xc3\xbc.png\x00200\n"
        assert json.loads(content[16 : 16 + length]) == {
            "classes": {"a": 2, "b": 1},
            "tree": hashlib.sha256(listing).hexdigest(),
            "short_side": None,
            "quality": None,
        }
        place, index = 16 + length, b""
        for expected in (b"one", b"", b"three" * 40):
            size, checksum = struct.unpack("<II", content[place : place + 8])
            assert content[place + 8 : place + 8 + size] == expected
            assert checksum == zlib.crc32(expected)
            index += struct.pack("<QII", place + 8, size, checksum)
            place += 8 + size
        names = b"1.jpg\x002.jpg\x00\xc3\xbc.png"
        digest = hashlib.sha256(content[: 16 + length] + index + names).digest()
        end = struct.pack("<QQ", place, len(names)) + digest + b"ITERPACK"
        assert content[place:] == index + names + end

    def test_its_bytes_are_pinned(self, tiny):
        found = hashlib.sha256((tiny / "imagenet" / "val.pack").read_bytes()).hexdigest()
        assert found == "c365670c9d837edc1aab519a31c34fae489fb7cc405e6815f50ddc57ef347bb1"

    def test_one_cut_anywhere_is_refused(self, tiny, tmp_path):
        content = (tiny / "imagenet" / "train.pack").read_bytes()
        path = tmp_path / "train.pack"
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(DataError, match=r"train\.pack is not a whole pack: .*; remove it"):
                open_pack(path)

    def test_a_bit_that_fell_is_noticed(self, tiny, tmp_path):
        """In the header and the index when the pack is opened; in an image when that is used."""
        content = (tiny / "imagenet" / "train.pack").read_bytes()
        path = tmp_path / "train.pack"
        images = {
            place
            for start, length, _ in open_pack(tiny / "imagenet" / "train.pack").index.tolist()
            for place in range(start - 8, start + length)
        }
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            if place in images:
                assert len(open_pack(path).files) == 3
            else:
                with pytest.raises(DataError, match="is not a whole pack"):
                    open_pack(path)

    @pytest.mark.parametrize(
        ("header", "sentence"),
        [
            ({"classes": {"a": -1}, "tree": ""}, "its header cannot be read"),
            ({"classes": {"a": 1 << 70}, "tree": ""}, "its parts do not make up its length"),
            ({"classes": ["a"], "tree": ""}, "its header cannot be read"),
            ({"classes": {}, "tree": "", "more": 1}, "its header cannot be read"),
            ([], "its header cannot be read"),
        ],
    )
    def test_odd_headers_are_refused(self, tmp_path, header, sentence):
        text = json.dumps(header).encode()
        start = b"ITERPACK" + struct.pack("<II", 1, len(text)) + text
        end = struct.pack("<QQ", len(start), 0) + hashlib.sha256(start).digest() + b"ITERPACK"
        (tmp_path / "train.pack").write_bytes(start + end)
        with pytest.raises(DataError, match=sentence):
            open_pack(tmp_path / "train.pack")

    def test_a_later_version_is_refused(self, tiny, tmp_path):
        content = (tiny / "imagenet" / "train.pack").read_bytes()
        (tmp_path / "train.pack").write_bytes(content[:8] + b"\2" + content[9:])
        with pytest.raises(DataError, match="it has version 2, and this iterand reads version 1"):
            open_pack(tmp_path / "train.pack")


class TestWriting:
    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cut=st.floats(0, 1), rubbish=st.binary(max_size=40))
    def test_it_goes_on_from_any_place(self, tiny, cut, rubbish):
        path = tiny / "imagenet" / "train.pack"
        whole = path.read_bytes()
        part = path.with_name("train.pack.part")
        part.write_bytes(whole[: round(cut * len(whole))] + rubbish)
        path.unlink()
        pack(tiny)
        assert path.read_bytes() == whole
        assert not part.exists()

    def test_what_is_there_is_not_read_again(self, packed, monkeypatch):
        path = packed / "imagenet" / "train.pack"
        whole = path.read_bytes()
        path.rename(path.with_name("train.pack.part"))
        os.truncate(path.with_name("train.pack.part"), int(open_pack_start(whole, 9)) + 5)
        asked = []
        monkeypatch.setattr(packs, "read", lambda path: asked.append(path) or Path(path).read_bytes())
        pack(packed)
        assert path.read_bytes() == whole
        assert len(asked) == 6  # of 15; val.pack was there
        pack(packed)
        assert len(asked) == 6

    def test_killed_in_the_middle(self, root):
        pack(root)
        path = root / "imagenet" / "train.pack"
        part = path.with_name("train.pack.part")
        whole = path.read_bytes()
        path.unlink()
        script = (  # which gets no further than the tenth image
            "import itertools, sys; from iterand.lab.data import packs; packs._TOGETHER = 1\n"
            "read, number = packs.read, itertools.count(1)\n"
            "packs.read = lambda path: next(number) > 9 and sys.stdin.read() or read(path)\n"
            "from iterand.cli.main import main; sys.argv = ['iterand', 'data', 'pack']; main()"
        )
        environment = os.environ | {"ITERAND_DATA": str(root)}
        process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE)
        while not part.exists() or part.stat().st_size < len(whole) / 4:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.communicate()
        assert part.stat().st_size < len(whole)
        assert not path.exists()
        pack(root)
        assert path.read_bytes() == whole

    def test_other_settings_or_files_start_anew(self, packed):
        path = packed / "imagenet" / "train.pack"
        whole = path.read_bytes()
        (packed / "imagenet" / "train" / "n01" / "0000.JPEG").write_bytes(made_up_data.jpeg(7, 300, 260))
        path.with_name("train.pack.part").write_bytes(whole[:-100])
        pack(packed)
        assert path.read_bytes() != whole
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_data("imagenet", CPU, packed)

    def test_a_damaged_pack_is_written_anew(self, packed):
        path = packed / "imagenet" / "train.pack"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        pack(packed)
        assert path.read_bytes() == whole

    def test_only_one_at_a_time(self, root):
        def again(done, total):
            if done == 1:
                with pytest.raises(DataError, match=r"train\.pack is being packed by another process; wait for it"):
                    pack(root)
                refused.append(done)

        refused = []
        catalog.pack("imagenet", root, None, again)
        assert refused
        assert not list(root.rglob("*.lock"))

    def test_a_folder_that_may_not_be_written(self, root):
        (root / "imagenet" / "train.pack.part").mkdir()
        with pytest.raises(DataError, match=r"cannot write .*train\.pack\.part: Is a directory"):
            pack(root)

    def test_packs_alone_cannot_be_packed(self, packed):
        (packed / "imagenet" / "train").rename(packed / "away")
        with pytest.raises(DataError, match="imagenet has no class folders in train; a pack is written from them"):
            pack(packed)

    def test_progress_counts_both_parts(self, root):
        told = []
        catalog.pack("imagenet", root, None, lambda done, total: told.append((done, total)))
        assert {total for _, total in told} == {21}
        assert sorted({done for done, _ in told}) == list(range(1, 22))

    def test_what_is_loaded_whole_is_not_packed(self, root):
        with pytest.raises(ValueError, match="cifar10 cannot be packed, since it is loaded as a whole; what can be is"):
            catalog.pack("cifar10", root, None, lambda done, total: None)


def open_pack_start(content, image):
    """Where the record of an image starts, by a plain loop."""
    place = 16 + struct.unpack("<I", content[12:16])[0]
    for _ in range(image):
        place += 8 + struct.unpack("<I", content[place : place + 4])[0]
    return place


class TestScaling:
    @pytest.mark.parametrize(("width", "height", "expected"), [(500, 375, (341, 256)), (300, 600, (256, 512))])
    def test_larger_images_get_the_short_side(self, width, height, expected):
        with Image.open(io.BytesIO(Scaling(256)(made_up_data.jpeg(3, width, height)))) as image:
            assert (image.size, image.format) == (expected, "JPEG")

    @pytest.mark.parametrize("content", [made_up_data.jpeg(3, 256, 300), b"", b"rubbish"])
    def test_smaller_ones_and_broken_ones_stay(self, content):
        assert Scaling(256)(content) == content

    def test_its_use_is_said(self, root):
        (root / "imagenet" / "val" / "n01" / "0000.JPEG").write_bytes(made_up_data.jpeg(3, 400, 600))
        exact, _ = everything(root)
        pack(root, Scaling(256, 80))
        with pytest.warns(
            DataWarning, match=r"pack holds images scaled to a short side of 256 and .* other pixels than"
        ):
            load_data("imagenet", CPU, root)
        found, _ = everything_quietly(root)
        same = (found == exact).flatten(1).all(dim=1)
        assert same.tolist() == [index != 15 for index in range(21)]  # 15 for training and validation come first
        assert float((found - exact).abs().mean()) < 0.05

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ((100, 95), "the short side is 100; it is from 224, what networks see, to 4096 pixels"),
            ((256, 0), "the quality is 0; it is that of a JPEG file, from 1 to 100"),
        ],
    )
    def test_bad_settings(self, values, sentence):
        with pytest.raises(ValueError, match=sentence):
            Scaling(*values)


class TestCommand:
    @pytest.fixture(autouse=True)
    def folder(self, root, monkeypatch):
        monkeypatch.setenv("ITERAND_DATA", str(root))
        monkeypatch.setenv("COLUMNS", "200")

    def run(self, *arguments):
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    def test_pack_status_check(self, root):
        train, val = self.run("pack").stdout.splitlines()
        assert train.startswith(f"imagenet train: {root / 'imagenet' / 'train.pack'}, ")
        assert val.startswith(f"imagenet val: {root / 'imagenet' / 'val.pack'}, ")
        assert json.loads(self.run("status", "--json").stdout)["sets"]["imagenet"]["layout"] == "class folders, packed"
        assert self.run("check", "imagenet").stdout == (
            "imagenet: 21 images of 3 classes, all can be decoded (from train.pack and val.pack)\n"
        )
        for part in ("train", "val"):
            (root / "imagenet" / part).rename(root / f"away-{part}")
        assert json.loads(self.run("status", "--json").stdout)["sets"]["imagenet"]["layout"] == "packed"

    def test_json(self, root):
        found = json.loads(self.run("pack", "imagenet", "--short-side", "256", "--quality", "90", "--json").stdout)
        path = root / "imagenet" / "val.pack"
        assert found["packs"]["val"] == {"path": str(path), "bytes": path.stat().st_size}
        assert (open_pack(path).header.short_side, open_pack(path).header.quality) == (256, 90)

    def test_a_damaged_pack_is_a_sentence(self, root):
        self.run("pack")
        os.truncate(root / "imagenet" / "val.pack", 500)
        result = self.run("check", "imagenet")
        assert result.exit_code == 1
        assert (
            "val.pack is not a whole pack: it is cut short; remove it, and write it again if you like" in result.stderr
        )
