"""Worker processes: the pixels of a plain loop, whatever happens to readers, workers and their parent."""

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import made_up_data
from iterand import philox
from iterand.errors import DataError
from iterand.lab.data import decoder_pool, load_data, workers
from iterand.lab.data.decoder_pool import DecoderPool
from iterand.lab.data.decoding import GRAY, Task, decode
from iterand.lab.data.imagenet import DataWarning
from iterand.lab.data.images import words_of
from iterand.lab.data.workers import processors

CPU = torch.device("cpu")


def seeded(index):
    return philox.philox(index, 0, philox.key(7, "augmentation"), philox.DATA)


@pytest.fixture
def paths(tree):
    return [str(path) for path in sorted((tree / "imagenet" / "train").glob("*/*.JPEG"))]


@pytest.fixture(scope="module")
def pool():
    pool = DecoderPool(2)
    yield pool
    pool.close()


def tasks(paths, size, words=None):
    return [
        Task(paths[start : start + size], None if words is None else words[start : start + size])
        for start in range(0, len(paths), size)
    ]


def pids(pool):
    return [worker.process.pid for worker in pool._workers]


def wait_until(condition):
    while not condition():
        time.sleep(0.02)


def gone(pid):
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True


class TestPixels:
    @pytest.mark.parametrize("size", [1, 7, 120, 500])
    def test_those_of_a_plain_loop(self, pool, paths, size):
        words = words_of(torch.arange(len(paths)), seeded).numpy()
        found = [pixels.copy() for pixels, problems in pool.decoded(tasks(paths, size, words), min(size, 120), 2)]
        expected = [decode(Path(path).read_bytes(), word.tolist()).pixels for path, word in zip(paths, words)]
        assert [len(pixels) for pixels in found] == [min(size, 120 - start) for start in range(0, 120, size)]
        assert np.array_equal(np.concatenate(found), np.stack(expected))

    @pytest.mark.parametrize("workers", [1, 2, 5])
    def test_any_number_of_workers_gives_the_batches_of_threads(self, tree, workers):
        def all_batches(workers):
            data = load_data("imagenet", CPU, tree, augmentation="resized_crop", workers=workers)
            order = torch.arange(50, 10, -1)
            batches = [*data.train.batches(order, 16, seeded), *data.test.batches(torch.arange(12), 250)]
            return [(batch.inputs[0], batch.labels) for batch in batches]

        found, expected = all_batches(workers), all_batches(0)
        decoder_pool.shared_pool(workers).close()
        assert len(found) == 4
        for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
            assert images.stride() == expected_images.stride()

    def test_no_examples(self, pool, tree):
        assert [len(pixels) for pixels, _ in pool.decoded([Task([], None)], 1, 2)] == [0]
        data = load_data("imagenet", CPU, tree, workers=0)
        assert [len(batch.labels) for batch in data.train.batches(torch.arange(0), 4)] == [0]


class TestReaders:
    def test_one_that_stops_early_leaves_nothing(self, pool, paths):
        handles = len(os.listdir("/dev/fd"))  # noqa: PTH208
        for _ in range(20):
            reader = pool.decoded(tasks(paths, 10), 10, 3)
            next(reader)
            reader.close()
        assert len(os.listdir("/dev/fd")) <= handles  # noqa: PTH208
        assert not pool._streams
        assert len(list(pool.decoded(tasks(paths, 10), 10, 3))) == 12
        assert all(worker.images == 0 for worker in pool._workers)

    def test_two_at_a_time(self, pool, paths):
        one, other = pool.decoded(tasks(paths, 10), 10, 2), pool.decoded(tasks(paths[::-1], 10), 10, 2)
        pairs = [(first.copy(), second.copy()) for (first, _), (second, _) in zip(one, other)]
        forward = np.concatenate([first for first, _ in pairs])
        backward = np.concatenate([second for _, second in pairs])
        assert np.array_equal(forward, backward[::-1])

    def test_at_most_so_many_are_begun(self, pool, paths):
        asked = []

        def counted():
            for number, task in enumerate(tasks(paths, 10)):
                asked.append(number)
                yield task

        reader = pool.decoded(counted(), 10, 3)
        next(reader)
        assert asked == [0, 1, 2, 3]
        next(reader)
        assert asked == [0, 1, 2, 3, 4]
        reader.close()

    def test_more_work_than_a_connection_holds(self, monkeypatch, tmp_path):
        """So many requests and answers at a time that neither side may wait for the other to read."""
        monkeypatch.setattr(decoder_pool, "_MOST", 1)
        paths = [str(tmp_path / f"{number:0250}") for number in range(400)]
        for path in paths:
            Path(path).write_bytes(b"")
        pool = DecoderPool(1)
        found = list(islice(pool.decoded(tasks(paths * 5, 400), 400, 3), 5))
        assert [len(problems) for _, problems in found] == [400] * 5
        pool.close()


