"""Five small models that all classify 8×8 images, so that one test can be asked of every shape of network."""

import gc
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest_plugins = ["silence"]

os.environ.pop("COLUMNS", None)  # workers set it, and consoles that are made under it keep that width

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run without a GPU; read when Triton is imported

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tensors are tiny: threads would only wait for each other
torch.set_num_threads(1)

os.environ.setdefault("ASAN_OPTIONS", "detect_leaks=0")  # takes seconds a program; networks in C allocate nothing

if importlib.util.find_spec("hypothesis"):  # the GPU tests run without it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "iterand", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )  # fmt: skip
    settings.load_profile("iterand")


LONGEST = [
    "test_ray",
    "test_recipes_run",
    "test_distributed",
    "test_docs",
    "test_compile",
    "test_training",
    "test_data_workers",
    "test_kernels",
    "test_inference_c",
    "test_inference_decoder",
    "test_cli",
    "test_mask_kinds",
    "test_inference_int8",
    "test_kernels_compile",
    "test_ticket_onnx",
    "test_trainers",
    "test_sweep",
    "test_inference_streams",
    "test_ticket",
    "test_kill_and_resume",
    "test_examples",
    "test_fused_step",
    "test_cli_ticket",
    "test_inference_microcontroller",
    "test_dist",
    "test_layering",
    "test_make_step",
    "test_cli_theory",
    "test_fused_layers",
    "test_best_epoch",
    "test_inference_graph",
    "test_suite",
    "test_networks",
]


def pytest_collection_modifyitems(items):
    """Let the files that take longest come first, so that no worker is alone with one of them in the end."""
    places = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_unconfigure():
    """Let what ``_collected`` has set aside be freed: some libraries say at exit what is left of theirs."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Compiled networks are kept in a cache of the tests, not in the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.convolution(images))).flatten(1))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.lstm(images[:, 0])[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images[:, 0]).mean(1))


class Tied(nn.Module):
    """A decoder that shares the weight of its embedding, as language models do; pixels are the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.middle = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 10)
        self.decoder.weight = self.embedding.weight

    def forward(self, images: Tensor) -> Tensor:
        words = images.flatten(1).abs().mul(3).long().clamp(max=9)
        return self.decoder(F.relu(self.middle(self.embedding(words).mean(1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": Cnn,
    "mlp": Mlp,
    "lstm": Lstm,
    "transformer": Transformer,
    "tied": Tied,
}


@dataclass(frozen=True)
class Example:
    """A kind of model, with a batch for it."""

    build: Callable[[], nn.Module]
    images: Tensor
    labels: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.images), self.labels)


def _example(name: str) -> Example:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 1, 8, 8, generator=generator)
    return Example(MODELS[name], images, torch.randint(10, (16,), generator=generator))


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """Let the garbage collector not look again and again at what is there for good: modules, tests and their names."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_workers_left():
    """End the processes that decode images, which a process otherwise keeps until it ends."""
    yield
    workers = sys.modules.get("iterand.lab.data.workers")
    if workers:
        workers.close_pools()


@pytest.fixture(autouse=True)
def _onednn():
    """torch turns oneDNN off when an ARM processor without bfloat16 multiplies it; later tests would see other sums."""
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(before)


@pytest.fixture(params=list(MODELS))
def example(request: pytest.FixtureRequest) -> Example:
    """Every kind of model in turn."""
    return _example(request.param)


@pytest.fixture
def mlp() -> Example:
    return _example("mlp")


@pytest.fixture
def cnn() -> Example:
    return _example("cnn")


@pytest.fixture
def tied() -> Example:
    return _example("tied")


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Run the command in an empty folder; gives exit code, stdout, stderr."""
    from iterand.cli import main as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("warnings.showwarning", None)  # main() replaces it; this puts it back
    for module in ("console", "runs_table"):  # which say now and then how far runs are, if they take long
        monkeypatch.setattr(f"iterand.cli.{module}._SECONDS_A_LINE", math.inf)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["iterand", *map(str, arguments)])
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A small tree of class folders, as ImageNet has them."""
    import made_up_data

    root = tmp_path_factory.mktemp("data")
    made_up_data.write_imagenet(root)
    return root
