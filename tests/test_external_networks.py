"""Training by a recipe with the user's own images and network: files, modules and timm; what may run code."""

import json
import os
import random
import re
import shutil
import sys
import textwrap
import types

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from crashing import StopAfter, outcome
from iterand.errors import CheckpointError, IterandError, RecipeError, TicketError
from iterand.lab.experiments.library import find_recipe, pin
from iterand.lab.networks import external
from iterand.lab.networks.external import UserCode, build_timm
from iterand.lab.training import loop, recipe_file
from iterand.lab.training.checkpoint import read_checkpoint
from iterand.lab.training.folder import RunFolder, default_path
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import check_run, run
from iterand.lab.training.session import Session
from made_up_data import write_image_folder

CPU = torch.device("cpu")
RECIPE = """
name = "mine"
[data]
name = "image_folder"
path = "photos"
image_size = 8
[network]
name = "nets.py:small"
arguments = { width = 6 }
[method]
period = 2
[training]
epochs = 2
batch_size = 8
threads = 1
"""
NETS = """
from torch import nn

def small(classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, classes))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_image_folder(tmp_path_factory.mktemp("own") / "photos", {"train": 12, "test": 3})


@pytest.fixture
def project(photos, tmp_path):
    """A recipe, a file with a network, and images beside them, in the working folder of ``cli``."""
    (tmp_path / "photos").symlink_to(photos)
    (tmp_path / "my.toml").write_text(RECIPE)
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def own(path, *settings):
    """What ``iterand train`` makes of a recipe."""
    recipe = find_recipe(str(path), settings)
    code = UserCode(recipe.network.name)
    return pin(recipe, code), code


def small(classes=3, width=6):
    names = {}
    exec(NETS, names)
    return names["small"](classes, width)


class TestEndToEnd:
    def test_check_train_resume_and_load(self, cli, project):
        code, out, err = cli("recipes", "my.toml", "--json")
        assert (code, err) == (0, "")
        printed = json.loads(out)
        assert printed["data"]["path"] == str(project / "photos")
        assert printed["network"]["name"] == f"{project}/nets.py:small"
        assert printed["network"]["arguments"] == {"width": 6}
        assert len(printed["data"]["sha256"]) == len(printed["network"]["sha256"]) == 64

        code, out, err = cli("train", "my.toml", "--json")
        assert (code, err) == (0, "")
        result = json.loads(out)
        assert result["test_accuracy"] > 60  # three colours
        record = json.loads((project / result["run"] / "record.json").read_text())
        assert record["recipe"] == printed
        assert record["environment"]["execution"]["way"] == "eager"
        code, out, _ = cli("train", "my.toml", "--json")
        assert json.loads(out) == result

        ticket = project / result["run"] / "model.ticket"
        network = iterand.load_ticket(ticket, small()).eval()
        recipe, code = own(project / "my.toml")
        run(recipe, RunFolder(project / "again"), device=CPU, code=code)
        masked = _restored(recipe, project / "again")
        images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.equal(network(images), masked(images))

    def test_what_the_code_prints_goes_to_stderr(self, cli, project):
        (project / "nets.py").write_text(
            "print('imported')\n" + NETS.replace("    return", "    print('built')\n    return")
        )
        for command in ("recipes", "train"):
            code, out, err = cli(command, "my.toml", "--json")
            assert (code, err.split()) == (0, ["imported", "built"])
            assert json.loads(out)["name"] == "mine"

    @pytest.mark.filterwarnings("default::iterand.UnmaskedWarning")
    def test_parameters_of_no_layer_are_named_once_with_what_a_recipe_can_do(self, cli, project):
        (project / "nets.py").write_text(
            textwrap.dedent("""
            import torch
            from torch import nn

            class small(nn.Module):
                def __init__(self, classes, width):
                    super().__init__()
                    self.layer = nn.Linear(192, classes)
                    self.shift = nn.Parameter(torch.ones(1, classes))

                def forward(self, images):
                    return self.layer(images.flatten(1)) + self.shift
            """)
        )
        code, _, err = cli("train", "my.toml", "--out", "run")
        assert code == 0
        said = "the network has 3 parameters in shift (1×3), neither masked nor trained: they stay as they are built"
        assert err.startswith(f"warning: {said}")
        assert err.count("shift") == err.count("warning") == 1
        assert "mask them too with method.include = ['*'], or name them in method.exclude" in err
        stored = iterand.read_ticket(project / "run" / "model.ticket").other_tensors()
        assert stored["shift"].tolist() == [[1, 1, 1]]

        code, _, err = cli("train", "my.toml", "--out", "masked", "--set", "include=['*']")
        assert (code, err.count("warning")) == (0, 0)
        ticket = iterand.read_ticket(project / "masked" / "model.ticket")
        assert sorted(ticket.layers) == ["layer.weight", "shift"]
        code, _, err = cli("train", "my.toml", "--out", "excluded", "--set", "exclude=['shift']")
        assert (code, err.count("warning")) == (0, 0)
        stored = iterand.read_ticket(project / "excluded" / "model.ticket").other_tensors()
        assert stored["shift"].tolist() == [[1, 1, 1]]
        code, _, err = cli("train", "my.toml", "--out", "refused", "--set", "include=['shft']")
        assert code == 1
        assert "include pattern 'shft' matches nothing that can be masked; did you mean 'shift'?" in err

    def test_a_broken_run_ends_like_an_unbroken_one(self, project, monkeypatch):
        recipe, code = own(project / "my.toml")
        run(recipe, RunFolder(project / "whole"), device=CPU, code=code)
        monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(RuntimeError, match="crash"):
            run(recipe, RunFolder(project / "broken"), device=CPU, code=code, observer=StopAfter(3))
        run(recipe, RunFolder(project / "broken"), device=CPU, code=code)
        assert outcome(project / "broken") == outcome(project / "whole")

    def test_a_checkpoint_of_another_network_is_refused(self, project, monkeypatch):
        """What a file imports is not part of its digest."""
        for name in ("first", "second"):
            beside = project / f"own_{name}_head.py"
            beside.write_text(f"from torch import nn\n\nclass Head(nn.Module):\n    def __init__(self, classes):\n"
                              f"        super().__init__()\n        self.{name} = nn.Linear(192, classes)\n\n"
                              f"    def forward(self, x): return self.{name}(x.flatten(1))\n")  # fmt: skip
        (project / "nets.py").write_text(
            "import importlib, os\n\ndef small(classes, width):\n"
            "    return importlib.import_module(os.environ['OWN_HEAD']).Head(classes)\n"
        )
        monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
        monkeypatch.setenv("OWN_HEAD", "own_first_head")
        recipe, code = own(project / "my.toml")
        with pytest.raises(RuntimeError, match="crash"):
            run(recipe, RunFolder(project / "run"), device=CPU, code=code, observer=StopAfter(3))
        monkeypatch.setenv("OWN_HEAD", "own_second_head")
        with pytest.raises(CheckpointError, match=r"'first\..* is in only one of the checkpoint and the network"):
            run(recipe, RunFolder(project / "run"), device=CPU, code=code)

    def test_a_teacher_of_other_images_is_warned_of(self, project):
        settings = ["network.name=conv6", "arguments={}", "width_factor=0.02", "image_size=32", "epochs=1"]
        recipe = pin(find_recipe(str(project / "my.toml"), settings), None)
        run(recipe, RunFolder(project / "teacher"), device=CPU)
        photos = shutil.copytree(project / "photos", project / "others")
        for part in photos.iterdir():
            (part / "red").rename(part / "vermilion")
        settings.append(f"teacher={project / 'teacher'}")
        check_run(pin(find_recipe(str(project / "my.toml"), settings), None))
        other = pin(find_recipe(str(project / "my.toml"), [*settings, f"data.path={photos}"]), None)
        with pytest.warns(UserWarning, match="teacher was trained with other images; its outputs are the places of"):
            check_run(other)

    def test_a_run_is_the_same_in_another_folder(self, project):
        here = default_path(own(project / "my.toml")[0])
        moved = shutil.copytree(project, project / "moved", symlinks=True)
        assert default_path(own(moved / "my.toml")[0]) == here

    def test_a_changed_network_or_image_is_another_run(self, cli, project):
        assert cli("train", "my.toml", "--out", "run")[0] == 0
        (project / "nets.py").write_text(NETS.replace("ReLU", "Tanh"))
        code, _, err = cli("train", "my.toml", "--out", "run")
        assert code == 1
        assert "run holds a run of other settings: network.sha256 is" in err.replace("\n", " ")
        (project / "nets.py").write_text(NETS)
        photos = (project / "photos").resolve()
        (project / "photos").unlink()
        shutil.copytree(photos, project / "photos")
        assert cli("train", "my.toml", "--out", "run")[0] == 0  # the same names and sizes
        (project / "photos" / "test" / "red" / "000.png").unlink()
        code, _, err = cli("train", "my.toml", "--out", "run")
        assert code == 1
        assert "data.sha256 is" in err

    def test_the_recipe_of_a_run_folder_is_pinned(self, cli, project):
        assert cli("train", "my.toml", "--out", "run")[0] == 0
        assert cli("recipes", "run/recipe.toml")[0] == 0
        (project / "nets.py").write_text(NETS + "# changed\n")
        code, _, err = cli("recipes", "run/recipe.toml")
        assert code == 1
        assert "nets.py changed; leave network.sha256 out" in err.replace("\n", " ")

    def test_weights_can_be_trained_too(self, project):
        recipe, code = own(project / "my.toml", "method.name=sgd")
        first, second = (
            run(recipe, RunFolder(project / name), device=CPU, code=code)["result"] for name in ("one", "two")
        )
        assert first["model_sha256"] == second["model_sha256"]  # torch draws the weights under the recipe's seed

    def test_a_network_of_the_package_on_own_images(self, cli, project):
        settings = ["--set", "network.name=conv6", "--set", "arguments={}", "--set", "width_factor=0.02"]
        code, _, err = cli("train", "my.toml", *settings, "--set", "image_size=32", "--set", "epochs=1")
        assert (code, err) == (0, "")


def _restored(recipe, folder):
    session = Session(recipe, small(), 4, CPU)
    session.restore(read_checkpoint(folder))
    return session.model.eval()


class TestFilesNeverRunCode:
    """Only ``train`` and ``recipes`` import the user's file; it says so when it is imported."""

    @pytest.fixture
    def trained(self, cli, project):
        assert cli("train", "my.toml", "--out", "run")[0] == 0
        (project / "nets.py").write_text("raise SystemExit('code was run')")
        return project

    @pytest.mark.parametrize(
        "line",
        [
            "evaluate run",
            "evaluate run/model.ticket",
            "export run/model.ticket --format onnx",
            "ticket verify run/model.ticket --run run",
        ],
    )
    def test_commands_that_need_the_network_refuse(self, cli, trained, line):
        code, out, err = cli(*line.split())
        assert (code, out) == (1, "")
        assert "nets.py:small" in err.replace("\n", "")
        assert "code was run" not in err
        assert "load_ticket" in err

    @pytest.mark.parametrize(
        "line",
        ["ticket info run/model.ticket", "ticket verify run/model.ticket", "report . --format md",
         "export run/model.ticket --format safetensors"],
    )  # fmt: skip
    def test_the_others_work(self, cli, trained, line):
        code, _, err = cli(*line.split())
        assert code == 0, err

    def test_load_ticket_needs_the_model(self, trained):
        with pytest.raises(TicketError, match=r"its network is made by code, 'nets\.py:small', and a file never runs"):
            iterand.load_ticket(trained / "run" / "model.ticket")

    def test_a_ticket_holds_no_folders(self, trained):
        held = json.dumps(iterand.read_ticket(trained / "run" / "model.ticket").recipe)
        assert str(trained) not in held
        assert '"nets.py:small"' in held

    def test_a_ticket_that_names_a_module_of_python(self, tmp_path):
        model = iterand.prune_(nn.Sequential(nn.Linear(4, 4)), 0.5)
        for name in ("os:system", "/tmp/x.py:f", "os:", ":system", "timm:hf-hub:a/b"):
            iterand.save_ticket(model, tmp_path / "a.ticket", recipe={"network": {"name": name, "classes": 1}})
            with pytest.raises(TicketError, match=r"never runs code|cannot be built"):
                iterand.load_ticket(tmp_path / "a.ticket")

    def test_running_needs_the_code(self, project):
        recipe, code = own(project / "my.toml")
        for wrong in (None, UserCode(f"{project}/nets.py:other")):
            with pytest.raises(IterandError, match="runs only where you name the recipe's file"):
                run(recipe, RunFolder(project / "run"), device=CPU, code=wrong)
        assert "_function" not in vars(code)


