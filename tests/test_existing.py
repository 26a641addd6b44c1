"""Masks over weights that a model has already: they never change, and everything else is frozen unless it is named."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import iterand
from iterand.existing import magnitude_scores

INPUTS = torch.randn(24, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3


class Network(nn.Module):
    """Two blocks with norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(12, 20), nn.LayerNorm(20), nn.ReLU(), nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU())
        )
        self.head = nn.Linear(16, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def build():
    torch.manual_seed(0)
    return Network()


def bits(tensor):
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def trainable(model):
    return [one for one in model.parameters() if one.requires_grad]


def train(model, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(trainable(model), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(INPUTS), LABELS).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("scores", ["magnitude_rank", "magnitude"])
@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_the_first_mask_keeps_the_largest_magnitudes(ranking, scores):
    plain = build()
    model = iterand.prune_(build(), 0.3, weights="existing", ranking=ranking, scores=scores)
    layers = iterand.masked_layers(model)
    assert list(layers) == ["body.0.weight", "body.3.weight", "head.weight"]
    groups = [list(layers)] if ranking == "global" else [[name] for name in layers]
    for group in groups:
        magnitudes = torch.cat([plain.get_parameter(name).detach().abs().flatten() for name in group])
        kept = torch.cat([layers[name].mask.flatten() for name in group])
        assert int(kept.sum()) == len(kept) - round(0.3 * len(kept))
        assert magnitudes[kept].min() > magnitudes[~kept].max()


def test_ranks_are_equally_spaced_in_the_order_of_the_magnitudes():
    weights = [torch.tensor([[0.5, -3.0], [0.0, 1.0]]), torch.tensor([-2.0, 0.25])]
    first, second = magnitude_scores(weights, "magnitude_rank")
    torch.testing.assert_close(first, torch.tensor([[3.0, 6.0], [1.0, 4.0]]) * 0.1 / 6)
    torch.testing.assert_close(second, torch.tensor([5.0, 2.0]) * 0.1 / 6)
    assert torch.equal(magnitude_scores(weights, "magnitude")[0], weights[0].abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_bit_of_a_weight_changes(dtype):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 4, bias=False)).to(dtype)
    with torch.no_grad():
        model[2].weight[0] = torch.tensor([-0.0, 0.0, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max])
    model = model.to(memory_format=torch.channels_last)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strides = model[0].weight.stride()
    iterand.prune_(model, 0.5, weights="existing", overrides={"2": 0.25})
    masks = {name: layer.mask for name, layer in iterand.masked_layers(model).items()}
    for name, layer in iterand.masked_layers(model).items():
        assert torch.equal(bits(layer.weight), bits(before[name]))
    iterand.fold_(model)
    assert model[0].weight.stride() == strides
    for name, mask in masks.items():
        assert torch.equal(bits(model.get_parameter(name)), bits(before[name]) * mask)
    assert torch.equal(bits(model[0].bias), bits(before["0.bias"]))


def test_only_scores_and_what_is_named_are_trained():
    before = build().state_dict()
    model = iterand.prune_(build(), 0.2, weights="existing", trainable="head")
    names = {name for name, one in model.named_parameters() if one.requires_grad}
    assert names == {"head.weight", "head.bias", *(f"body.{n}.parametrizations.weight.0.score" for n in (0, 3))}
    scores = [score.clone() for score in iterand.scores(model)]
    train(model, 5)
    for old, new in zip(scores, iterand.scores(model)):
        assert not torch.equal(old, new)
    state = {name: layer.weight for name, layer in iterand.masked_layers(model).items()} | dict(
        model.named_parameters()
    )
    changed = {name for name in before if name in state and not torch.equal(bits(before[name]), bits(state[name]))}
    assert changed == {"head.weight", "head.bias"}
    iterand.fold_(model)
    assert all(one.requires_grad for one in model.parameters())


def test_biases_and_norms_are_trained_if_they_are_named():
    model = iterand.prune_(build(), 0.2, weights="existing", include="body.*", trainable=["head*", "*.bias"])
    free = {name for name, one in model.named_parameters() if one.requires_grad and "score" not in name}
    assert free == {"head.weight", "head.bias", "body.0.bias", "body.1.bias", "body.3.bias", "body.4.bias"}
    frozen = {one.name for one in iterand.summary(model).unmasked if one.frozen}
    assert frozen == {"body.1.weight", "body.4.weight"}
    assert "layer scales" not in str(iterand.summary(model))


def test_excluded_layers_are_frozen_and_not_masked():
    model = iterand.prune_(build(), 0.2, weights="existing", exclude="head")
    assert list(iterand.masked_layers(model)) == ["body.0.weight", "body.3.weight"]
    assert [name for name, one in model.named_parameters() if one.requires_grad and "score" not in name] == []


def test_what_was_frozen_before_stays_frozen_after_fold():
    model = build()
    model.head.bias.requires_grad_(False)
    iterand.fold_(iterand.prune_(model, 0.2, weights="existing"))
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["head.bias"]


def test_the_padding_row_of_an_embedding_keeps_its_weights():
    embedding = nn.Embedding(5, 4, padding_idx=1)
    with torch.no_grad():
        embedding.weight[1] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    iterand.prune_(embedding, 0.5, weights="existing")
    assert torch.equal(embedding(torch.tensor([1]))[0].detach(), torch.tensor([9.0, 8.0, 7.0, 6.0]))


def test_tied_weights_are_masked_once():
    model = nn.ModuleDict({"words": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)})
    model["out"].weight = model["words"].weight
    before = model["out"].weight.clone()
    iterand.prune_(model, 0.5, weights="existing")
    layer = iterand.masked_layers(model)["words.weight"]
    assert torch.equal(model["out"].weight, before * layer.mask)
    assert torch.equal(model["words"].weight, before * layer.mask)


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_resumed_from_a_state_dict_equals_unbroken(ranking):
    def start():
        model = iterand.prune_(build(), 0.4, weights="existing", ranking=ranking, trainable="head")
        return model, iterand.SparsitySchedule(model, "cubic", steps=8)

    def loop(model, schedule, optimizer, steps):
        for _ in range(steps):
            train(model, 1, optimizer)
            schedule.step()

    unbroken, schedule = start()
    optimizer = torch.optim.AdamW(trainable(unbroken), lr=0.01)
    loop(unbroken, schedule, optimizer, 4)
    saved = copy.deepcopy((unbroken.state_dict(), optimizer.state_dict()))
    loop(unbroken, schedule, optimizer, 6)
    resumed, again = start()
    resumed.load_state_dict(saved[0])
    optimizer = torch.optim.AdamW(trainable(resumed), lr=0.01)
    optimizer.load_state_dict(saved[1])
    loop(resumed, again, optimizer, 6)
    for name, tensor in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    total = sum(mask.numel() for mask in iterand.scores(unbroken))
    assert iterand.summary(unbroken).kept == pytest.approx(0.6 * total, abs=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"biases": "zero"}, "biases is 'zero', but existing weights need the biases and norms"),
        ({"norms": "fixed"}, "norms is 'fixed', but existing weights need the biases and norms"),
        ({"trainable": "tail*"}, "trainable pattern 'tail*' matches no parameter"),
        ({"scores": "ranks"}, "unknown distribution of scores 'ranks'"),
        ({"weights": "uniform", "trainable": "head"}, "trainable is ['head'], which goes with weights='existing' only"),
        ({"weights": "uniform", "scores": "magnitude"}, "scores is 'magnitude', which goes with weights='existing'"),
        ({"preset": "recommended"}, "preset is 'recommended', but weights is 'existing': it is for random weights"),
        ({"trainable": "*"}, "has nothing to mask"),
    ],
)
def test_what_cannot_be_asked_for(options, sentence):
    model = build()
    with pytest.raises(ValueError, match=re.escape(sentence)):
        iterand.prune_(model, 0.2, **{"weights": "existing", **options})
    assert all(one.requires_grad for one in model.parameters())
    assert not iterand.masked_layers(model)


