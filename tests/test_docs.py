"""The documentation: links lead somewhere, code runs as printed, and the reference is complete and up to date."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from browser import CHROMIUM, Browser
from zoo import import_timm

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md")),
    *sorted(DOCS.rglob("*.md")),
]


def name(page):
    return page.relative_to(ROOT).as_posix()


def text(page):
    return page.read_text(encoding="utf-8")


def prose(page):
    """A page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.DOTALL | re.MULTILINE))


def blocks(page):
    """The Python of a page, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def anchors(page):
    """What a link can lead to on a page: its headings, as GitHub and the site name them."""
    found: dict[str, int] = {}
    without_code = re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.+?)\s*$", without_code, flags=re.MULTILINE):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
        kept = (c for c in plain.lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
        slug = "".join(kept).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if number == 0 else f"{slug}-{number}" for slug, most in found.items() for number in range(most + 1)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match("https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_markdown_is_not_read_from_formulas(page):
    """An underscore after a combining character begins emphasis, and a > at the beginning of a line a quotation."""
    assert not re.findall(r"[\u0300-\u036f]_", prose(page))
    assert not re.findall(r"^[^>\n]*[^>\s]\n> .*", prose(page), flags=re.MULTILINE)


def test_anchors_are_those_of_github():
    assert {"one-run-on-many-gpus-or-machines", "failures"} <= anchors(DOCS / "guides" / "distributed.md")


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2])
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


class MyNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, images):
        return self.head(self.features(images))


def loader():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)) for _ in range(3)
    ]


def run(page, needs=(), **given):
    """Run all blocks of a page in one namespace; gives it."""
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    names = {"MyNetwork": MyNetwork, "loader": loader(), **given}
    found = blocks(text(DOCS / page))
    assert found
    for block in found:
        exec(compile(block, page, "exec"), names)
    return names


def exports(page):
    """The ``iterand export`` commands of a page, as arguments."""
    found = re.findall(r"^iterand (export [^#\n]*)", text(DOCS / page), flags=re.MULTILINE)
    assert found
    return [line.split() for line in found]


@pytest.fixture
def train(cli):
    """Write the ticket of a short ``iterand train digits``."""

    def write(ticket):
        pytest.importorskip("sklearn", reason="the lab is not installed")
        settings = ("epochs=1", "width_factor=0.5", "weight_distribution=signed_constant")
        options = [part for setting in settings for part in ("--set", setting)]
        code, _, err = cli("train", "digits", "--out", ticket.parent, *options)
        assert (code, err) == (0, "")
        assert ticket.exists()

    return write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to run pages in, and torch's generator as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)


class TestCodeRunsAsPrinted:
    def test_start_page(self):
        names = run("index.md")
        images = names["loader"][0][0]
        assert torch.equal(names["model"].eval()(images), names["plain"].eval()(images))

    def test_first_ticket(self, folder):
        names = run("tutorial/first-ticket.md", ["sklearn"])
        assert names["accuracy"] > 96
        assert 1500 < (folder / "digits.ticket").stat().st_size < 2500
        assert not iterand.masked_layers(names["plain"])
        model = names["model"]
        assert sum(p.numel() for p in names["build"]().parameters() if p.dim() > 1) == 21_280
        assert iterand.summary(model).kept == round(0.1 * iterand.summary(model).total)

    def test_your_own_model(self, capsys):
        names = run("tutorial/your-model.md", ["sklearn"])
        found = re.findall(r"after (\d+) epochs: (.+) %", capsys.readouterr().out)
        assert [epochs for epochs, _ in found] == ["5", "6", "10"]
        assert 75 < float(found[0][1]) < float(found[2][1])
        assert names["randomizer"].iteration == 10 * len(names["loader"])  # one of the epochs by make_step
        assert torch.equal(
            iterand.load_ticket("rows.ticket", names["RowReader"]()).head.weight, names["model"].head.weight
        )

    def test_deploying(self, folder, cli, capsys):
        names = run("tutorial/deploying.md", ["sklearn", "onnx", "onnxscript", "onnxruntime"])
        right = float(re.search(r"(.+) % of the test images", capsys.readouterr().out)[1])
        assert right > 75
        assert names["export"].bytes == (folder / "digits.onnx").stat().st_size
        dense, small = (folder / "digits.safetensors").stat().st_size, (folder / "digits.onnx").stat().st_size
        assert small < dense / 6
        assert {"network.c", "network.h"} <= {path.name for path in (folder / "digits-c").iterdir()}
        for command in exports("tutorial/deploying.md"):
            (folder / command[-1]).unlink()
            assert cli(*command)[::2] == (0, "")
            assert (folder / command[-1]).stat().st_size == dense

    def test_fine_tune_by_mask(self, folder, capsys):
        names = run("guides/pretrained.md", ["sklearn"])
        said = capsys.readouterr().out
        found = [float(number) for number in re.findall(r"^\w.*: (.+) %$", said, flags=re.MULTILINE)]
        base, mask, head, full, again, turned = found
        assert min(base, mask, full, turned) > 94
        assert head < 90
        assert again == mask
        assert 4500 < (folder / "high.ticket").stat().st_size < 5500
        assert 150_000 < (folder / "base.pt").stat().st_size < 160_000
        high, images = iterand.load_ticket("high.ticket", names["load_base"]()), names["images"]
        assert torch.equal(high(images), names["plain"](images))
        torch.testing.assert_close(names["outputs"][0], high(images[5:6])[0].detach())
        torch.testing.assert_close(names["outputs"][2], names["base"](images[:1])[0].detach())
        assert said.count("both keep") == 3

    def test_other_kinds_of_masks(self):
        names = run("guides/kinds.md")
        assert all(
            layer.parametrization.coats == 3 for layer in iterand.masked_layers(names["randomizer"].model).values()
        )
        coated = iterand.load_ticket("coats.ticket", MyNetwork())
        assert len(coated.state_dict()[next(iter(iterand.read_ticket("coats.ticket").layers))].abs().unique()) == 4
        assert all(
            layer.parametrization.settings.mask == "gem_miner"
            for layer in iterand.masked_layers(names["model"]).values()
        )

    def test_fast_inference(self, folder, cli, train):
        names = run("guides/inference.md", [])
        assert names["outputs"].shape == (5, 10)
        expected = iterand.load_ticket("mine.ticket", names["build"]()).eval()(torch.zeros(5, 3, 8, 8))
        torch.testing.assert_close(torch.from_numpy(names["outputs"]), expected.detach())
        exact = names["network"](names["sample"])
        assert abs(names["close"] - exact).max() < 0.05 * abs(exact).max()
        train(folder / "model.ticket")
        np.save("inputs.npy", np.random.default_rng(0).normal(size=(64, 1, 8, 8)).astype(np.float32))
        for command in exports("guides/inference.md"):
            assert cli(*command)[::2] == (0, ""), command
        for written in ("mine", "mine-int8", "mine-coded", "model", "model-int8", "model-coded"):
            assert (folder / written / "network.c").exists()

    def test_recommended_settings(self):
        """The two lines, and all settings written out."""
        first, explicit, *rest = blocks(text(DOCS / "guides" / "recommended.md"))
        names = {"MyNetwork": MyNetwork, "loader": 2 * loader()}  # 960 steps, with two rounds
        exec(first, names)
        model, images = names["model"], names["loader"][0][0]
        layers = iterand.masked_layers(model).values()
        assert sum(int(layer.mask.sum()) for layer in layers) == round(0.1 * sum(e.weight.numel() for e in layers))
        assert any(bool((layer.draw > 0).any()) for layer in layers)
        plain = iterand.load_ticket("mine.ticket", MyNetwork()).eval()
        assert torch.equal(plain(images), model.eval()(images))
        with torch.no_grad():
            inputs = plain.features[0](torch.cat([images for images, _ in names["loader"]]))
        torch.testing.assert_close(plain.features[1].running_mean, inputs.mean((0, 2, 3)))

        two_lines = iterand.prune_(MyNetwork(), sparsity=0.9, preset="recommended", seed=0)
        steppers = iterand.recommended_steppers(two_lines, steps=names["epochs"] * len(names["loader"]))
        exec(explicit, names)
        written_out = iterand.masked_layers(names["model"])
        for key, layer in iterand.masked_layers(two_lines).items():
            assert layer.parametrization.settings == written_out[key].parametrization.settings
            assert torch.equal(layer.weight, written_out[key].weight)
        assert [type(stepper) for stepper in steppers] == [type(stepper) for stepper in names["steppers"]]
        for ours, theirs in zip(steppers, names["steppers"]):
            public = {key: value for key, value in vars(ours).items() if isinstance(value, (int, float, str))}
            assert public == {key: getattr(theirs, key) for key in public}

        for block in rest:
            exec(block, names)
        assert iterand.summary(names["model"]).kept == pytest.approx(0.2 * iterand.summary(names["model"]).total, abs=2)
        reader = names["reader"]
        assert set(iterand.masked_layers(reader)) == {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "classifier.weight"}
        open_gates = torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None].expand(4, 8)
        assert torch.equal(reader.lstm.bias_ih_l0.view(4, 8), open_gates)
        assert not reader.lstm.bias_hh_l0.any()
        fresh = iterand.prune_(MyNetwork(), sparsity=0.9, preset="recommended", seed=0)
        moved = zip(iterand.scores(names["student"]), iterand.scores(fresh))
        assert not any(torch.equal(score, before) for score, before in moved)

    @pytest.mark.filterwarnings("ignore")  # what other packages warn of, release by release
    def test_trainers(self, folder):
        if importlib.util.find_spec("timm") is None:
            pytest.skip("timm is not installed")
        import_timm()
        images, labels = (torch.cat(tensors) for tensors in zip(*loader()))
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8)
        packages = ["lightning.pytorch", "transformers", "accelerate", "huggingface_hub"]
        names = run("guides/trainers.md", packages, loader=batches)
        module, plain = names["module"], iterand.load_ticket("lightning.ticket", names["Classifier"]())
        assert torch.equal(module.eval().network(images), plain.eval().network(images))
        late, quiet = names["LateClassifier"](), {"logger": False, "enable_checkpointing": False}
        for _ in range(2):
            names["L"].Trainer(max_epochs=1, callbacks=[names["IteRand"]()], **quiet).fit(late, batches)
        assert iterand.summary(late).kept == iterand.summary(module).kept
        assert names["trainer"].state.global_step == 6
        assert sorted(path.name for path in (folder / "bert-ticket").iterdir()) == [
            "README.md", "config.json", "model.ticket",
        ]  # fmt: skip
        assert names["plain"].hidden.weight.shape == (48, 64)

    def test_tickets_and_export(self, folder, cli, train):
        names = run("guides/export.md")
        assert names["layer"].header.kept == 6554
        assert (folder / "mine.ticket").stat().st_size < 64 * 256 * 4 / 8
        train(folder / "runs" / "digits" / "model.ticket")
        for command in exports("guides/export.md"):
            if "onnx" not in command or importlib.util.find_spec("onnxruntime"):
                found = [argument.replace("runs/...", "runs/digits") for argument in command]
                assert cli(*found)[::2] == (0, ""), command
                assert (folder / command[-1]).exists()

    def test_own_images(self, folder, cli, monkeypatch):
        """With its recipe and network, trained before the blocks are run."""
        pytest.importorskip("sklearn", reason="the lab is not installed")
        from made_up_data import write_image_folder

        page = text(DOCS / "guides" / "own-images.md")
        write_image_folder(folder / "photos", {"train": 8, "test": 2}, ("daisy", "rose", "tulip"))
        (recipe,) = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
        (network,) = (block for block in blocks(page) if "def build" in block)
        (folder / "flowers.toml").write_text(recipe)
        (folder / "flower_network.py").write_text(network)
        small = ["--set", "epochs=2", "--set", "batch_size=6"]
        for command in re.findall(r"^iterand (?:recipes|train) flowers.toml[^#\n]*", page, flags=re.MULTILINE):
            code, _, err = cli(*command.split()[1:], *small)
            assert (code, err) == (0, "")
        monkeypatch.syspath_prepend(folder)
        names = run("guides/own-images.md")
        monkeypatch.delitem(sys.modules, "flower_network")
        assert iterand.read_ticket("runs/flowers/model.ticket").layers
        assert names["network"](torch.zeros(1, 3, 64, 64)).shape == (1, 3)

    def test_data_sets(self):
        names = run("guides/data.md", ["sklearn"])
        assert len(names["data"].test) == 400
        assert names["batch"].inputs[0].shape[0] == 100

    def test_all_other_pages(self):
        above = {
            "index.md", "tutorial/first-ticket.md", "tutorial/your-model.md", "tutorial/deploying.md",
            "guides/recommended.md", "guides/export.md", "guides/data.md", "guides/own-images.md", "guides/trainers.md",
            "guides/inference.md", "guides/kinds.md", "guides/pretrained.md",
        }  # fmt: skip
        with_code = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if blocks(text(page))}
        assert above <= with_code
        for page in sorted(with_code - above):
            run(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_can_be_parsed(page):
    for block in blocks(text(page)):
        ast.parse(block)


def test_every_public_name_is_in_the_api_reference():
    listed = re.findall(r"^::: iterand\.(\w+)$", text(DOCS / "reference" / "api.md"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(iterand.__all__)


def test_inherited_members_are_in_the_api_reference():
    """The site leaves members of a base class out without a warning, unless they are listed as inherited."""
    listed = r"^::: iterand\.(\w+)\n    options:\n      members: \[(.*)\]\n(?:      inherited_members: \[(.*)\])?"
    found = re.findall(listed, text(DOCS / "reference" / "api.md"), flags=re.MULTILINE)
    assert {"IterativeRandomization", "SparsitySchedule", "ScoreFreezing", "Ticket"} <= {name for name, *_ in found}
    for name, members, inherited in found:
        owner = getattr(iterand, name)
        expected = [each for each in members.split(", ") if hasattr(owner, each) and each not in vars(owner)]
        assert expected == [each for each in inherited.split(", ") if each], name


@pytest.fixture(scope="module")
def reference():
    """tools/reference.py, which writes two pages."""
    pytest.importorskip("sklearn", reason="the lab is not installed")
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_pages_are_up_to_date(reference):
    assert reference.stale() == [], "run python tools/reference.py"


def test_every_command_is_in_the_reference(cli):
    page = text(DOCS / "reference" / "cli.md")

    def commands(*path):
        code, out, _ = cli(*path, "--help")
        assert code == 0
        listed = out.partition("Commands:")[2]
        names = re.findall(r"^  ([\w-]+)(?:  |$)", listed, flags=re.MULTILINE)  # continued lines are indented more
        if not names:
            yield path, set(re.findall(r"(?<![\w-])--[\w-]+", out.partition("Options:")[2])) - {"--help"}
        for each in names:
            yield from commands(*path, each)

    found = dict(commands())
    assert len(found) > 12
    for path, options in found.items():
        _, heading, section = page.partition(f"# iterand {' '.join(path)}\n")
        assert heading, path
        assert set(re.findall(r"`(--[\w-]+)`", section.partition("\n#")[0])) == options, path


def test_every_recipe_key_is_in_the_reference():
    pytest.importorskip("sklearn", reason="the lab is not installed")
    from iterand.lab.training.recipe import recipe_keys

    rows = re.findall(r"^\| `([\w.]+)` \|", text(DOCS / "reference" / "recipe.md"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(recipe_keys())


def test_lists_are_told_with_what_is_in_them(reference):
    page = reference.recipe_page()
    assert "| `method.share` | list of texts |" in page
    assert "| `learning_rate.milestones` | list of integers |" in page


def test_a_stale_page_is_noticed(reference, monkeypatch, tmp_path):
    monkeypatch.setattr(reference, "REFERENCE", tmp_path)
    assert reference.stale() == ["cli.md", "recipe.md"]
    for page, write in reference.PAGES.items():
        (tmp_path / page).write_text(write(), encoding="utf-8")
    assert reference.stale() == []
    reference.main(["--check"])
    (tmp_path / "cli.md").write_text("old", encoding="utf-8")
    assert reference.stale() == ["cli.md"]
    with pytest.raises(SystemExit, match=r"run python tools/reference.py, which changes cli.md"):
        reference.main(["--check"])
    reference.main([])
    assert reference.stale() == []


class TestLinksIntoTheRepository:
    """tools/repository_links.py, by which the site links to files outside docs/."""

    @pytest.fixture
    def rewritten(self):
        spec = importlib.util.spec_from_file_location("repository_links", ROOT / "tools" / "repository_links.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        class Page:
            class file:
                abs_src_path = str(DOCS / "guides" / "export.md")

        def rewrite(markdown, address):
            config = {"docs_dir": str(DOCS), "repo_url": address}
            return module.on_page_markdown(markdown, page=Page, config=config)

        return rewrite

    def test_they_lead_to_the_repository_where_its_address_is_known(self, rewritten):
        address = "https://example.org/iterand"
        assert rewritten("[a](../../README.md#b)", address) == f"[a]({address}/blob/main/README.md#b)"
        assert rewritten("[a](../../results)", address) == f"[a]({address}/tree/main/results)"

    def test_elsewhere_they_name_the_file(self, rewritten):
        assert rewritten("[records](../../results)", "") == "records (`results`)"
        assert rewritten("[README.md](../../README.md)", "") == "README.md"

    @pytest.mark.parametrize("link", ["[a](data.md)", "[a](#b)", "[a](https://example.org)", "[a](../../nowhere.md)"])
    def test_other_links_stay(self, rewritten, link):
        assert rewritten(link, "https://example.org/iterand") == link


def test_the_search_finds_words_beside_brackets_quotes_and_dots():
    separator = re.search("separator: '(.+)'", text(ROOT / "mkdocs.yml"))[1]
    words = re.split(separator, 'iterand.prune_(model, 0.05, weights="existing") splits (FSDP) `make_step`.')
    assert {"iterand", "prune_", "model", "0.05", "existing", "FSDP", "make_step"} <= set(words)


def test_nothing_is_loaded_from_other_servers():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "\n  font: false\n" in settings
    assert not re.search(r"extra_(css|javascript):\n(  - .*\n)*  - .*//", settings)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; apt-get install chromium")
def test_the_search_works_on_pages_that_are_opened_from_disk(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, capture_output=True)
    browser = Browser()
    try:
        browser.open(tmp_path / "guides" / "kinds.html")
        found = browser.run("""(async () => {
            const field = document.querySelector(".md-search__input");
            document.querySelector("#__search").click();
            field.value = "FSDP";
            for (let attempt = 0; attempt < 100; attempt++) {
                field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
                await new Promise((resolve) => setTimeout(resolve, 100));
                const titles = document.querySelectorAll(".md-search-result__item h1");
                if (titles.length) return [...titles].map((title) => title.innerText);
            }
            return [];
        })()""")
        assert found == ["Many GPUs and machines"]
        assert not browser.complaints()
        assert all(address.startswith(("file:", "data:", "about:")) for address in browser.requests())
    finally:
        browser.close()


def test_the_citation_names_the_authors_of_the_paper():
    page = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    names = re.findall(r"family-names: (\w+)", page)
    assert names == ["Chijiwa", "Yamaguchi", "Ida", "Umakoshi", "Inoue"]
    assert "\nversion: " in page


def test_make_docs_is_strict_and_part_of_the_gate():
    makefile = (ROOT / "Makefile").read_text()
    assert "mkdocs build --strict" in makefile
    assert "make -j2 lint docs" in (ROOT / ".ci" / "run").read_text()