MISTAKES = {
    "no such file": ("net.py:small", NETS, "there is no file {folder}/net.py"),
    "no such function": ("nets.py:smal", NETS, "nets.py has no smal; did you mean 'small'?"),
    "not a function": ("nets.py:small", "small = 3", "a value of type int; it must be a function (or class)"),
    "a module, not a function": (
        "nets.py:small",
        "from torch import nn\nsmall = nn.ReLU()",
        "a value of type ReLU; it must be a function",
    ),
    "no function named": ("nets.py:", NETS, "a network of another package or file is 'timm:NAME'"),
    "no name at all": (":", NETS, "a network of another package or file is 'timm:NAME'"),
    "no colon": ("nets.py", NETS, "did you mean 'nets.py:FUNCTION'?"),
    "no network of the package": ("resnet18", NETS, "did you mean 'resnet18_cifar' or 'resnet18_imagenet'?"),
    "no such module": ("no_such_module_here:small", NETS, "no module no_such_module_here can be imported"),
    "no such package": ("no_such_package.here:small", NETS, "no module no_such_package.here can be imported"),
    "a module of Python": ("sys:exit", NETS, "sys is a part of Python or a folder, without a file; name the module"),
    "a folder": ("photos:small", NETS, "photos is a part of Python or a folder, without a file; name the module"),
    "it returns nothing": ("nets.py:small", "def small(classes, width): pass", "returns None; it must be a torch.nn"),
    "it raises": (
        "nets.py:small",
        "def small(classes, width):\n    return 1 / 0",
        "called with 3 classes, width=6: ZeroDivisionError: division by zero ({folder}/nets.py, line 2)",
    ),
    "it takes other arguments": (
        "nets.py:small",
        "def small(classes):\n    pass",
        "TypeError: small() got an unexpected keyword argument 'width'",
    ),
    "it is no Python": (
        "nets.py:small",
        "x = 1\ndef small(:\n",
        "which cannot be imported: SyntaxError: invalid syntax ({folder}/nets.py, line 2)",
    ),
    "it ends the program": ("nets.py:small", "import sys\nsys.exit(3)", "SystemExit: 3 ({folder}/nets.py, line 2)"),
    "it imports what is not there": (
        "nets.py:small",
        "import no_such_module_here",
        "ModuleNotFoundError: No module named 'no_such_module_here' ({folder}/nets.py, line 1)",
    ),
    "more than memory holds": (
        "nets.py:small",
        NETS.replace("36 * width", "10**15"),
        "there is not enough memory on this machine",
    ),
    "other images": (
        "nets.py:small",
        NETS.replace("36 * width", "35 * width"),
        "which does not take images of 3×8×8: mat1 and mat2 shapes",
    ),
    "its forward raises": (
        "nets.py:small",
        "from torch import nn\nclass small(nn.Module):\n    def __init__(self, classes, width):\n"
        "        super().__init__()\n    def forward(self, x):\n        return x.nothing",
        "has no attribute 'nothing' ({folder}/nets.py, line 6); change the network",
    ),
    "other classes": (
        "nets.py:small",
        NETS.replace(", classes)", ", 7)"),
        "has shape [1, 7]; it must be a tensor of shape [1, 3]",
    ),
    "no tensor": (
        "nets.py:small",
        "from torch import nn\nclass small(nn.Module):\n    def __init__(self, classes, width):\n"
        "        super().__init__()\n    def forward(self, x):\n        return [x]",
        "has type list; it must be a tensor",
    ),
    "nothing to mask": (
        "nets.py:small",
        "from torch import nn\ndef small(classes, width): return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())",
        "has nothing to mask: no linear, convolution",
    ),
}


