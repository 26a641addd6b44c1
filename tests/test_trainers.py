"""The callbacks for Lightning and Hugging Face's Trainer: kill and resume, accumulated gradients, two ranks."""

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn import functional as F

import iterand
import trainer_scripts

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages warn of, release by release

SCRIPT = Path(trainer_scripts.__file__)
FORK = multiprocessing.get_context("fork")  # a process that imports nothing anew


def rounds(ticket: Path) -> int:
    return next(iter(iterand.read_ticket(ticket).layers.values())).header.rounds


@pytest.mark.parametrize(("trainer", "package"), [("lightning", "lightning"), ("transformers", "transformers")])
def test_killed_and_resumed_equals_unbroken(trainer, package, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    folders = tmp_path / "unbroken", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    unbroken = trainer_scripts.fit(trainer, folders[0])
    options = {"kill_after": 12}  # the last checkpoint is of step 10
    killed = FORK.Process(target=trainer_scripts.fit, args=(trainer, folders[1]), kwargs=options)
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not list(folders[1].glob("*.ticket"))
    resumed = trainer_scripts.fit(trainer, folders[1], resume=True)
    assert unbroken["steps"] == resumed["steps"] == 20
    assert len(unbroken["losses"]) == 20
    assert resumed["losses"][-10:] == unbroken["losses"][-10:]
    assert (folders[0] / "0.ticket").read_bytes() == (folders[1] / "0.ticket").read_bytes()
    assert rounds(folders[0] / "0.ticket") == 20 // trainer_scripts.PERIOD


class TestLightning:
    @pytest.fixture(scope="class")
    def lightning(self) -> Any:
        return pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    @pytest.fixture
    def make(self, lightning, tmp_path):
        """A module of 64 inputs, and a trainer for it."""

        class Module(lightning.LightningModule):
            def __init__(self, optimizers: int = 1) -> None:
                super().__init__()
                self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
                self.count = optimizers
                self.automatic_optimization = optimizers == 1

            def training_step(self, batch: Any, index: int) -> Tensor:
                inputs, labels = batch
                loss = F.cross_entropy(self.network(inputs), labels)
                if not self.automatic_optimization:
                    self.manual_backward(loss)
                    for optimizer in self.optimizers():
                        optimizer.step()
                        optimizer.zero_grad()
                return loss

            def configure_optimizers(self) -> list[torch.optim.Optimizer]:
                scores = iterand.scores(self)
                return [torch.optim.SGD(scores[n :: self.count], lr=0.3, momentum=0.9) for n in range(self.count)]

        def trainer(*callbacks: Any, **options: Any) -> Any:
            usual = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 2}
            quiet = {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path}
            return lightning.Trainer(callbacks=list(callbacks), **(usual | quiet | options))

        return Module, trainer

    @pytest.mark.parametrize("all_of_it", [False, True])
    def test_layers_that_are_made_after_pruning_are_refused(self, make, all_of_it):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make

        class Late(Module):
            def __init__(self) -> None:
                super().__init__()
                if all_of_it:
                    del self.network

            def configure_model(self) -> None:
                if not hasattr(self, "head"):
                    self.head = nn.Linear(3, 3)

        sentence = "Late has no layers yet" if all_of_it else "'head.weight' was made after the module was pruned, so"
        with pytest.raises(
            ValueError, match=f"{sentence}.*; make .* in __init__, or leave out sparsity= and call prune_"
        ):
            trainer(IteRand(sparsity=0.5)).fit(Late(), trainer_scripts.batches())

    def test_layers_that_need_no_mask_may_be_made_later(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make

        class Late(Module):
            def configure_model(self) -> None:
                self.frozen = nn.Linear(3, 3).requires_grad_(False)

        module, callback = Late(), IteRand(sparsity=0.5)
        trainer(callback).fit(module, trainer_scripts.batches())
        module.head = nn.Linear(3, 3)  # between two fits
        trainer(callback).fit(module, trainer_scripts.batches())
        assert list(iterand.masked_layers(module)) == ["network.0.weight", "network.2.weight"]

    def test_a_part_may_be_compiled_after_pruning(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make

        class Compiled(Module):
            def configure_model(self) -> None:
                self.network = nn.ModuleDict({"_orig_mod": self.network})  # what torch.compile does to names

            def training_step(self, batch: Any, index: int) -> Tensor:
                return F.cross_entropy(self.network["_orig_mod"](batch[0]), batch[1])

        module = Compiled()
        trainer(IteRand(sparsity=0.5), max_epochs=1).fit(module, trainer_scripts.batches())
        assert len(iterand.masked_layers(module)) == 2

    def test_equals_the_plain_loop(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        torch.manual_seed(0)
        module = Module()
        options = {"ranking": "global", "weights": "signed_constant"}
        callback = IteRand(sparsity=0.6, steppers=trainer_scripts.steppers, **options)
        trainer(callback).fit(module, trainer_scripts.batches())
        assert callback.search.steppers[0].iteration == 10
        model = iterand.prune_(Module(), 0.6, **options)
        optimizer = torch.optim.SGD(iterand.scores(model), lr=0.3, momentum=0.9)
        steppers = trainer_scripts.steppers(model, 10)
        for _ in range(2):
            for inputs, labels in trainer_scripts.batches():
                optimizer.zero_grad()
                F.cross_entropy(model.network(inputs), labels).backward()
                optimizer.step()
                for stepper in steppers:
                    stepper.step()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, module.state_dict()[name]), name

    @pytest.mark.parametrize(
        ("optimizers", "options", "steps"),
        [(1, {"accumulate_grad_batches": 2}, 6), (2, {}, 10), (1, {"precision": "bf16-mixed"}, 10)],
        ids=["accumulated gradients", "two optimizers", "bfloat16"],
    )
    def test_steps_once_after_optimizers(self, make, optimizers, options, steps):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        module, callback = Module(optimizers), IteRand(sparsity=0.6)
        trainer(callback, **options).fit(module, trainer_scripts.batches())  # two epochs of five batches
        assert [stepper.iteration for stepper in callback.search.steppers] == [steps]

    def test_a_second_fit_continues_with_the_recommended_steppers_of_the_first(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        module, callback = Module(), IteRand(sparsity=0.6, preset="recommended")
        first = trainer(callback)
        first.fit(module, trainer_scripts.batches())
        steppers = callback.search.steppers
        trainer(callback).fit(module, trainer_scripts.batches())
        assert callback.search.steppers == steppers
        assert [type(stepper).__name__ for stepper in steppers] == ["IterativeRandomization"]
        assert steppers[0].iteration == 20

    def test_a_module_that_is_masked_already(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        module, callback = iterand.prune_(Module(), 0.6), IteRand()
        trainer(callback).fit(module, trainer_scripts.batches())
        assert callback.search.steppers[0].iteration == 10
        with pytest.raises(ValueError, match=r"'network\.0\.weight' is masked already; leave out sparsity="):
            trainer(IteRand(sparsity=0.6)).fit(module, trainer_scripts.batches())
        with pytest.raises(ValueError, match="Module has no masked layer; give the callback sparsity=, or call prune_"):
            trainer(IteRand()).fit(Module(), trainer_scripts.batches())

    def test_a_module_that_prunes_itself(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make

        class Pruning(Module):
            def configure_model(self) -> None:
                if not iterand.masked_layers(self):
                    iterand.prune_(self, 0.6)

        callback = IteRand()
        trainer(callback).fit(Pruning(), trainer_scripts.batches())
        assert callback.search.steppers[0].iteration == 10

    def test_refusals(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        with pytest.raises(ValueError, match=r"^seed: options of prune_, which needs a sparsity; give sparsity="):
            IteRand(seed=3)
        with pytest.raises(ValueError, match="the trainer runs for inf steps, which says nothing; give it max_steps"):
            trainer(IteRand(0.6, preset="recommended"), max_epochs=-1).fit(Module(), trainer_scripts.batches())
        workers = trainer(strategy="ddp_fork", devices=2)
        with pytest.raises(ValueError, match="the strategy trains a copy of the module in worker processes"):
            IteRand(0.6).setup(workers, Module(), "fit")
        IteRand().setup(workers, iterand.prune_(Module(), 0.6), "fit")
        averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
        with pytest.raises(ValueError, match=r"use_buffers=True would average .*; set use_buffers=False"):
            trainer(IteRand(0.6), averaging.WeightAveraging()).fit(Module(), trainer_scripts.batches())

    def test_norms_that_share_statistics_are_converted_before_pruning(self, make):
        from iterand.integrations.lightning import IteRand

        class Normed(make[0]):
            def __init__(self) -> None:
                super().__init__()
                self.network.insert(1, nn.BatchNorm1d(16))

        trainer = make[1](strategy="ddp", devices=1, sync_batchnorm=True)
        with pytest.raises(ValueError, match=r"cannot convert a norm once 'network\.1\.bias' is masked; leave it out"):
            IteRand(0.6, preset="recommended").setup(trainer, Normed(), "fit")
        IteRand(0.6, preset="recommended").setup(trainer, Normed(), "validate")  # where Lightning converts nothing
        fixed = Normed()
        IteRand(0.6).setup(trainer, fixed, "fit")
        assert isinstance(nn.SyncBatchNorm.convert_sync_batchnorm(fixed).network[1], nn.SyncBatchNorm)
        shifted = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
        IteRand(0.6, preset="recommended").setup(make[1](strategy="ddp", devices=1), shifted, "fit")
        assert isinstance(shifted.network[1], nn.SyncBatchNorm)
        assert "network.1.bias" in iterand.masked_layers(shifted)

    def test_averaged_scores(self, make):
        from iterand.integrations.lightning import IteRand

        averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
        Module, trainer = make
        module = Module()
        callbacks = IteRand(0.6, steppers=trainer_scripts.steppers), averaging.WeightAveraging(use_buffers=False)
        trainer(*callbacks).fit(module, trainer_scripts.batches())
        for layer in iterand.masked_layers(module).values():  # which has the averaged scores now
            assert torch.equal(layer.weight, layer.parametrization.weight())
            assert layer.draw.any()

    @pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"])
    def test_averages_of_the_module_before_pruning_are_refused(self, make, name):
        from iterand.integrations.lightning import IteRand

        callbacks = pytest.importorskip("lightning.pytorch.callbacks")
        if not hasattr(callbacks, name):
            pytest.skip(f"this release of lightning has no {name}")
        options = {"swa_lrs": 0.1} if name == "StochasticWeightAveraging" else {"use_buffers": False}
        Module, trainer = make
        module, averaging = Module(), getattr(callbacks, name)(**options)
        with pytest.raises(ValueError, match=rf"before it is pruned; put IteRand before {name} in callbacks="):
            trainer(averaging, IteRand(0.6)).fit(module, trainer_scripts.batches())
        assert not iterand.masked_layers(module)
        trainer(IteRand(0.6), averaging).fit(module, trainer_scripts.batches())

    def test_optimizers_from_before_pruning_are_refused(self, make):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        module = Module()
        early = torch.optim.SGD(module.parameters(), lr=0.1)
        module.configure_optimizers = lambda: early
        with pytest.raises(ValueError, match="no optimizer trains the scores of a mask; make optimizers in configure"):
            trainer(IteRand(0.6)).fit(module, trainer_scripts.batches())

    @pytest.mark.parametrize("preset", ["paper", "recommended"])
    def test_gem_miner_needs_steppers_of_its_own(self, make, preset):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        with pytest.raises(ValueError, match="steppers is 3; it must be a function of the model"):
            IteRand(0.6, steppers=3)
        with pytest.raises(ValueError, match="masks of GEM-Miner need ScoreFreezing and a schedule; give the callback"):
            trainer(IteRand(0.6, mask="gem_miner", preset=preset)).fit(Module(), trainer_scripts.batches())

    def test_other_modules_in_callbacks_before_it_are_not_copies(self, make, lightning):
        from iterand.integrations.lightning import IteRand

        Module, trainer = make
        module, holder = Module(), lightning.Callback()
        holder.itself, holder.teacher = module, nn.Linear(6, 3)
        trainer(holder, IteRand(0.6)).fit(module, trainer_scripts.batches())

    def test_a_global_ranking_is_cut_once_a_step(self, make, monkeypatch):
        from iterand.integrations.lightning import IteRand
        from iterand.selection import GlobalRanking

        Module, trainer = make
        calls: list[int] = []
        cuts = GlobalRanking.cuts
        monkeypatch.setattr(GlobalRanking, "cuts", lambda self, *args: calls.append(0) or cuts(self, *args))
        trainer(IteRand(0.6, ranking="global", weights="signed_constant")).fit(Module(), trainer_scripts.batches())
        assert len(calls) == 10

    def test_two_ranks_agree_without_talking_about_weights(self, lightning, tmp_path):
        command = [sys.executable, SCRIPT, tmp_path]
        found = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr[-2000:]
        first, second = ((tmp_path / f"{rank}.ticket").read_bytes() for rank in range(2))
        assert first == second
        assert rounds(tmp_path / "0.ticket") == 12 // trainer_scripts.PERIOD


class TestTransformers:
    @pytest.fixture(scope="class")
    def transformers(self) -> Any:
        return pytest.importorskip("transformers", reason="transformers is not installed")

    @pytest.fixture
    def make(self, transformers, tmp_path):
        tiny = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}

        def model() -> Any:
            """A language model whose embedding and head are one tied tensor."""
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, **tiny))

        def trainer(model: Any, *callbacks: Any, **options: Any) -> Any:
            tokens = torch.randint(20, (16, 6), generator=torch.Generator().manual_seed(0))
            settings = {"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "learning_rate": 0.05}
            quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": 2}
            arguments = transformers.TrainingArguments(**(settings | quiet | options.pop("arguments", {})))
            examples = [{"input_ids": row, "labels": row} for row in tokens]
            return transformers.Trainer(
                model, arguments, train_dataset=examples, callbacks=list(callbacks), **options
            )  # fmt: skip

        return model, trainer

    def test_accumulated_gradients_and_tied_weights(self, make, tmp_path):
        from iterand.integrations.transformers import IteRandCallback

        model, trainer = make
        arguments = {"gradient_accumulation_steps": 2, "max_steps": 4}
        first, callback = model(), IteRandCallback(0.6, steppers=trainer_scripts.steppers_now)
        trainer(first, callback, arguments=arguments).train()
        assert [stepper.iteration for stepper in callback.search.steppers] == [4, 4]
        resumed, callback = model(), IteRandCallback(0.6, steppers=trainer_scripts.steppers_now)
        trainer(resumed, callback, arguments=arguments).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [stepper.iteration for stepper in callback.search.steppers] == [4, 4]
        for name, tensor in first.state_dict().items():
            assert torch.equal(tensor, resumed.state_dict()[name]), name
        assert iterand.masked_layers(resumed)["transformer.wte.weight"].owners[1][0] is resumed.lm_head

    def test_an_optimizer_from_before_pruning_is_refused(self, make):
        from iterand.integrations.transformers import IteRandCallback

        model, trainer = make
        built = model()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="the optimizer that Trainer was given holds parameters from before"):
            trainer(built, IteRandCallback(0.6), optimizers=(optimizer, None))
        assert not iterand.masked_layers(built)

    def test_a_model_that_model_init_prunes(self, make):
        from iterand.integrations.transformers import IteRandCallback

        model, trainer = make
        callback, seen = IteRandCallback(), []
        run = trainer(None, callback, model_init=lambda: iterand.prune_(model(), 0.6), arguments={"max_steps": 3})
        for _ in range(2):
            run.train()
            seen.append(run.model)
            assert iterand.masked_layers(run.model)
            assert [stepper.iteration for stepper in callback.search.steppers] == [3]
        assert seen[0] is not seen[1]

    def test_model_init_without_pruning_is_refused(self, make):
        from iterand.integrations.transformers import IteRandCallback

        model, trainer = make
        run = trainer(None, IteRandCallback(0.6), model_init=model)
        with pytest.raises(ValueError, match="call prune_ in model_init, and leave out sparsity="):
            run.train()

    def test_a_callback_that_is_added_later_is_refused(self, make):
        from iterand.integrations.transformers import IteRandCallback

        model, trainer = make
        run = trainer(model())
        run.add_callback(IteRandCallback(0.6))
        with pytest.raises(ValueError, match=r"was added after the Trainer was made, .*; pass it in callbacks="):
            run.train()
        later = trainer(iterand.prune_(model(), 0.6), arguments={"max_steps": 1})
        later.add_callback(IteRandCallback())
        later.train()

    def test_resizing_embeddings_is_refused(self, make):
        model, _ = make
        masked = iterand.prune_(model(), 0.6)
        before = {name: tensor.clone() for name, tensor in masked.state_dict().items()}
        with pytest.raises(ValueError, match="embedding of 20 rows cannot be resized to 24; resize it before prune_"):
            masked.resize_token_embeddings(24, mean_resizing=False)
        for name, tensor in masked.state_dict().items():
            assert torch.equal(tensor, before[name])
        iterand.fold_(masked)
        masked.tie_weights()
        assert masked.resize_token_embeddings(24, mean_resizing=False).weight.shape == (24, 8)

    def test_tying_masked_weights_again_is_refused(self, make):
        model, _ = make
        masked = iterand.prune_(model(), 0.6)
        for again in (masked.tie_weights, lambda: masked.resize_token_embeddings(20)):
            with pytest.raises(
                ValueError, match=r"'transformer\.wte\.weight' is masked and stays tied; call tie_weights"
            ):
                again()
        free = iterand.prune_(model(), 0.6, exclude=["lm_head", "transformer.wte"])
        free.resize_token_embeddings(24, mean_resizing=False)
        assert free.lm_head.weight is free.transformer.wte.weight

    def test_saved_and_loaded_as_transformers_does(self, make, tmp_path):
        """The state of a masked model, with tied weights once; a folded one is an ordinary checkpoint."""
        from iterand.integrations.transformers import IteRandCallback

        model, trainer = make
        masked = model()
        trainer(masked, IteRandCallback(0.6, steppers=trainer_scripts.steppers_now), arguments={"max_steps": 2}).train()
        masked.save_pretrained(tmp_path / "masked")
        for folder in ("masked", "checkpoint-2"):
            other = iterand.prune_(model(), 0.6)
            load_model(other, tmp_path / folder / "model.safetensors")
            for name, tensor in masked.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name]), name
            assert iterand.IterativeRandomization(other).iteration == 2
        tokens = torch.arange(6)[None]
        expected = masked.eval()(tokens).logits
        assert torch.equal(other.eval()(tokens).logits, expected)
        iterand.fold_(masked).save_pretrained(tmp_path / "folded")
        plain = type(model()).from_pretrained(tmp_path / "folded")
        assert torch.equal(plain.eval()(tokens).logits, expected)