def test_nan_is_refused():
    model = build()
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'head\.weight' contains NaN, so its weights cannot be ranked"):
        iterand.prune_(model, 0.2, weights="existing")
    iterand.prune_(model, 0.2, weights="existing", exclude="head")


def test_a_model_may_have_sparse_buffers(tmp_path):
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    iterand.prune_(model, 0.5, weights="existing")
    assert model(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(ValueError, match=r"'graph' in the model's state is torch.sparse_coo; a ticket holds dense"):
        iterand.save_ticket(model, tmp_path / "a.ticket")


def test_existing_weights_are_not_randomized():
    model = iterand.prune_(build(), 0.2, weights="existing", ranking="global")
    for randomize in (iterand.randomize_, iterand.IterativeRandomization):
        with pytest.raises(ValueError, match=r"'body\.0\.weight' holds existing weights, which are never redrawn"):
            randomize(model)
    (schedule,) = iterand.recommended_steppers(model, steps=10)
    assert isinstance(schedule, iterand.SparsitySchedule)
    assert iterand.recommended_steppers(iterand.prune_(build(), 0.2, weights="existing"), steps=10) == []


def test_no_distribution_takes_the_name():
    for name in ("existing", "magnitude"):
        with pytest.raises(ValueError, match=f"a distribution named '{name}' is registered already"):
            iterand.register_distribution(iterand.Distribution(name, lambda words: words[0], lambda fan: 1.0))


@pytest.mark.filterwarnings("ignore")  # what other packages warn of, release by release
def test_lightning_resumes_exactly(tmp_path):
    L = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from iterand.integrations.lightning import IteRand

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = build()

        def training_step(self, batch, index):
            inputs, labels = batch
            return F.cross_entropy(self.network(inputs), labels)

        def configure_optimizers(self):
            return torch.optim.AdamW(trainable(self), lr=0.01)

    def fit(epochs, **options):
        module = Module()
        callback = IteRand(0.3, weights="existing", trainable="network.head*")
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(INPUTS, LABELS), batch_size=8)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=[callback], default_root_dir=tmp_path, enable_checkpointing=False, **quiet
        )
        trainer.fit(module, loader, **options)
        assert callback.search.steppers == []
        return trainer, module

    _, unbroken = fit(4)
    trainer, _ = fit(2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit(4, ckpt_path=tmp_path / "half.ckpt")
    for name, tensor in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    weights = {name: layer.weight for name, layer in iterand.masked_layers(unbroken).items()}
    assert all(torch.equal(tensor, Module().get_parameter(name)) for name, tensor in weights.items())


@pytest.mark.filterwarnings("ignore")
def test_trainer_of_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from iterand.integrations.transformers import IteRandCallback

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, **sizes)

    def make():
        torch.manual_seed(0)
        return transformers.BertForSequenceClassification(config)

    model, before = make(), make().state_dict()
    examples = [{"input_ids": torch.arange(6) + n % 7, "labels": n % 2} for n in range(16)]
    options = {"report_to": [], "use_cpu": True, "save_strategy": "no", "learning_rate": 0.01, "disable_tqdm": True}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(tmp_path), max_steps=3, **options),
        train_dataset=examples,
        callbacks=[IteRandCallback(0.1, weights="existing", include="bert.encoder.*", trainable="classifier")],
    )
    trainer.train()
    trained = {name for name, one in model.named_parameters() if one.requires_grad and "score" not in name}
    assert trained == {"classifier.weight", "classifier.bias"}
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", make())
    assert {name for name in before if not torch.equal(before[name], plain.state_dict()[name])} == {
        *iterand.masked_layers(model), "classifier.weight", "classifier.bias",
    }  # fmt: skip
