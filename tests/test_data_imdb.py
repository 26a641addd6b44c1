"""IMDB in every layout: words, vocabulary, padding, cache, and everything that can be wrong with its files."""

import gzip
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import made_up_data
from iterand import philox
from iterand.errors import DataError
from iterand.lab.data import load_data
from iterand.lab.data.dataset import data_folder, fixed_order
from iterand.lab.data.imdb import check, locate
from iterand.lab.data.text import PADDING, UNKNOWN, TextSplit, Vocabulary, tokenize
from iterand.lab.networks import build_network

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def texts_of(split):
    """Tokens of every example, without the padding."""
    found = []
    for batch in split.batches(torch.arange(len(split)), 7):
        tokens, lengths = batch.inputs
        assert tokens.shape == (len(lengths), int(lengths.max()))
        assert tokens.dtype == torch.int64
        for row, length in zip(tokens, lengths.tolist()):
            assert row[length:].tolist() == [PADDING] * (len(row) - length)
            found.append(row[:length].tolist())
    return found


class TestWords:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("It's GOOD, isn't it?", ["it's", "good", ",", "isn't", "it", "?"]),
            ("one<br /><br />two", ["one", "two"]),
            ("'quoted' 10/10 ... déjà-vu", ["'", "quoted", "'", "10", "/", "10", ".", ".", ".", "déjà", "-", "vu"]),
            (" \n\t ", []),
            ("", []),
        ],
    )
    def test_tokenize(self, text, words):
        assert tokenize(text) == words

    @given(st.text())
    def test_nothing_but_spaces_is_lost(self, text):
        kept = "".join(tokenize(text))
        assert kept == re.sub(r"\s", "", text.replace("<br />", " ").lower())

    def test_the_most_frequent_words_then_the_alphabet(self):
        vocabulary = Vocabulary.most_frequent(["b a c", "c a", "d"], count=3)
        assert vocabulary.words == ("a", "c", "b")
        assert len(vocabulary) == 5
        assert vocabulary.encode("c b a d x").tolist() == [3, 4, 2, UNKNOWN, UNKNOWN]

    def test_an_empty_text_is_one_unknown_word(self):
        assert Vocabulary(["a"]).encode("  ").tolist() == [UNKNOWN]

    def test_numbers_of_a_whole_vocabulary_fit_the_network_and_the_storage(self):
        vocabulary = Vocabulary.most_frequent([f"w{number}" for number in range(30_000)])
        assert len(vocabulary) == 25_002
        assert vocabulary.encode(vocabulary.words[-1]).tolist() == [25_001]


def plain(root):
    """What the set should be, by the rules of the documentation, in plain Python."""
    rows = sorted(made_up_data.reviews("train", 40))
    order = fixed_order(40).tolist()
    parts = {
        "train": [rows[index] for index in order[12:]],
        "validation": [rows[index] for index in order[:12]],
        "test": sorted(made_up_data.reviews("test", 20)),
    }
    counts = Counter()
    for _, _, text in parts["train"]:
        counts.update(re.findall(r"[\w']+|!", text.replace("<br />", "")))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    numbers = {word: number + 2 for number, word in enumerate(words)}
    return {
        part: [
            ([numbers.get(word, 0) for word in re.findall(r"[\w']+|!", text.replace("<br />", ""))], label)
            for _, label, text in rows
        ]
        for part, rows in parts.items()
    }


@pytest.mark.parametrize("layout", ["folder", "tar.gz", "tar", "csv.gz", "csv", "deep folder", "csv in the root"])
def test_every_layout_gives_the_same_texts(tmp_path, layout):
    if "csv" in layout:
        folder = made_up_data.write_imdb_csv(tmp_path)
        for path in list(folder.iterdir()) if layout == "csv" else []:
            path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
            path.unlink()
        root = folder if layout == "csv in the root" else tmp_path
    else:
        folder = made_up_data.write_imdb_folder(tmp_path / "imdb" if "deep" in layout else tmp_path)
        root = tmp_path
        if "tar" in layout:
            made_up_data.pack(folder, tmp_path / f"aclImdb_v1.{layout}")
            shutil.rmtree(folder)
    data = load_data("imdb", CPU, root)
    assert (len(data.train), len(data.validation), len(data.test), data.classes) == (28, 12, 20, 2)
    for part, rows in plain(root).items():
        split = getattr(data, part)
        assert texts_of(split) == [tokens for tokens, _ in rows]
        assert split.labels.tolist() == [label for _, label in rows]


