"""A pruned model under what torch does with models: copies, states, precisions, functional calls."""

import copy
import gc
import inspect
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import iterand
from pruned import GENERATOR, INPUTS, RANKINGS, network, plain_masks, plain_output, score_gradients, shake

# --- Copies, states, precisions -------------------------------------------------------------------------------------


@RANKINGS
def test_folding_a_copy_leaves_the_original_alone(example, options):
    model = iterand.prune_(example.build(), 0.6, **options).eval()
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    expected = model(example.images)
    twin = copy.deepcopy(model)
    folded = iterand.fold_(copy.deepcopy(model))
    assert torch.equal(folded(example.images), expected)
    assert torch.equal(model(example.images), expected)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == types
    shake(model)
    assert torch.equal(twin(example.images), expected)  # a copy has scores of its own
    assert not torch.equal(model(example.images), expected)
    iterand.fold_(model)
    assert torch.equal(twin(example.images), expected)


OTHER_SETTINGS = (
    "^the state has seed=1, weight_distribution='signed_constant', sparsity=0.6, and this model was pruned with "
    "seed=2, weight_distribution='uniform', sparsity=0.2; the state's settings are used"
)


@RANKINGS
def test_a_state_round_trip_also_over_another_seed(example, options):
    model = iterand.prune_(example.build(), 0.6, seed=1, weights="signed_constant", **options).eval()
    shake(model)
    iterand.randomize_(model, 0.5)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = iterand.prune_(example.build(), 0.2, seed=2, weights="uniform", **options).eval()
    with pytest.warns(UserWarning, match=OTHER_SETTINGS) as told:
        other.load_state_dict(torch.load(buffer, weights_only=True))
    assert len({str(warning.message) for warning in told}) == 1  # which Python shows once
    assert torch.equal(other(example.images), model(example.images))
    for pruned in (model, other):  # the round number and the seed came along: the next round is the same
        iterand.randomize_(pruned, 0.5)
    for a, b in zip(iterand.masked_layers(model).values(), iterand.masked_layers(other).values()):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.weight, b.parametrization.weight())
        assert torch.equal(a.draw, b.draw)


