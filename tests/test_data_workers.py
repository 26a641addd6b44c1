"""Worker processes: the pixels of a plain loop, whatever happens to readers, workers and their parent."""

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import made_up_data
from iterand.errors import DataError
from iterand.lab.data import load_data, workers
from iterand.lab.data.decoding import GRAY, Task, decode
from iterand.lab.data.imagenet import DataWarning
from iterand.lab.data.images import words_of
from iterand.lab.data.workers import WorkerPool, close_pools, processors
from made_up_data import seeded

CPU = torch.device("cpu")


@pytest.fixture
def paths(tree):
    return [str(path) for path in sorted((tree / "imagenet" / "train").glob("*/*.JPEG"))]


@pytest.fixture
def pool():
    return WorkerPool(2)


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    close_pools()
    gc.collect()


def tasks(paths, size, words=None):
    return [
        Task(paths[start : start + size], None if words is None else words[start : start + size])
        for start in range(0, len(paths), size)
    ]


def pids(pool):
    return [process.pid for process in pool.processes]


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
        words = words_of(torch.arange(len(paths)), seeded()).numpy()
        found = [pixels.copy() for pixels, problems in pool.decoded(tasks(paths, size, words), min(size, 120))]
        expected = [decode(Path(path).read_bytes(), word.tolist()).pixels for path, word in zip(paths, words)]
        assert [len(pixels) for pixels in found] == [min(size, 120 - start) for start in range(0, 120, size)]
        assert np.array_equal(np.concatenate(found), np.stack(expected))

    @pytest.mark.parametrize("workers", [1, 2, 5])
    def test_any_number_of_workers_gives_the_batches_of_threads(self, tree, workers):
        def all_batches(workers):
            data = load_data("imagenet", CPU, tree, augmentation="resized_crop", workers=workers)
            order = torch.arange(50, 10, -1)
            batches = [*data.train.batches(order, 16, seeded()), *data.test.batches(torch.arange(12), 250)]
            return [(batch.inputs[0], batch.labels) for batch in batches]

        found, expected = all_batches(workers), all_batches(0)
        assert len(found) == 4
        for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)
            assert images.stride() == expected_images.stride()

    def test_no_examples(self, pool, tree):
        assert [len(pixels) for pixels, _ in pool.decoded([Task([], None)], 1)] == [0]
        data = load_data("imagenet", CPU, tree, workers=0)
        assert [len(batch.labels) for batch in data.train.batches(torch.arange(0), 4)] == [0]


class TestReaders:
    def test_one_that_stops_early_leaves_nothing(self, pool, paths):
        list(pool.decoded(tasks(paths, 10), 10))  # starts the workers
        handles = len(os.listdir("/dev/fd"))  # noqa: PTH208
        for _ in range(20):
            reader = pool.decoded(tasks(paths, 10), 10)
            next(reader)
            reader.close()
        assert len(list(pool.decoded(tasks(paths, 10), 10))) == 12
        assert len(os.listdir("/dev/fd")) <= handles  # noqa: PTH208

    def test_two_at_a_time(self, paths):
        one = workers.decoded(tasks(paths, 10), size=10, images=120, workers=1)
        other = workers.decoded(tasks(paths[::-1], 10), size=10, images=120, workers=1)
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

        reader = pool.decoded(counted(), 10)
        next(reader)
        assert asked == [0, 1, 2]  # that one and two in advance
        next(reader)
        assert asked == [0, 1, 2, 3]
        reader.close()


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
        reader = pool.decoded(tasks([*paths[:10], absent], 4), 4)
        next(reader)
        next(reader)
        with pytest.raises(DataError, match=r"cannot read .*absent\.JPEG: No such file"):
            next(reader)
        assert len(list(pool.decoded(tasks(paths, 10), 10))) == 12