class TestBatches:
    @pytest.fixture
    def data(self, tmp_path):
        made_up_data.write_imdb_csv(tmp_path)
        return load_data("imdb", CPU, tmp_path)

    def test_the_network_takes_them(self, data):
        batch = next(iter(data.train.batches(torch.arange(28), 16)))
        outputs = build_network("lstm", classes=2, seed=0)(*batch.inputs)
        assert outputs.shape == (16, 1)
        assert batch.inputs[1].device.type == "cpu"

    def test_any_order(self, data):
        order = torch.tensor([27, 0, 13])
        (batch,) = data.train.batches(order, 64, lambda index: None)
        everything = texts_of(data.train)
        for row, length, index in zip(*batch.inputs, order.tolist()):
            assert row[:length].tolist() == everything[index]
        assert batch.labels.tolist() == data.train.labels[order].tolist()

    def test_an_empty_review_has_a_length(self, tmp_path):
        root = tmp_path / "other"
        folder = made_up_data.write_imdb_folder(root)
        (folder / "test" / "neg" / "99_1.txt").write_text("")
        lengths = [len(tokens) for tokens in texts_of(load_data("imdb", CPU, root).test)]
        assert len(lengths) == 21
        assert min(lengths) == 1

    def test_a_limited_test_part_has_both_classes(self, tmp_path):
        made_up_data.write_imdb_csv(tmp_path / "more")
        few = load_data("imdb", CPU, tmp_path / "more", train_limit=6)
        assert len(few.train) == 6 < len(few.test)
        data = load_data("imdb", CPU, tmp_path / "more", limit=6)
        assert (len(data.train), len(data.validation), len(data.test)) == (6, 6, 6)
        assert data.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
        whole = texts_of(load_data("imdb", CPU, tmp_path / "more").test)
        assert texts_of(data.test) == [whole[index] for index in (0, 3, 6, 10, 13, 16)]

    def test_new_texts_can_be_encoded(self, data):
        vocabulary = data.train.vocabulary
        assert vocabulary.encode("good zebra").tolist() == [2 + vocabulary.words.index("good"), UNKNOWN]

    def test_the_first_batch_of_a_seeded_run_is_pinned(self, data):
        order = philox.permutation(28, philox.key(7, "data order"), 0)
        batch = next(iter(data.train.batches(order, 5)))
        tokens, lengths = batch.inputs
        assert lengths.tolist() == [3, 3, 4, 5, 3]
        assert batch.labels.tolist() == [1, 0, 0, 1, 1]
        assert tokens.tolist() == [[8, 10, 2, 1, 1], [4, 8, 2, 1, 1], [5, 3, 4, 2, 1], [5, 3, 4, 3, 2], [9, 4, 2, 1, 1]]

    def test_a_split_alone(self):
        split = TextSplit(
            torch.tensor([5, 6, 7, 8], dtype=torch.int16), torch.tensor([3, 1]), torch.tensor([1, 0]), Vocabulary([])
        )
        (batch,) = split.batches(torch.tensor([1, 0]), 2)
        assert batch.inputs[0].tolist() == [[8, PADDING, PADDING], [5, 6, 7]]
        assert batch.inputs[1].tolist() == [1, 3]
        assert batch.labels.tolist() == [0, 1]