class TestMistakes:
    @pytest.mark.parametrize("command", ["recipes", "train"])
    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_each_gets_a_sentence(self, cli, project, mistake, command):
        name, nets, sentence = MISTAKES[mistake]
        (project / "my.toml").write_text(RECIPE.replace("nets.py:small", name))
        (project / "nets.py").write_text(nets)
        if ":" not in name:
            (project / "my.toml").write_text(RECIPE.replace("nets.py:small", name).replace("arguments", "# arguments"))
        code, out, err = cli(command, "my.toml")
        assert (code, out) == (1, "")
        assert sentence.format(folder=project) in " ".join(err.split())
        assert "Traceback" not in err
        assert not (project / "runs").exists() or not list((project / "runs").rglob("metrics.jsonl"))

    @pytest.mark.parametrize(
        ("setting", "sentence"),
        [
            ("data.path=nowhere", "nowhere does not exist; images are in train/CLASS/"),
            ("data.path=", "data.path is missing; it is the folder of the images"),
            ("data.name=cifar10", "data.path is for data.name = 'image_folder', but data.name is 'cifar10'"),
            ("data.name=image_folders", "data.path is for data.name = 'image_folder'"),
            ("image_size=3", "data.image_size is 3; it must be at least 8 and at most 1024"),
            ("width_factor=0.5", "network.width_factor is 0.5, which is not for"),
            ("forget_bias=1", "; set it to 0"),
            ("network.classes=2", "network.classes is 2, but image_folder has 3"),
            ("arguments=3", "network.arguments is 3; it must be a table"),
            ("arguments={width = nan}", "network.arguments.width is nan; it must be a text, a number"),
            ("arguments={width = [[1]]}", "network.arguments.width is [[1]]; it must be a text, a number"),
            ("arguments={'a b' = 1}", "network.arguments has the key 'a b'; keys are names of arguments"),
            ("network.name=conv6", "network.arguments is for a network of yours, 'timm:NAME', 'FILE.py:FUNCTION'"),
            ("network.name=resnet18_cifr", "no network is called 'resnet18_cifr'; did you mean 'resnet18_cifar'?"),
            ("network.name=nets.py", "no network is called 'nets.py'; did you mean 'nets.py:FUNCTION'?"),
            ("batch_size=100", "training.batch_size is 100, but there are only 33 training examples"),
        ],
    )
    def test_settings(self, cli, project, setting, sentence):
        for command in ("recipes", "train"):
            code, _, err = cli(command, "my.toml", "--set", setting)
            assert code == 1
            assert sentence in " ".join(err.split())

    def test_an_error_in_the_middle_of_training_names_the_line(self, cli, project):
        (project / "nets.py").write_text(
            textwrap.dedent("""
            from torch import nn

            class small(nn.Sequential):
                def __init__(self, classes, width):
                    super().__init__(nn.Flatten(), nn.Linear(192, classes))

                def forward(self, images):
                    if self.training:
                        raise KeyError("no such thing")
                    return super().forward(images)
            """)
        )
        code, _, err = cli("train", "my.toml")
        assert code == 1
        assert f"KeyError: 'no such thing' ({project}/nets.py, line 10)" in " ".join(err.split())

    @pytest.mark.parametrize("factor", ["nan", "1e38"])
    def test_a_network_that_is_not_finite_in_evaluation_mode_gives_no_result(self, cli, project, factor):
        """The largest of NaNs is the first one, so that the accuracy would be that of the first class."""
        (project / "nets.py").write_text(
            textwrap.dedent(f"""
            from torch import nn

            class small(nn.Sequential):
                def __init__(self, classes, width):
                    super().__init__(nn.Flatten(), nn.Linear(192, classes))

                def forward(self, images):
                    outputs = super().forward(images)
                    return outputs if self.training else 1e3 * outputs * float("{factor}")
            """)
        )
        code, out, err = cli("train", "my.toml", "--out", "run", "--json")
        assert (code, out) == (1, "")
        assert "in evaluation mode, the loss of 3 examples is NaN or infinite" in " ".join(err.split())
        assert not (project / "run" / "record.json").exists()
        assert (project / "run" / "metrics.jsonl").read_text() == ""