class TestBrokenImages:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_they_are_gray_and_named(self, tmp_path, workers):
        made_up_data.write_imagenet(tmp_path, train=6, val=2)
        broken = tmp_path / "imagenet" / "val" / "n02" / "0001.JPEG"
        broken.write_bytes(broken.read_bytes()[:300])
        test = load_data("imagenet", CPU, tmp_path, normalization="imagenet", workers=workers).test
        with pytest.warns(DataWarning, match="cannot decode .*val/n02/0001.JPEG .* as for 1 of 6 so far"):
            (batch,) = test.batches(torch.arange(6), 6)
        mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        gray = (torch.tensor(GRAY) / 255 - mean) / deviation
        assert torch.allclose(batch.inputs[0][3].flatten(1).mean(1), gray, atol=1e-4)
        assert list(test.corrupt) == [broken]

    def test_a_file_that_went_away_is_an_error(self, pool, paths, tmp_path):
        absent = str(tmp_path / "absent.JPEG")
        reader = pool.decoded(tasks([*paths[:10], absent], 4), 4, 2)
        next(reader)
        next(reader)
        with pytest.raises(DataError, match=r"cannot read .*absent\.JPEG: No such file"):
            next(reader)
        assert len(list(pool.decoded(tasks(paths, 10), 10, 2))) == 12


class TestProcesses:
    def test_a_killed_worker_is_an_error_and_the_next_reader_gets_others(self, tree, paths):
        data = load_data("imagenet", CPU, tree, workers=2)
        reader = data.train.batches(torch.arange(100).repeat(50), 10)
        next(reader)
        pool = decoder_pool.shared_pool(2)
        os.kill(pids(pool)[1], signal.SIGKILL)
        with pytest.raises(
            DataError, match=r"one of 2 worker processes .* died.* the last checkpoint.*ITERAND_WORKERS"
        ):
            list(reader)
        wait_until(lambda: all(gone(pid) for pid in pids(pool)))
        assert len(list(data.train.batches(torch.arange(100), 10))) == 10
        decoder_pool.shared_pool(2).close()

    def test_workers_that_cannot_start_are_an_error(self, monkeypatch, paths):
        monkeypatch.setattr(decoder_pool, "_PROGRAM", "raise SystemExit(3) # {package} {folder} {handle}")
        pool = DecoderPool(2)
        with pytest.raises(DataError, match="one of 2 worker processes that decode images has died"):
            list(pool.decoded(tasks(paths, 10), 10, 2))

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks for libraries in /proc")
    def test_they_are_small(self, pool, paths):
        """Without torch: a worker that imports it takes seconds to start, and 200 MB."""
        list(pool.decoded(tasks(paths, 10), 10, 2))
        for worker in pids(pool):
            maps = Path(f"/proc/{worker}/maps").read_text()
            assert "_imaging" in maps
            assert "torch" not in maps

    def test_an_interrupted_reader_leaves_no_half_sent_message(self, paths):
        pool = DecoderPool(1)
        reader = pool.decoded(tasks(paths, 10), 10, 2)
        next(reader)
        with pytest.raises(KeyboardInterrupt):
            reader.throw(KeyboardInterrupt)
        assert pool.closed
        assert all(gone(pid) for pid in pids(pool))

    def test_requests_to_stop_are_for_the_parent_only(self, pool, paths):
        for worker in pids(pool):
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        assert len(list(pool.decoded(tasks(paths, 10), 10, 2))) == 12

    @pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, None])
    def test_they_end_with_their_parent(self, tree, tmp_path, ending):
        """In a script without a guard for its main module, as many are."""
        script = tmp_path / "script.py"
        script.write_text(
            "import sys, time, torch\n"
            "from iterand.lab.data import decoder_pool, load_data\n"
            "train = load_data('imagenet', torch.device('cpu'), workers=2).train\n"
            "reader = train.batches(torch.arange(100).repeat(9), 10)\n"
            "next(reader)\n"
            "print(*[worker.process.pid for worker in decoder_pool.shared_pool(2)._workers], flush=True)\n"
            "sys.stdin.readline()\n"
        )
        environment = os.environ | {"ITERAND_DATA": str(tree)}
        process = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with process:
            started = [int(pid) for pid in process.stdout.readline().split()]
            assert len(started) == 2
            if ending is None:
                process.stdin.write("\n")
                process.stdin.close()
            else:
                process.send_signal(ending)
            assert process.wait() == (0 if ending is None else -ending)
        wait_until(lambda: all(gone(pid) for pid in started))


class TestChoice:
    @pytest.mark.parametrize(("images", "started"), [(4, False), (5, True)])
    def test_processes_where_there_is_enough_to_do(self, monkeypatch, paths, images, started):
        monkeypatch.setattr(workers, "_FEWEST", 5)
        monkeypatch.setattr(workers, "processors", lambda: 1)
        list(workers.decoded(tasks(paths[:images], 2), size=2, images=images))
        assert decoder_pool.running(1) == started
        if started:
            decoder_pool.shared_pool(1).close()

    def test_the_environment_may_say_how_many(self, monkeypatch, paths):
        monkeypatch.setenv("ITERAND_WORKERS", "1")
        list(workers.decoded(tasks(paths[:4], 2), size=2, images=4))
        assert decoder_pool.running(1)
        decoder_pool.shared_pool(1).close()
        monkeypatch.setenv("ITERAND_WORKERS", "many")
        with pytest.raises(DataError, match=r"\$ITERAND_WORKERS is 'many'; it is a number of worker processes, or 0"):
            workers.decoded(tasks(paths[:4], 2), size=2, images=4)

    def test_ranks_on_one_machine_share_its_processors(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
        for ranks, expected in (("4", 4), ("5", 3), ("64", 1), ("x", 16), ("0", 16)):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
            assert processors() == expected

    def test_a_bad_number(self, tree):
        with pytest.raises(ValueError, match="workers is -1; it is a number of processes, or 0 for threads"):
            load_data("imagenet", CPU, tree, workers=-1)