class TestProcesses:
    def test_a_killed_worker_is_an_error_and_the_next_reader_gets_others(self, tree):
        data = load_data("imagenet", CPU, tree, workers=2)
        reader = data.train.batches(torch.arange(100).repeat(50), 10)
        next(reader)
        started = [process.pid for process in multiprocessing.active_children()]
        assert len(started) == 2
        os.kill(started[1], signal.SIGKILL)
        wait_until(lambda: gone(started[1]))  # which is no error here, but where the next batch is needed
        with pytest.raises(
            DataError, match=r"one of 2 worker processes .* died.* same command again to resume.*ITERAND_WORKERS"
        ):
            list(reader)
        wait_until(lambda: all(gone(pid) for pid in started))
        assert len(list(data.train.batches(torch.arange(100), 10))) == 10

    def test_an_error_that_is_kept_does_not_keep_the_process(self, tree, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import multiprocessing, torch\n"
            "from iterand.lab.data import load_data\n"
            "train = load_data('imagenet', torch.device('cpu'), workers=2).train\n"
            "reader = train.batches(torch.arange(100).repeat(9), 10)\n"
            "next(reader)\n"
            "multiprocessing.active_children()[0].kill()\n"
            "try:\n"
            "    list(reader)\n"
            "except Exception as error:\n"
            "    kept = error\n"
            "print(kept)\n"
        )
        environment = os.environ | {"ITERAND_DATA": str(tree)}
        ended = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "worker processes that decode images has died" in ended.stdout

    def test_workers_that_cannot_start_are_an_error(self, monkeypatch, paths):
        monkeypatch.setattr(workers, "_prepare_worker", lambda _: os._exit(3))
        with pytest.raises(DataError, match="one of 2 worker processes that decode images has died"):
            list(WorkerPool(2).decoded(tasks(paths, 10), 10))

    def test_processes_that_the_system_refuses_are_an_error(self, monkeypatch, paths):
        def refuse(process):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", refuse)
        with pytest.raises(DataError, match="cannot start 2 workers to decode images: Resource temporarily unavail"):
            list(WorkerPool(2).decoded(tasks(paths, 10), 10))

    def test_they_draw_no_random_number_of_the_caller(self, paths):
        before = torch.get_rng_state()
        list(workers.decoded(tasks(paths, 60), size=60, images=120, workers=1))
        assert torch.equal(torch.get_rng_state(), before)

    def test_an_interrupted_reader_ends_them(self, paths):
        reader = workers.decoded(tasks(paths, 10), size=10, images=120, workers=1)
        next(reader)
        (worker,) = multiprocessing.active_children()
        with pytest.raises(KeyboardInterrupt):
            reader.throw(KeyboardInterrupt)
        del reader
        gc.collect()
        wait_until(lambda: gone(worker.pid))

    def test_requests_to_stop_are_for_the_parent_only(self, pool, paths):
        list(pool.decoded(tasks(paths, 10), 10))
        assert len(pids(pool)) == 2
        for worker in pids(pool):
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        assert len(list(pool.decoded(tasks(paths, 10), 10))) == 12

    @pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
    def test_they_end_with_their_parent(self, tree, tmp_path, ending):
        """In a script without a guard for its main module, as many are."""
        script = tmp_path / "script.py"
        script.write_text(
            "import multiprocessing, signal, sys, torch\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which the shell of a job may ignore
            "from iterand.lab.data import load_data\n"
            "train = load_data('imagenet', torch.device('cpu'), workers=2).train\n"
            "reader = train.batches(torch.arange(100).repeat(9), 10)\n"
            "next(reader)\n"
            "print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)\n"
            "sys.stdin.readline()\n"
        )
        environment = os.environ | {"ITERAND_DATA": str(tree)}
        process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            started = [int(pid) for pid in process.stdout.readline().split()]
            assert len(started) == 2
            if ending is None:
                process.stdin.write("\n")
                process.stdin.close()
            elif ending == signal.SIGINT:
                os.killpg(process.pid, ending)  # as a terminal does
            else:
                process.send_signal(ending)
            assert process.wait() == (0 if ending is None else -ending)
            errors = process.stderr.read()
        assert errors.count("Traceback") == (ending == signal.SIGINT)  # that of the script
        wait_until(lambda: all(gone(pid) for pid in started))


class TestChoice:
    @pytest.mark.parametrize(("images", "started"), [(4, False), (5, True)])
    def test_processes_where_there_is_enough_to_do(self, monkeypatch, paths, images, started):
        monkeypatch.setattr(workers, "_FEWEST", 5)
        monkeypatch.setattr(workers, "processors", lambda: 1)
        list(workers.decoded(tasks(paths[:images], 2), size=2, images=images))
        assert len(multiprocessing.active_children()) == started
        close_pools()
        assert not multiprocessing.active_children()

    def test_the_environment_may_say_how_many(self, monkeypatch, paths):
        monkeypatch.setenv("ITERAND_WORKERS", "1")
        list(workers.decoded(tasks(paths[:4], 2), size=2, images=4))
        assert len(multiprocessing.active_children()) == 1
        close_pools()
        monkeypatch.setenv("ITERAND_WORKERS", "many")
        with pytest.raises(DataError, match=r"\$ITERAND_WORKERS is 'many'; it is a number of worker processes, or 0"):
            workers.decoded(tasks(paths[:4], 2), size=2, images=4)

    def test_where_processes_are_spawned_they_are_started_on_request_only(self, monkeypatch, paths):
        monkeypatch.setattr(workers, "_START_METHOD", "spawn")
        expected = [pixels.copy() for pixels, _ in workers.decoded(tasks(paths[:6], 3), size=3, images=10**6)]
        assert not multiprocessing.active_children()
        found = [pixels.copy() for pixels, _ in workers.decoded(tasks(paths[:6], 3), size=3, images=6, workers=1)]
        assert len(multiprocessing.active_children()) == 1
        assert np.array_equal(found, expected)

    def test_ranks_on_one_machine_share_its_processors(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
        for ranks, expected in (("4", 4), ("5", 3), ("64", 1), ("x", 16), ("0", 16)):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
            assert processors() == expected

    def test_a_bad_number(self, tree):
        with pytest.raises(ValueError, match="workers is -1; it is a number of processes, or 0 for threads"):
            load_data("imagenet", CPU, tree, workers=-1)
