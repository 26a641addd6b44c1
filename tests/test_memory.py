"""Memory is asked for before it is taken: no test here takes more than a little, whatever it asks for."""

import gzip
import math
import os
import re
import tarfile

import pytest
import torch

import made_up_data
from iterand import memory
from iterand.errors import NotEnoughMemoryError
from iterand.lab.data import load_data, reading
from iterand.lab.experiments.library import find_recipe
from iterand.lab.experiments.local import Event, Task, do
from iterand.lab.networks import build_network, network_names, network_outline
from iterand.lab.training import network, recipe_file, steps
from iterand.lab.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from iterand.lab.training.loop import NullObserver
from iterand.lab.training.network import build_for_data
from iterand.lab.training.recipe import Recipe

CPU = torch.device("cpu")
KIB = 1024


@pytest.fixture
def free(monkeypatch):
    """Set how many bytes are free on any device."""

    def set_free(count):
        monkeypatch.setattr(memory, "available", lambda device=None: count)

    return set_free


class TestHowMuchThereIs:
    @pytest.fixture(autouse=True)
    def no_limit(self, monkeypatch):
        monkeypatch.setattr(memory, "_address_space", lambda root: [])

    @staticmethod
    def write(root, files):
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def test_of_the_machine(self, tmp_path):
        self.write(tmp_path, {"proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    500 kB\nSwapFree: 20 kB\n"})
        assert memory.main_memory(tmp_path) == 520 * KIB

    def test_a_control_group_leaves_less(self, tmp_path):
        """Files that are kept in memory count as used, but can go."""
        self.write(
            tmp_path,
            {
                "proc/meminfo": "MemAvailable: 500 kB\nSwapFree: 20 kB\n",
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/memory.max": str(300 * KIB),
                "sys/fs/cgroup/outer/memory.current": str(150 * KIB),
                "sys/fs/cgroup/outer/memory.stat": f"anon 1\nactive_file {10 * KIB}\ninactive_file {40 * KIB}\n",
                "sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "sys/fs/cgroup/outer/inner/memory.current": "1\n",
            },
        )
        assert memory.main_memory(tmp_path) == (300 - 150 + 50 + 20) * KIB

    @pytest.mark.parametrize("seen_as", ["job", ""], ids=["by its name", "as the root, as in a container"])
    def test_a_control_group_of_version_1(self, tmp_path, seen_as):
        self.write(
            tmp_path,
            {
                "proc/meminfo": "MemAvailable: 500 kB\n",
                "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
                f"sys/fs/cgroup/memory/{seen_as}/memory.limit_in_bytes": str(100 * KIB),
                f"sys/fs/cgroup/memory/{seen_as}/memory.usage_in_bytes": str(60 * KIB),
                f"sys/fs/cgroup/memory/{seen_as}/memory.stat": f"cache 7\ntotal_inactive_file {30 * KIB}\n",
            },
        )
        assert memory.main_memory(tmp_path) == 70 * KIB

    def test_a_group_that_uses_more_than_it_may_leaves_nothing(self, tmp_path):
        self.write(
            tmp_path,
            {
                "proc/meminfo": "MemAvailable: 500 kB\n",
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "10",
                "sys/fs/cgroup/memory.current": "20",
            },
        )
        assert memory.main_memory(tmp_path) == 0

    def test_all_there_is_where_the_system_does_not_say_what_is_free(self, tmp_path, monkeypatch):
        sizes = {"SC_PAGE_SIZE": 16 * KIB, "SC_PHYS_PAGES": 1000}
        monkeypatch.setattr(os, "sysconf_names", sizes, raising=False)
        monkeypatch.setattr(os, "sysconf", sizes.__getitem__, raising=False)
        assert memory.main_memory(tmp_path) == 16_000 * KIB

    def test_unknown_where_the_system_says_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "sysconf_names", {}, raising=False)
        assert memory.main_memory(tmp_path) is None