def test_a_state_of_another_ranking_is_refused():
    with pytest.raises(ValueError, match=r"'0\.weight' is ranked per layer, the state per global"):
        network().load_state_dict(network(ranking="global").state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_scores_and_cuts_stay_float32(dtype):
    model = network()
    masks, scores = plain_masks(model), [score.detach().clone() for score in iterand.scores(model)]
    identity = [id(score) for score in iterand.scores(model)]
    score_gradients(model)
    model.to(dtype)
    assert model(INPUTS.to(dtype)).dtype == dtype
    for score, before in zip(iterand.scores(model), scores):
        assert score.dtype == score.grad.dtype == torch.float32
        assert torch.equal(score, before)
    assert [id(score) for score in iterand.scores(model)] == identity  # an optimizer still holds them
    assert plain_masks(model) == masks
    assert all(gradient.dtype == torch.float32 for gradient in score_gradients(model, INPUTS.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_model_of_another_precision_holds_the_rounded_weights(dtype):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(dtype)
    iterand.prune_(model, 0.6)
    iterand.randomize_(model, 1.0)
    for layer in iterand.masked_layers(model).values():
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.weight, layer.parametrization.weight().to(dtype))
        assert layer.score.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_the_weights_only(dtype):
    torch.set_default_dtype(dtype)
    try:
        model = network()
        score_gradients(model, INPUTS.to(dtype))
    finally:
        torch.set_default_dtype(torch.float32)
    for layer, expected in zip(iterand.masked_layers(model).values(), iterand.masked_layers(network()).values()):
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.score, expected.score)
        assert torch.equal(layer.weight, expected.weight.to(dtype))


def test_channels_last(cnn):
    model = iterand.prune_(cnn.build(), 0.6).eval()
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert iterand.masked_layers(twin)["convolution.weight"].weight.is_contiguous(memory_format=torch.channels_last)
    images = cnn.images.to(memory_format=torch.channels_last)
    for _ in range(2):
        for a, b in zip(iterand.masked_layers(model).values(), iterand.masked_layers(twin).values()):
            assert torch.equal(a.mask, b.mask)
            assert torch.equal(a.weight, b.weight)
            assert torch.equal(a.draw, b.draw)
        torch.testing.assert_close(model(cnn.images), twin(images))
        for pruned in (model, twin):
            iterand.randomize_(pruned, 0.5)


def ambiguous(convolution: nn.Module) -> nn.Module:
    """A kernel of one pixel lies in both formats; the strides still say which is meant."""
    with torch.no_grad():
        weight = torch.empty_like(convolution.weight, memory_format=torch.channels_last).copy_(convolution.weight)
    convolution.weight = nn.Parameter(weight)
    return convolution


def transposed(layer: nn.Module) -> nn.Module:
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return layer


LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
IMAGES, VOLUMES = (
    torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(6)) for shape in ((9, 9), (5,) * 3)
)
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv2d": (lambda: nn.Conv2d(4, 16, 3).to(memory_format=LAST), IMAGES),
    "grouped conv2d": (lambda: nn.Conv2d(4, 16, 3, groups=2).to(memory_format=LAST), IMAGES),
    "depthwise conv2d": (lambda: nn.Conv2d(4, 4, 3, groups=4).to(memory_format=LAST), IMAGES),
    "one pixel": (lambda: ambiguous(nn.Conv2d(4, 16, 1)), IMAGES),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 16, 3).to(memory_format=LAST), IMAGES),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(4, 16, 2).to(memory_format=LAST_3D), VOLUMES),
    "conv3d": (lambda: nn.Conv3d(4, 16, 2).to(memory_format=LAST_3D), VOLUMES),
    "linear": (lambda: transposed(nn.Linear(8, 16)), INPUTS),
    "embedding": (lambda: transposed(nn.Embedding(9, 4, max_norm=0.5)), torch.tensor([1, 5, 3])),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_keep_their_memory_format(name, dtype, tmp_path):
    build, inputs = LAYOUTS[name]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    strides = build().weight.stride()
    assert strides != torch.empty(build().weight.shape).stride()
    model = iterand.prune_(nn.Sequential(build()).to(dtype), 0.6)
    iterand.randomize_(model, 0.5)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", nn.Sequential(build()).to(dtype))
    folded = iterand.fold_(copy.deepcopy(model))
    assert model[0].weight.stride() == plain[0].weight.stride() == folded[0].weight.stride() == strides
    expected = model(inputs)  # in the format of the images, which the weights overrule in some layers
    assert torch.equal(plain(inputs), expected)
    assert torch.equal(folded(inputs), expected)
    assert expected.stride() == plain(inputs).stride()
    expected.square().sum().backward()
    plain(inputs).square().sum().backward()
    (layer,) = iterand.masked_layers(model).values()
    torch.testing.assert_close(layer.score.grad, (layer.weight * plain[0].weight.grad).float())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_scores_of_channels_last_weights():
    model = iterand.prune_(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 3)).to(memory_format=LAST), 0.6)
    scores = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    batch = {name: torch.stack([value, -value]) for name, value in scores.items()}

    def output(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (IMAGES,))

    both = torch.func.vmap(output)(batch)
    for n, one in enumerate(both):
        torch.testing.assert_close(one, output({name: value[n] for name, value in batch.items()}))
    gradients = torch.func.vmap(torch.func.grad(lambda parameters: output(parameters).square().sum()))(batch)
    expected = score_gradients(model, IMAGES)
    for gradient, one in zip(gradients.values(), expected):
        torch.testing.assert_close(gradient[0], one)


def test_autocast():
    model = network()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(INPUTS)
        expected = iterand.fold_(copy.deepcopy(model))(INPUTS)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    output.float().square().sum().backward()
    assert all(score.grad.dtype == torch.float32 and score.grad.any() for score in iterand.scores(model))


def test_autocast_caches_no_mask():
    model = network()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(INPUTS)
        shake(model)
        assert torch.equal(model(INPUTS), iterand.fold_(copy.deepcopy(model))(INPUTS))