class TestCode:
    def test_a_file_may_import_the_files_beside_it(self, project):
        (project / "own_blocks_beside.py").write_text(
            "from torch import nn\n\ndef head(classes): return nn.Linear(4, classes)\n"
        )
        (project / "nets.py").write_text(
            "from own_blocks_beside import head\n\ndef small(classes): return head(classes)\n"
        )
        path = list(sys.path)
        network = UserCode(f"{project}/nets.py:small").build(5, {})
        assert network.out_features == 5
        assert sys.path == path
        sys.modules.pop("own_blocks_beside")

    def test_a_module_in_the_working_folder(self, project, monkeypatch):
        monkeypatch.chdir(project)
        (project / "own_module_here.py").write_text(NETS)
        code = UserCode("own_module_here:small")
        assert code.file == project / "own_module_here.py"
        assert code.build(3, {"width": 2})[0].out_channels == 2
        sys.modules.pop("own_module_here")

    def test_what_runs_is_what_is_in_the_file(self, project):
        """Python's cache goes by time and size, which can be the same for another content."""
        path = project / "nets.py"
        widths = []
        for width in (4, 5):
            path.write_text(NETS.replace("width=4", f"width={width}"))
            os.utime(path, (1e9, 1e9))
            widths.append(UserCode(f"{path}:small").build(3, {})[0].out_channels)
        assert widths == [4, 5]
        assert not (project / "__pycache__").exists()

    def test_weights_depend_on_the_seed_alone(self, project):
        code, before = UserCode(f"{project}/nets.py:small"), torch.get_rng_state()
        one, two, other = (code.build(3, {}, seed).state_dict()["0.weight"] for seed in (0, 0, 1))
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
        assert torch.equal(torch.get_rng_state(), before)

    def test_numbers_of_numpy_and_python_depend_on_the_seed(self, project):
        drawn = "nn.Parameter(torch.tensor([random.random(), np.random.rand()]))"
        (project / "nets.py").write_text(
            "import random\nimport numpy as np\nimport torch\nfrom torch import nn\n\ndef small(classes):\n"
            f"    network = nn.Linear(4, classes)\n    network.drawn = {drawn}\n    return network\n"
        )
        code = UserCode(f"{project}/nets.py:small")
        random.seed(3)
        np.random.seed(3)
        wanted = random.random(), np.random.rand()
        random.seed(3)
        np.random.seed(3)
        one, two, other = (code.build(3, {}, seed).drawn.tolist() for seed in (0, 0, 1 << 40))
        assert one == two
        assert not {*one} & {*other}
        assert (random.random(), np.random.rand()) == wanted