class TestCache:
    def test_the_second_time_nothing_is_tokenized(self, tmp_path, monkeypatch):
        made_up_data.write_imdb_csv(tmp_path)
        first = load_data("imdb", CPU, tmp_path)
        (file,) = (tmp_path / "cache").iterdir()
        assert file.name.startswith("imdb-1-")
        monkeypatch.setattr("iterand.lab.data.text.tokenize", lambda text: pytest.fail("tokenized again"))
        second = load_data("imdb", CPU, tmp_path)
        assert texts_of(first.train) == texts_of(second.train)
        assert first.train.vocabulary.words == second.train.vocabulary.words

    def test_other_content_has_another_cache(self, tmp_path):
        folder = made_up_data.write_imdb_folder(tmp_path)
        before = texts_of(load_data("imdb", CPU, tmp_path).test)
        (folder / "test" / "pos" / "9_9.txt").write_text("film film")
        after = texts_of(load_data("imdb", CPU, tmp_path).test)
        assert after[:-1] == before[:-1]
        assert len(set(after[-1])) == 1
        assert after[-1] != before[-1]
        assert len(list((tmp_path / "cache").iterdir())) == 2

    @pytest.mark.parametrize("rubbish", [b"", b"rubbish", b"\x08\0\0\0\0\0\0\0{}      "])
    def test_a_damaged_cache_is_made_again(self, tmp_path, rubbish):
        made_up_data.write_imdb_csv(tmp_path)
        first = texts_of(load_data("imdb", CPU, tmp_path).train)
        (file,) = (tmp_path / "cache").iterdir()
        whole = file.read_bytes()
        file.write_bytes(rubbish)
        assert texts_of(load_data("imdb", CPU, tmp_path).train) == first
        assert file.read_bytes() == whole

    def test_where_data_may_not_be_written_the_users_cache_is_used(self, tmp_path, monkeypatch):
        made_up_data.write_imdb_csv(tmp_path)
        (tmp_path / "cache").write_text("a file in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        load_data("imdb", CPU, tmp_path)
        assert len(list((tmp_path / "home" / "iterand").iterdir())) == 1
        monkeypatch.setattr("iterand.lab.data.text.tokenize", lambda text: pytest.fail("tokenized again"))
        load_data("imdb", CPU, tmp_path)

    def test_without_any_place_for_it_loading_works_too(self, tmp_path, monkeypatch):
        made_up_data.write_imdb_csv(tmp_path)
        (tmp_path / "cache").write_text("a file in the way")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert len(load_data("imdb", CPU, tmp_path).train) == 28

    def test_without_a_home_loading_works_too(self, tmp_path, monkeypatch):
        def homeless():
            raise RuntimeError("Could not determine home directory.")

        made_up_data.write_imdb_csv(tmp_path)
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
        assert len(load_data("imdb", CPU, tmp_path).train) == 28


class TestBadFiles:
    def write(self, root, text):
        folder = made_up_data.write_imdb_csv(root)
        (folder / "test.csv.gz").unlink()
        (folder / "test.csv").write_text(text, encoding="utf-8")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("id,label,rating,text\na,1,9,fine\nb,2,9,odd\n", r"line 3 of .*test\.csv has label '2', but labels are 0"),
            ("id,label,rating,text\na,,9,fine\n", r"line 2 of .*test\.csv has label ''"),
            ("id,rating,text\na,9,fine\n", r"line 2 of .*test\.csv lacks one of the columns id, label, text"),
            ("id,label,rating,text\na,1\n", r"line 2 of .*test\.csv lacks one of the columns"),
            ('id,label,rating,text\na,1,9,"never closed\n', r"line \d of .*test\.csv is no csv"),
            ("id,label,rating,text\na,1,9,fine\n", "imdb has no review of the class neg for test"),
            ("", "imdb has no review of the class neg for test"),
        ],
    )
    def test_bad_rows(self, tmp_path, text, message):
        self.write(tmp_path, text)
        with pytest.raises(DataError, match=message):
            load_data("imdb", CPU, tmp_path)

    def test_not_utf8(self, tmp_path):
        folder = made_up_data.write_imdb_folder(tmp_path)
        (folder / "train" / "neg" / "3_1.txt").write_bytes(b"caf\xe9")
        with pytest.raises(DataError, match=r"train/neg/3_1\.txt in .*aclImdb is not UTF-8 \(.* at byte 3\)"):
            load_data("imdb", CPU, tmp_path)

    @pytest.mark.parametrize("name", ["imdb/train.csv.gz", "aclImdb_v1.tar.gz"])
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
    def test_cut_short(self, tmp_path, name, share):
        if "csv" in name:
            made_up_data.write_imdb_csv(tmp_path)
        else:
            folder = made_up_data.write_imdb_folder(tmp_path)
            made_up_data.pack(folder, tmp_path / name)
            shutil.rmtree(folder)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: int(share * len(content))])
        with pytest.raises(DataError, match=r"train\.csv\.gz|aclImdb_v1\.tar\.gz|imdb has no review") as caught:
            load_data("imdb", CPU, tmp_path)
        assert "fetch it again" in str(caught.value)

    def test_half_of_the_csv(self, tmp_path):
        folder = made_up_data.write_imdb_csv(tmp_path)
        (folder / "test.csv.gz").unlink()
        with pytest.raises(DataError, match=r"imdb has no test\.csv nor test\.csv\.gz; put one there"):
            load_data("imdb", CPU, tmp_path)

    def test_missing(self, tmp_path):
        with pytest.raises(
            DataError, match=r"imdb is not in .*, or get https://ai\.stanford\.edu/.*aclImdb_v1\.tar\.gz yourself"
        ):
            load_data("imdb", CPU, tmp_path)