def test_eval_and_inference_mode(example):
    model = iterand.prune_(example.build(), 0.6).eval()
    expected = model(example.images)
    assert torch.equal(model.train().eval()(example.images), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(example.images), expected)
        shake(model)
        torch.testing.assert_close(model(example.images), iterand.fold_(copy.deepcopy(model))(example.images))


def test_an_averaged_model(mlp):
    model = iterand.prune_(mlp.build(), 0.6, ranking="global")
    average = AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(average(mlp.images), model(mlp.images))
    assert len(iterand.scores(average)) == 2


@pytest.mark.parametrize("share", [None, 0.9], ids=["mean", "exponential"])
def test_averages_are_of_scores_and_never_of_weights(cnn, share):
    model = iterand.prune_(cnn.build(), 0.6, ranking="global")
    average = AveragedModel(model, multi_avg_fn=None if share is None else get_ema_multi_avg_fn(share))
    expected = [torch.zeros_like(score) for score in iterand.scores(model)]
    for n in range(3):
        shake(model)
        iterand.randomize_(model, 0.5)
        average.update_parameters(model)
        keep = n / (n + 1) if share is None else share * (n > 0)
        expected = [keep * mean + (1 - keep) * score for mean, score in zip(expected, iterand.scores(model))]
    for layer, ours, mean in zip(
        iterand.masked_layers(average).values(), iterand.masked_layers(model).values(), expected
    ):  # fmt: skip
        torch.testing.assert_close(layer.score, mean)
        assert torch.equal(layer.draw, ours.draw)
        assert torch.equal(layer.weight, ours.weight)
        assert torch.equal(layer.weight, layer.parametrization.weight())
    folded = iterand.fold_(copy.deepcopy(average.module)).eval()
    assert torch.equal(average.eval()(cnn.images), folded(cnn.images))


@pytest.mark.parametrize("rounds", [10, 300])
@pytest.mark.parametrize("weights", ["signed_constant", "kaiming_uniform"])
def test_a_ticket_of_an_average(weights, rounds, tmp_path):
    """Its draws come from the model; with 300 rounds they do not fit the integers that it was made with."""
    torch.manual_seed(0)
    model = iterand.prune_(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)), 0.6, weights=weights)
    average = AveragedModel(model)
    for _ in range(rounds):
        shake(model)
        iterand.randomize_(model, 0.3)
        average.update_parameters(model)
    copied = copy.deepcopy(average.module)
    images = torch.randn(8, 16)
    for source in (average.module, copied):
        iterand.save_ticket(source, tmp_path / "a.ticket")
        plain = iterand.load_ticket(
            tmp_path / "a.ticket", nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))
        )
        assert torch.equal(plain(images), average.module(images))
        assert iterand.summary(source).rounds == rounds
    other = iterand.prune_(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)), 0.6, weights=weights)
    other.load_state_dict(average.module.state_dict())
    assert torch.equal(other(images), average.module(images))
    iterand.randomize_(copied, 0.3)  # a copy goes its own way
    iterand.randomize_(model, 0.3)
    assert iterand.summary(copied).rounds == rounds + 1
    iterand.save_ticket(copied, tmp_path / "a.ticket")


def test_averages_of_buffers_are_refused():
    with pytest.raises(ValueError, match=r"^use_buffers=True would average random weights .*; set use_buffers=False"):
        AveragedModel(network(), use_buffers=True)
    AveragedModel(nn.Linear(2, 2), use_buffers=True)


def test_only_scores_and_what_is_left_alone_are_parameters(mlp):
    """So weight decay, clipping and counting leave the random weights alone."""
    model = iterand.prune_(mlp.build(), 0.6)
    names = {name for name, _ in model.named_parameters()}
    assert names == {f"{n}.{end}" for n in (1, 3) for end in ("bias", "parametrizations.weight.0.score")}
    vector = nn.utils.parameters_to_vector(iterand.scores(model))
    assert len(vector) == 64 * 32 + 32 * 10
    nn.utils.vector_to_parameters(-vector, iterand.scores(model))
    assert torch.equal(nn.utils.parameters_to_vector(iterand.scores(model)), -vector)
    assert "1.parametrizations.weight.original" in dict(model.named_buffers())