class TestExtends:
    def test_a_file_relative_to_the_extending_one(self, project):
        (project / "sub").mkdir()
        (project / "sub" / "longer.toml").write_text(
            'extends = "../my.toml"\nname = "longer"\n[training]\nepochs = 9\n'
        )
        recipe = find_recipe(str(project / "sub" / "longer.toml"))
        assert (recipe.name, recipe.training.epochs, recipe.training.batch_size) == ("longer", 9, 8)
        assert recipe.data.path == str(project / "photos")
        assert recipe.network.name == f"{project}/nets.py:small"

    def test_a_file_that_extends_a_recipe_of_the_package(self, tmp_path):
        """The conditions on the sparsity hold for the sparsity of the whole chain."""
        (tmp_path / "a.toml").write_text('extends = "best-resnet18"\n')
        (tmp_path / "b.toml").write_text('extends = "a.toml"\nname = "best-resnet18"\n')
        for settings in ([], ["sparsity=0.5"]):
            assert find_recipe(str(tmp_path / "b.toml"), settings) == find_recipe("best-resnet18", settings)

    def test_circles_and_missing_files(self, tmp_path):
        for name, base in (("a", "b.toml"), ("b", "./a.toml"), ("c", "c.toml"), ("d", "none.toml"), ("e", "digit")):
            (tmp_path / f"{name}.toml").write_text(f'extends = "{base}"\n')
        for name, sentence in (
            ("a", "extends goes in a circle: a.toml → b.toml → a.toml; one of them must not extend another"),
            ("c", "extends goes in a circle: c.toml → c.toml"),
            ("d", f"cannot read the recipe {tmp_path}/none.toml"),
            ("e", "unknown recipe 'digit'; did you mean 'digits'?"),
        ):
            with pytest.raises(RecipeError) as caught:
                find_recipe(str(tmp_path / f"{name}.toml"))
            assert sentence in str(caught.value)