def test_the_real_set():
    located = locate(data_folder())
    if located is None:
        pytest.skip("IMDB is not in $ITERAND_DATA")
    assert check(located, lambda done, total: None) == "50,000 reviews, half of them positive"


class TestGroups:
    """Texts of about one length share a batch."""

    @pytest.fixture
    def split(self):
        lengths = torch.randint(1, 400, (1000,), generator=torch.Generator().manual_seed(0))
        vocabulary = Vocabulary(["word"])
        return TextSplit(torch.zeros(int(lengths.sum()), dtype=torch.int32), lengths, torch.zeros(1000), vocabulary)

    def longest(self, split, order, size=8):
        return sum(batch.inputs[0].shape[1] for batch in split.batches(order, size))

    @given(st.integers(0, 60), st.integers(1, 9))
    def test_every_text_comes_once_and_the_last_batch_stays(self, count, size):
        lengths = torch.arange(1, count + 1)
        split = TextSplit(torch.zeros(int(lengths.sum())), lengths, torch.zeros(count), Vocabulary(["word"]))
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        grouped = split.grouped(order, size)
        assert sorted(grouped.tolist()) == list(range(count))
        whole = count - count % size
        assert grouped[whole:].tolist() == order[whole:].tolist()
        parts = [sorted(part) for part in grouped[:whole].view(-1, size).tolist()]
        assert sorted(parts) == [sorted(part) for part in order[:whole].sort().values.view(-1, size).tolist()]

    def test_batches_are_short_and_in_a_random_order(self, split):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
        grouped = split.grouped(order, 8)
        assert self.longest(split, grouped) < 0.6 * self.longest(split, order)
        lengths = [int(batch.inputs[1].max()) for batch in split.batches(grouped, 8)]
        rising = sum(one < other for one, other in pairwise(lengths))
        assert 45 < rising < 80  # of 124
        assert not torch.equal(grouped, split.grouped(order.flip(0), 8))
        assert torch.equal(grouped, split.grouped(order, 8))


def test_two_reviews_are_too_few(tmp_path):
    rows = "id,label,text\n1,0,bad\n2,1,good\n"
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text(rows)
    with pytest.raises(DataError, match="too few reviews"):
        load_data("imdb", CPU, tmp_path)