def test_safetensors(example, tmp_path):
    model = iterand.prune_(example.build(), 0.6).eval()
    shake(model)
    save_model(model, tmp_path / "a.safetensors")
    other = iterand.prune_(example.build(), 0.6).eval()
    load_model(other, tmp_path / "a.safetensors")
    assert torch.equal(other(example.images), model(example.images))


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model[0]], ids=["model", "layer"])
def test_pickling_is_refused_with_the_way_out(part):
    model = network()
    sentence = r"cannot be pickled, since its class is made at run time; save model\.state_dict\(\), or a ticket with"
    for save in (pickle.dumps, lambda thing: torch.save(thing, io.BytesIO())):
        with pytest.raises(pickle.PicklingError, match=sentence):
            save(part(model))
    assert pickle.loads(pickle.dumps(iterand.fold_(model)))[2].weight.shape == (4, 16)


def test_a_copy_is_made_as_the_model_says():
    class Counted(nn.Sequential):
        def __getstate__(self) -> dict[str, object]:
            return {**self.__dict__, "copies": getattr(self, "copies", 0) + 1}

    model = iterand.prune_(Counted(nn.Linear(8, 4)), 0.6)
    assert copy.deepcopy(copy.deepcopy(model)).copies == 2
    assert torch.equal(copy.deepcopy(model)(INPUTS), model(INPUTS))


@RANKINGS
def test_the_model_keeps_its_signature(options):
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
            """Classify."""
            return self.linear(tokens) * scale

    model = iterand.prune_(Classifier(), 0.6, **options)
    assert inspect.signature(model.forward) == inspect.signature(Classifier().forward)
    assert model.forward.__doc__ == "Classify."
    assert isinstance(model, Classifier)
    assert torch.equal(model(tokens=INPUTS, scale=2.0), 2 * model(INPUTS))


def test_a_model_without_storage():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    iterand.prune_(model, 0.6)
    assert model(INPUTS.to("meta")).shape == (5, 4)
    real = network(seed=4)
    with pytest.warns(UserWarning, match=r"^the state has seed=4, and this model was pruned with seed=0; "):
        model.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(model(INPUTS), real(INPUTS))


def train_and_randomize(model, optimizer, randomizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(INPUTS).square().sum().backward()
        optimizer.step()
        randomizer.step()


def searched(steps):
    """A network after some steps, with its optimizer and randomizer."""
    model = network()
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.01, momentum=0.9)
    found = model, optimizer, iterand.IterativeRandomization(model, period=1, rate=0.5)
    train_and_randomize(*found, steps)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
class TestDistributedCheckpoint:
    """It loads tensors in place, so that those of a new model must be as large as the saved ones."""

    def saved_and_loaded(self, saved, loaded, folder):
        dcp.save(dict(zip("mo", get_state_dict(*saved[:2]))), checkpoint_id=folder)
        state = dict(zip("mo", get_state_dict(*loaded[:2])))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(*loaded[:2], model_state_dict=state["m"], optim_state_dict=state["o"])

    def test_a_search_resumes(self, tmp_path):
        unbroken, resumed = searched(12), searched(0)
        self.saved_and_loaded(unbroken, resumed, tmp_path)
        train_and_randomize(*unbroken, 5)
        train_and_randomize(*resumed, 5)
        for name, tensor in unbroken[0].state_dict().items():
            assert torch.equal(tensor, resumed[0].state_dict()[name]), name

    def test_draws_that_a_new_model_cannot_hold_are_refused(self, tmp_path):
        long = searched(256)
        with pytest.raises(ValueError, match=r"'0.weight' was randomized 256 times, but .* loaded as torch.uint8"):
            self.saved_and_loaded(long, searched(0), tmp_path / "folder")
        dcp_to_torch_save(tmp_path / "folder", tmp_path / "file")
        model = network()
        model.load_state_dict(torch.load(tmp_path / "file")["m"])
        assert torch.equal(model[0].parametrizations.weight[0].draw, long[0][0].parametrizations.weight[0].draw)