class TestRecipes:
    def test_new_keys_change_no_digest(self):
        assert recipe_file.digest(Recipe()) == recipe_file.digest(recipe_file.from_dict({}))
        assert recipe_file.digest(find_recipe("resnet18")) == "1b5f16cd17"
        assert recipe_file.digest(find_recipe("best-vgg11", ["sparsity=0.9"])) == "825a02a2a5"

    def test_arguments_survive_toml_and_can_be_hashed(self):
        settings = ["network.name=timm:a", 'arguments={a = 1, b = [1, 2.5], c = "x", d = true}']
        recipe = recipe_file.override(Recipe(), settings)
        again = recipe_file.from_toml(recipe_file.to_toml(recipe), "test")
        assert again == recipe
        assert hash(again.network) == hash(recipe.network)
        assert recipe_file.digest(again) == recipe_file.digest(recipe) != recipe_file.digest(Recipe())


class FakeTimm(types.ModuleType):
    """As much of timm as is used; models record what they were built with."""

    def __init__(self):
        super().__init__("timm")
        self.calls = []

    def is_model(self, name):
        return name in self.list_models()

    def list_models(self):
        return ["tinynet", "tinyvit"]

    def create_model(self, name, pretrained, num_classes, in_chans, hidden=4):
        self.calls.append((name, pretrained, num_classes, in_chans, hidden))
        if hidden < 1:
            raise AssertionError("hidden must\nbe positive")
        network = nn.Sequential(nn.Conv2d(in_chans, hidden, 8), nn.Flatten(), nn.Linear(hidden, num_classes))
        network.register_buffer("index", torch.arange(3), persistent=False)  # as that of a Swin
        return network


