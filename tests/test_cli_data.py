"""``iterand data``: what is printed, and with which exit code."""

import hashlib
import importlib.util
import json

import pytest
from typer.testing import CliRunner

import made_up_data
from iterand.cli.data import app
from iterand.errors import DataError
from iterand.lab.data import cifar10, imdb
from iterand.lab.data.download import ARCHIVES, Archive


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ITERAND_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    monkeypatch.setattr(imdb, "PUBLISHED", 40)


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A small CIFAR-10 that is as published."""
    records = made_up_data.cifar_records()
    for name, rows in records.items():
        monkeypatch.setitem(cifar10.PUBLISHED, name, hashlib.sha256(rows.tobytes()).hexdigest())
    return made_up_data.write_cifar_binary(tmp_path, records)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


class TestStatus:
    def test_table(self, published):
        lines = {line.split()[0]: line for line in run("status").stdout.splitlines()}
        assert "yes" in lines["digits"]
        assert "yes" in lines["cifar10"]
        assert "(binary)" in lines["cifar10"]
        assert "no" in lines["imagenet"].split()
        assert "no" in lines["imdb"].split()
        assert "iterand data fetch imdb" in lines["imdb"]

    def test_json(self, tmp_path, published):
        found = json.loads(run("status", "--json").stdout)
        assert found["data_dir"] == str(tmp_path)
        assert {name: entry["there"] for name, entry in found["sets"].items()} == {
            "digits": True,
            "cifar10": True,
            "imagenet": False,
            "imdb": False,
        }
        assert found["sets"]["cifar10"]["path"] == str(published)
        assert found["sets"]["cifar10"]["layout"] == "binary"
        assert "image-net.org" in found["sets"]["imagenet"]["advice"]

    def test_one_name_and_another_folder(self, tmp_path, published):
        found = json.loads(run("status", "cifar10", "--data-dir", str(tmp_path / "other"), "--json").stdout)
        assert list(found["sets"]) == ["cifar10"]
        assert found["sets"]["cifar10"]["there"] is False

    def test_the_advice_names_the_folder(self, tmp_path):
        root = tmp_path / "other"
        found = json.loads(run("status", "imdb", "--data-dir", str(root), "--json").stdout)
        assert found["sets"]["imdb"]["advice"] == f"iterand data fetch imdb --data-dir {root}"

    def test_own_images(self, tmp_path):
        def status(root):
            found = json.loads(run("status", "image_folder", "--data-dir", str(root), "--json").stdout)
            return found["sets"]["image_folder"]

        assert status(tmp_path / "none")["there"] is False
        assert status(tmp_path / "none")["advice"].startswith(f"the folder {tmp_path / 'none'} does not exist; images")
        assert status(tmp_path)["advice"].startswith(f"{tmp_path} has no class folders; images are in")
        photos = made_up_data.write_image_folder(tmp_path / "photos", {"train": 3, "test": 1})
        assert (status(photos)["there"], status(photos)["path"]) == (True, str(photos))

    def test_an_unknown_name_is_left_to_main(self):
        with pytest.raises(ValueError, match="unknown data set 'imgnet'; did you mean 'imagenet'"):
            run("status", "imgnet")


class TestFetch:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch):
        monkeypatch.setenv("no_proxy", "*")
        for name in ARCHIVES:
            monkeypatch.setitem(ARCHIVES, name, Archive(f"http://127.0.0.1:1/{name}.tar.gz", "0" * 32))

    def test_offline(self):
        with pytest.raises(
            DataError, match=r"cannot reach 127\.0\.0\.1 .* download http://127\.0\.0\.1:1/cifar10\.tar\.gz"
        ):
            run("fetch", "cifar10")

    def test_what_is_there_is_said(self, tmp_path, published):
        made_up_data.write_imdb_csv(tmp_path)
        assert run("fetch").stdout.splitlines() == [f"cifar10: {published}", f"imdb: {tmp_path / 'imdb'}"]
        found = json.loads(run("fetch", "cifar10", "--json").stdout)
        assert found == {"data_dir": str(tmp_path), "sets": {"cifar10": str(published)}}

    def test_imagenet(self):
        with pytest.raises(DataError, match="imagenet cannot be fetched"):
            run("fetch", "imagenet")


class TestCheck:
    def test_everything_that_is_there(self, tmp_path, published):
        made_up_data.write_imagenet(tmp_path, train=3, val=1)
        made_up_data.write_imdb_csv(tmp_path, train=40, test=40)
        assert run("check").stdout.splitlines() == [
            "digits: 1,797 images",
            "cifar10: 120 images, all as published",
            "imagenet: 12 images of 3 classes, all can be decoded",
            "imdb: 80 reviews, half of them positive",
        ]

    def test_one_wrong_byte(self, published):
        content = bytearray((published / "data_batch_2.bin").read_bytes())
        content[2000] ^= 1
        (published / "data_batch_2.bin").write_bytes(content)
        result = run("check", "cifar10", code=1)
        assert result.stdout == ""
        assert f"data_batch_2 in {published} differs from the published one: SHA-256" in result.stderr
        found = json.loads(run("check", "--json", code=1).stdout)["sets"]
        assert found["digits"]["right"] is True
        assert found["cifar10"]["right"] is False

    def test_one_broken_image_among_many(self, tmp_path):
        tree = made_up_data.write_imagenet(tmp_path, train=30, val=2)
        broken = tree / "train" / "n02" / "0017.JPEG"
        broken.write_bytes(broken.read_bytes()[:300])
        result = run("check", "imagenet", code=1)
        assert f"1 of 96 images cannot be decoded: {broken}; replace or remove them" in result.stderr

    def test_reviews_are_missing(self, tmp_path):
        made_up_data.write_imdb_csv(tmp_path, train=38, test=40)
        result = run("check", "imdb", code=1)
        assert "has 19 positive of 38 reviews for train, but 20 of 40 were published" in result.stderr

    def test_an_archive_with_another_checksum(self, tmp_path):
        made_up_data.pack(made_up_data.write_imdb_folder(tmp_path / "made"), tmp_path / "aclImdb_v1.tar.gz")
        result = run("check", "imdb", code=1)
        assert f"{tmp_path / 'aclImdb_v1.tar.gz'} differs from the published file (MD5 7c2a" in result.stderr

    def test_what_is_not_there(self):
        assert "imdb is not in" in run("check", "imdb", code=1).stderr
        assert run("check").stdout == "digits: 1,797 images\n"

    def test_nothing_is_there(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # scikit-learn is not installed
        with pytest.raises(DataError, match=r"no data set is in .*; 'iterand data status' says how to get them"):
            run("check")


def test_usage():
    assert run("--help").stdout.count("fetch") >= 1
    assert run("check", "--datadir", "x", code=2)