# --- Transformations ------------------------------------------------------------------------------------------------


@RANKINGS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(options, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.body, inputs, use_reentrant=use_reentrant)

    model = iterand.prune_(Checkpointed(), 0.6, **options)
    inputs = INPUTS.clone().requires_grad_()
    expected = score_gradients(model.body, inputs)
    assert all(torch.equal(a, b) for a, b in zip(score_gradients(model, inputs), expected))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("options", [{}, {"ranking": "global"}, {"preset": "recommended"}], ids=str)
def test_several_models_are_an_ensemble(options):
    networks = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3)]
    models = [iterand.prune_(network, 0.5, seed=seed, **options) for seed, network in enumerate(networks)]
    inputs = torch.randn(5, 6)
    tensors = torch.func.stack_module_state(models)
    outputs = torch.func.vmap(lambda *state: torch.func.functional_call(models[0], state, (inputs,)))(*tensors)
    torch.testing.assert_close(outputs, torch.stack([model(inputs) for model in models]))


def test_a_forward_that_was_replaced_is_used_by_later_models(monkeypatch):
    class Doubling(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    inputs, first = torch.randn(2, 6), iterand.prune_(Doubling(6, 3), 0.5, seed=0)
    monkeypatch.setattr(Doubling, "forward", nn.Linear.forward)
    second = iterand.prune_(Doubling(6, 3), 0.5, seed=0)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(inputs), 2 * second(inputs))


@RANKINGS
def test_functional_call_and_its_gradient(options):
    model = network(**options)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    others = {name: torch.randn(value.shape, generator=GENERATOR) for name, value in trained.items()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (INPUTS,)).square().sum()

    before = model(INPUTS)
    gradients = torch.func.grad(loss)(others)
    value = loss(others)
    assert torch.equal(model(INPUTS), before)
    for name, score in trained.items():
        score.data.copy_(others[name])
    assert torch.equal(value, plain_output(model).square().sum())
    for name, expected in zip(trained, score_gradients(model)):
        torch.testing.assert_close(gradients[name], expected)


@pytest.mark.parametrize("rounds", [5, 300])
@pytest.mark.parametrize("order", [("average", "randomize"), ("randomize", "average")])
@pytest.mark.parametrize("weights", ["signed_constant", "kaiming_uniform"])
def test_averages_may_be_behind_the_model(weights, order, rounds, tmp_path):
    def build():
        return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))

    torch.manual_seed(0)
    model = iterand.prune_(build(), 0.6, weights=weights)
    average = AveragedModel(model)
    for number in range(rounds):
        shake(model)
        for what in order:
            if what == "average":
                average.update_parameters(model)
            else:
                iterand.randomize_(model, 0.3)
        if number == rounds // 2:
            kept, seen = copy.deepcopy(average), average.n_averaged.item()
    behind = order[0] == "average"
    for source, expected in ((average.module, rounds - behind), (kept.module, seen - behind)):
        iterand.save_ticket(source, tmp_path / "a.ticket")
        plain = iterand.load_ticket(tmp_path / "a.ticket", build())
        images = torch.randn(8, 16)
        assert torch.equal(plain(images), source(images))
        assert iterand.summary(source).rounds == expected
    kept.update_parameters(model)  # a copy of an average goes on
    iterand.randomize_(kept.module, 0.3)
    assert iterand.summary(kept.module).rounds == rounds + 1
    iterand.save_ticket(kept.module, tmp_path / "a.ticket")