def test_a_limit_on_the_address_space_counts(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    page = resource.getpagesize()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 500000 kB\n")
    (tmp_path / "proc/self/statm").write_text("10 5 1 1 0 3 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100 * page, resource.RLIM_INFINITY))
    assert memory.main_memory(tmp_path) == 90 * page
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory.main_memory(tmp_path) == 500_000 * KIB


def test_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert memory.available(torch.device("cuda")) == 130
    with pytest.raises(NotEnoughMemoryError, match="this takes at least 131 B of memory, but 130 B are free on cuda:1"):
        memory.require(131, "this", "take less", torch.device("cuda:1"))


def test_what_fits_or_cannot_be_known_is_not_refused(free):
    free(100)
    memory.require(100, "this", "take less")
    free(None)
    memory.require(math.inf, "this", "take less")


@pytest.fixture
def no_gpu(monkeypatch):
    def refuse(device):
        raise RuntimeError("no CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (24.2e9, "24.2 GB"), (999_700, "1 MB"), (3.2e17, "320 PB")],
)
def test_amounts_for_people(count, text):
    assert memory.amount(count) == text


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "there is not enough memory on this machine; take less"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes. Error code 12"),
            "there is not enough memory on this machine, 1024 bytes more were asked for; take less",
        ),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
            "there is not enough memory on this machine, 8 bytes more were asked for; take less",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of"),
            "there is not enough memory on the GPU, 20.00 GiB more were asked for; take less",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "there is not enough memory on the GPU; take less",
        ),
    ],
)
def test_memory_that_runs_out_is_a_sentence(error, sentence, no_gpu):
    with pytest.raises(NotEnoughMemoryError) as caught, memory.exhaustion_explained("take less"):
        raise error
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("free", "sentence"),
    [
        (1e9, "there is not enough memory on the GPU, of whose 80 GB other processes have 59 GB, 2.00 GiB more were"),
        (50e9, "there is not enough memory on the GPU, 2.00 GiB more were"),
    ],
)
def test_a_gpu_full_of_other_processes_is_said_to_be(free, sentence, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (int(free), int(80e9)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(20e9))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of")
    with (
        pytest.raises(NotEnoughMemoryError, match=re.escape(f"{sentence} asked for; take less")),
        memory.exhaustion_explained("take less"),
    ):
        raise error
    assert asked == [3]


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access was encountered"), KeyError("x")])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, memory.exhaustion_explained("take less"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("name", network_names())
def test_an_outline_is_the_network_without_memory(name):
    outline, network = network_outline(name, width_factor=0.1), build_network(name, width_factor=0.1)
    assert all(tensor.is_meta for tensor in outline.state_dict().values())
    found, expected = ({key: (t.shape, t.dtype) for key, t in one.state_dict().items()} for one in (outline, network))
    assert found == expected


class TestNetworks:
    @pytest.fixture
    def nothing_built(self, monkeypatch):
        def build(**options):
            raise AssertionError(f"memory was taken for {options}")

        monkeypatch.setattr(network, "build_network", build)

    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            ("width_factor=1e3", "network.width_factor is 1000; training such a digits_conv takes at least 710 GB"),
            ("width_factor=1e6", "network.width_factor is 1e+06; training such a digits_conv takes at least 710 PB"),
            ("width_factor=1e9", "1e+09; training such a digits_conv takes more memory than any machine has"),
            ("width_factor=1e12", "1e+12; training such a digits_conv takes more memory than any machine has"),
            ("classes=2000000000", "network.classes is 2e+09; training such a digits_conv takes at least 2.82 TB"),
        ],
    )
    def test_one_that_is_too_large_is_refused_before_it_is_built(self, cli, free, nothing_built, setting, words):
        free(8_000_000_000)
        code, _, err = cli("train", "--set", setting)
        assert code == 1
        assert words in err
        assert err.endswith("; make the network smaller\n")
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        ("method", "numbers"),
        # In training a weight, gradient and momentum, or also a score and a draw; in a checkpoint, copied and then
        # written, weights and momenta, or scores, draws and momenta.
        [("sgd", 3 + 2 * 2), ("imp", 4 + 2 * 2), ("iterand", 5 + 2 * 3)],
    )
    def test_what_training_takes_is_counted_for_each_method(self, free, nothing_built, method, numbers):
        recipe = recipe_file.override(Recipe(), [f"method.name={method}", "epochs=4", "width_factor=10"])
        weights = sum(p.numel() for p in network_outline("digits_conv", width_factor=10).parameters())
        data = load_data("digits", CPU)
        free(4 * weights * (numbers - 0.1))
        with pytest.raises(NotEnoughMemoryError):
            build_for_data(recipe, data)
        free(4 * weights * (numbers + 0.1))
        with pytest.raises(AssertionError, match="memory was taken"):
            build_for_data(recipe, data)

    def test_a_batch_that_is_too_large_is_refused(self, free):
        recipe = recipe_file.override(Recipe(), ["batch_size=1000"])
        inputs = 64 + 16 * 64 + 16 * 16 + 32 * 16 + 128  # of all layers, for each image
        data = load_data("digits", CPU)
        network = 4 * 4 * 17_658  # gradients, momenta, scores and draws
        free(network + 1000 * 4 * inputs - 10_000)
        sentence = "training.batch_size is 1000; a step of digits_conv with it takes at least 8.22 MB of memory"
        with pytest.raises(NotEnoughMemoryError, match=sentence):
            build_for_data(recipe, data)
        build_for_data(recipe_file.override(recipe, ["precision=bfloat16"]), data)
        build_for_data(recipe, data, ranks=2)
        free(network + 1000 * 4 * inputs + 10_000)
        build_for_data(recipe, data)

    def test_a_larger_batch_than_there_are_examples_takes_no_more_than_all(self, free):
        free(100_000_000)
        recipe = recipe_file.override(Recipe(), ["batch_size=2000000000", "drop_last=false"])
        build_for_data(recipe, load_data("digits", CPU))

    def test_texts_are_as_long_as_the_longest(self, free, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        made_up_data.write_imdb_folder(tmp_path)
        data = load_data("imdb", CPU, tmp_path)
        recipe = recipe_file.override(find_recipe("lstm"), ["batch_size=5", "width_factor=0.01"])
        outline = network_outline("lstm", width_factor=0.01, vocabulary_size=len(data.train.vocabulary))
        network = 11 * 4 * sum(p.numel() for p in outline.parameters())
        assert network > 5 * data.train.longest * 100 * 4
        free(network)
        build_for_data(recipe, data)
        data.train._lengths[0] = 1_000_000
        sentence = "training.batch_size is 5; a step of lstm with it takes at least 2 GB"
        with pytest.raises(NotEnoughMemoryError, match=sentence):
            build_for_data(recipe, data)
        with pytest.raises(NotEnoughMemoryError, match=r"network\.vocabulary_size is 2e\+09; training such a lstm"):
            build_for_data(recipe_file.override(recipe, ["vocabulary_size=2000000000"]), data)

    def test_on_a_gpu_both_memories_count(self, monkeypatch, nothing_built):
        recipe, data, cuda = Recipe(), load_data("digits", CPU), torch.device("cuda")
        there = {"cpu": 100_000_000, "cuda": 100_000}
        monkeypatch.setattr(memory, "available", lambda device=None: there[device.type if device else "cpu"])
        with pytest.raises(NotEnoughMemoryError, match="but 100 kB are free on cuda"):
            build_for_data(recipe, data, cuda)
        there |= {"cpu": 100_000, "cuda": 100_000_000}
        with pytest.raises(NotEnoughMemoryError, match="but 100 kB are free; make"):
            build_for_data(recipe, data, cuda)


class TestData:
    @pytest.fixture
    def small_portions(self, monkeypatch, free):
        monkeypatch.setattr(reading, "PORTION", 1000)
        monkeypatch.setattr("iterand.lab.data.imdb.PORTION", 1000)
        free(1500)

    @pytest.mark.parametrize("kind", ["folder", "tar"])
    def test_files_that_are_too_large_are_not_read(self, tmp_path, small_portions, kind):
        folder = tmp_path / "set"
        folder.mkdir()
        (folder / "small.txt").write_bytes(b"x" * 900)
        with (folder / "vast.txt").open("wb") as file:
            file.truncate(100_000)
        path = folder
        if kind == "tar":
            path = tmp_path / "set.tar.gz"
            with tarfile.open(path, "w:gz") as archive:
                archive.add(folder / "small.txt", "small.txt")
                archive.add(folder / "vast.txt", "vast.txt")
        found = reading.members(path, ["*.txt"])
        assert next(found) == ("small.txt", b"x" * 900)
        with pytest.raises(NotEnoughMemoryError, match=rf"reading more of .*{path.name} takes at least 101 kB"):
            next(found)

    def test_a_text_that_unpacks_to_too_much_is_not_unpacked(self, tmp_path, small_portions):
        folder = tmp_path / "imdb"
        folder.mkdir()
        for part in ("train", "test"):
            (folder / f"{part}.csv.gz").write_bytes(
                gzip.compress(b"id,label,text\n" + b" " * 1_000_000, mtime=0)[:1400]
            )
        with pytest.raises(NotEnoughMemoryError, match="reading more of"):
            load_data("imdb", CPU, tmp_path)


def test_a_checkpoint_is_written_and_read_only_if_there_is_memory(tmp_path, free):
    """The library beneath ends the process when it gets none."""
    state = Checkpoint({"weight": torch.zeros(1000)}, {})
    write_checkpoint(tmp_path, state)
    free(3999)
    with pytest.raises(NotEnoughMemoryError, match="writing the checkpoint takes at least 4 kB"):
        write_checkpoint(tmp_path, state)
    with pytest.raises(NotEnoughMemoryError, match=r"reading .*checkpoint.safetensors takes at least"):
        read_checkpoint(tmp_path)


def test_memory_that_runs_out_in_a_step_is_one_sentence(cli, monkeypatch, tmp_path, no_gpu):
    def step(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")

    monkeypatch.setattr(steps.EagerStep, "train", step)
    sentence = (
        "there is not enough memory on the GPU, 20.00 GiB more were asked for; lower training.batch_size or "
        "network.width_factor"
    )
    assert cli("train", "--out", "run") == (1, "", f"error: {sentence}\n")
    task = Task("run", Recipe(), tmp_path / "other", "cpu")
    assert do(task, NullObserver()) == Event("failed", task, {"error": sentence})


def test_memory_that_runs_out_in_any_command_is_one_sentence(cli, monkeypatch):
    def broken(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("iterand.lab.experiments.library.find_recipe", broken)
    sentence = "error: there is not enough memory on this machine; free some, or ask for less\n"
    assert cli("recipes", "digits") == (1, "", sentence)