class TestTimm:
    @pytest.fixture
    def timm(self, monkeypatch):
        fake = FakeTimm()
        monkeypatch.setitem(sys.modules, "timm", fake)
        return fake

    def test_train_and_load(self, cli, project, timm):
        timm_recipe = RECIPE.replace("nets.py:small", "timm:tinynet").replace("arguments = { width = 6 }", "")
        (project / "my.toml").write_text(timm_recipe)
        code, out, err = cli("train", "my.toml", "--out", "run", "--json")
        assert (code, err) == (0, "")
        assert set(timm.calls) == {("tinynet", False, 3, 3, 4)}
        result = json.loads(out)
        network = iterand.load_ticket(project / "run" / "model.ticket")
        assert torch.equal(network.index, torch.arange(3))
        for line in ("evaluate run", "evaluate run/model.ticket --data-dir photos"):
            code, out, err = cli(*line.split(), "--json")
            assert (code, err) == (0, "")
            assert json.loads(out)["test_accuracy"] == result["test_accuracy"]
        code, _, err = cli("evaluate", "run/model.ticket")
        assert code == 1
        assert "give their folder with --data-dir" in err

    def test_a_ticket_with_arguments_needs_a_model(self, cli, project, timm):
        timm_recipe = RECIPE.replace("nets.py:small", "timm:tinynet").replace("width = 6", "hidden = 5")
        (project / "my.toml").write_text(timm_recipe)
        code, _, err = cli("train", "my.toml", "--out", "run")
        assert (code, err) == (0, "")
        assert set(timm.calls) == {("tinynet", False, 3, 3, 5)}
        with pytest.raises(TicketError, match=r"built with network\.arguments of its own; in Python, give the model"):
            iterand.load_ticket(project / "run" / "model.ticket")
        assert cli("evaluate", "run")[0] == 0
        model = timm.create_model("tinynet", False, 3, 3, hidden=5)
        assert iterand.load_ticket(project / "run" / "model.ticket", model) is model

    @pytest.mark.parametrize(
        ("name", "arguments", "sentence"),
        [
            ("timm:tinynt", {}, "timm has no such model; did you mean 'timm:tinynet'?"),
            ("timm:hf-hub:someone/model", {}, "timm has no such model"),
            ("timm:", {}, "timm has no such model"),
            ("timm:tinynet", {"num_classes": 3}, "has 'num_classes', which comes from the data"),
            ("timm:tinynet", {"pretrained": True}, "has 'pretrained', but weights are random, never read"),
            ("timm:tinynet", {"checkpoint_path": "a"}, "has 'checkpoint_path', but weights are random, never read"),
            ("timm:tinynet", {"size": 3}, "with 3 classes, size=3: TypeError"),
            ("timm:tinynet", {"hidden": 0}, "AssertionError: hidden must be positive; change network.arguments"),
        ],
    )
    def test_mistakes(self, timm, name, arguments, sentence):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            build_timm(name, 3, 3, arguments)

    def test_without_timm(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "timm", None)
        with pytest.raises(IterandError, match=r"'timm:resnet18', which needs timm; pip install timm torchvision"):
            build_timm("timm:resnet18", 3, 3, {})

    def test_with_another_torchvision(self, monkeypatch):
        def broken(name):
            raise RuntimeError("operator torchvision::nms does not exist")

        monkeypatch.setattr(external.importlib, "import_module", broken)
        with pytest.raises(IterandError, match="timm cannot be imported: RuntimeError: operator torchvision::nms"):
            build_timm("timm:resnet18", 3, 3, {})