@pytest.mark.parametrize("weights", ["signed_constant", "kaiming_uniform"])
@pytest.mark.parametrize("what", ["restored", "restored and trained", "another seed", "folded"])
def test_an_average_keeps_its_rounds_whatever_becomes_of_the_model(what, weights, tmp_path):
    def build(seed=0):
        layers = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))
        return iterand.prune_(layers, 0.6, weights=weights, seed=seed)

    def train(model, rounds, rate=0.3):
        for _ in range(rounds):
            shake(model)
            iterand.randomize_(model, rate)

    torch.manual_seed(0)
    model = build()
    average = AveragedModel(model)
    train(model, 4)
    early = copy.deepcopy(model.state_dict())
    train(model, 4)
    average.update_parameters(model)
    rounds = 8
    if what.startswith("restored"):
        model.load_state_dict(early)
    if what == "restored and trained":
        train(model, 4, rate=0.7)  # again eight rounds, but others
    if what == "another seed":
        other = build(seed=1)
        train(other, 3)
        with pytest.warns(UserWarning, match="the state has seed=1"):
            model.load_state_dict(other.state_dict())
        train(model, 2)
        average.update_parameters(model)
        rounds = 5
    if what == "folded":
        iterand.fold_(model)
        del model
        gc.collect()
    assert iterand.summary(average.module).rounds == rounds
    for source in (average.module, copy.deepcopy(average.module)):
        iterand.save_ticket(source, tmp_path / "a.ticket")
        plain = iterand.load_ticket(
            tmp_path / "a.ticket", nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))
        )
        images = torch.randn(8, 16)
        assert torch.equal(plain(images), source(images))


def test_a_state_of_another_size_leaves_layers_as_they_were(tmp_path):
    def build(outputs, seed):
        return iterand.prune_(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs)), 0.5, seed=seed)

    model, other = build(3, seed=0), build(500, seed=4)
    iterand.randomize_(other, 0.5)
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="size mismatch"), pytest.warns(UserWarning, match="the state has seed=4"):
        model.load_state_dict(other.state_dict())
    assert torch.equal(iterand.masked_layers(model)["2.weight"].mask, iterand.masked_layers(before)["2.weight"].mask)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    seeds = {
        name: layer.header.settings.seed for name, layer in iterand.read_ticket(tmp_path / "a.ticket").layers.items()
    }
    assert seeds == {"0.weight": 4, "2.weight": 0}


def test_looking_at_a_copy_does_not_change_it():
    def weights(look):
        model = iterand.prune_(nn.Linear(20, 20), 0.9, ranking="global")
        iterand.SparsitySchedule(model, "linear", steps=10)
        other = copy.deepcopy(model)
        iterand.randomize_(model, 0.5)  # nothing is pruned yet, so nothing is redrawn
        if look:
            other.state_dict()
        iterand.set_sparsity_(other, 0.9)
        iterand.randomize_(other, 0.5)
        return other.parametrizations.weight.original

    assert torch.equal(weights(False), weights(True))


class Student(nn.Module):
    """Runs its network with other scores first."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inputs, teacher):
        with torch.no_grad():
            wanted = torch.func.functional_call(self.net, teacher, (inputs,))
        return self.net(inputs), wanted


def test_other_scores_inside_a_pass_have_other_cuts():
    model, inputs = iterand.prune_(Student(), 0.5, ranking="global"), torch.randn(3, 8)
    scores = {name: score for name, score in model.net.named_parameters() if name.endswith("score")}
    teacher = {name: torch.rand_like(score) + 1 for name, score in scores.items()}
    for _ in range(4):
        found = model(inputs, teacher)[1]
        assert torch.equal(found, torch.func.functional_call(model.net, teacher, (inputs,)))
        for score in teacher.values():
            score.mul_(1.0)  # sooner or later it was written as often as that of the student


def test_a_hand_made_average(tmp_path):
    """Its draws are copied into the bytes of a copy, in which 300 rounds do not fit."""
    model = iterand.prune_(nn.Linear(16, 12), 0.6, weights="kaiming_uniform")
    average = copy.deepcopy(model)
    for _ in range(300):
        shake(model)
        iterand.randomize_(model, 0.3)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters()):
                ours.lerp_(theirs, 0.1)
            for ours, theirs in zip(average.buffers(), model.buffers()):
                ours.copy_(theirs)
    iterand.save_ticket(average, tmp_path / "a.ticket")
    images = torch.randn(8, 16)
    assert torch.equal(iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(16, 12))(images), average(images))
