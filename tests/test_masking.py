"""Every kind of layer through ``prune_`` and back through ``fold_``; tied tensors, biases and norms, nesting."""

import copy
import pickle
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import iterand
import reference
from iterand.surgery import unwrap

# torch says so of its own accord, once, the first time such a layer runs.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

ONES = torch.ones


def anatomy(module: nn.Module) -> list[Any]:
    """Everything about a module but the values of its parameters."""
    return [
        [(name, parameter.shape, parameter.requires_grad) for name, parameter in module.named_parameters()],
        [(type(part), getattr(part, "affine", None)) for part in module.modules()],
        [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()],
        list(module.state_dict()),
        [sorted(vars(part)) for part in module.modules()],
    ]


def first(output: Any) -> Tensor:
    """The first tensor of what a module gives."""
    return output if isinstance(output, Tensor) else first(output[0])


WORDS = torch.tensor([[1, 2, 4], [3, 1, 0]])
SEQUENCE = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
LAYERS: dict[str, tuple[nn.Module, tuple[Tensor, ...], list[str]]] = {
    "linear": (nn.Linear(8, 4), (SEQUENCE,), ["weight"]),
    "linear without bias": (nn.Linear(8, 4, bias=False), (SEQUENCE,), ["weight"]),
    "bilinear": (nn.Bilinear(8, 8, 3), (SEQUENCE, SEQUENCE), ["weight"]),
    "conv1d": (nn.Conv1d(4, 6, 3), (ONES(2, 4, 9),), ["weight"]),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (ONES(2, 4, 9, 9),), ["weight"]),
    "grouped conv2d": (nn.Conv2d(4, 6, 3, groups=2), (ONES(2, 4, 9, 9),), ["weight"]),
    "conv3d": (nn.Conv3d(4, 6, 2), (ONES(2, 4, 5, 5, 5),), ["weight"]),
    "transposed conv1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (ONES(2, 4, 5),), ["weight"]),
    "transposed conv2d": (nn.ConvTranspose2d(4, 6, 3, groups=2), (ONES(2, 4, 5, 5),), ["weight"]),
    "transposed conv3d": (nn.ConvTranspose3d(4, 6, 2), (ONES(2, 4, 3, 3, 3),), ["weight"]),
    "embedding": (nn.Embedding(10, 6), (WORDS,), ["weight"]),
    "sparse embedding": (nn.Embedding(10, 6, sparse=True), (WORDS,), ["weight"]),
    "embedding with a norm": (nn.Embedding(10, 6, max_norm=0.5), (WORDS,), ["weight"]),
    "embedding bag": (nn.EmbeddingBag(10, 6), (WORDS,), ["weight"]),
    "lstm": (nn.LSTM(8, 5), (SEQUENCE,), ["weight_ih_l0", "weight_hh_l0"]),
    "deep lstm": (
        nn.LSTM(8, 5, num_layers=2, bidirectional=True, proj_size=2, batch_first=True),
        (SEQUENCE,),
        [f"weight_{kind}_l{n}{way}" for n in (0, 1) for way in ("", "_reverse") for kind in ("ih", "hh", "hr")],
    ),
    "gru": (nn.GRU(8, 5, bias=False), (SEQUENCE,), ["weight_ih_l0", "weight_hh_l0"]),
    "rnn": (nn.RNN(8, 5, nonlinearity="relu"), (SEQUENCE,), ["weight_ih_l0", "weight_hh_l0"]),
    "lstm cell": (nn.LSTMCell(8, 5), (SEQUENCE[0],), ["weight_ih", "weight_hh"]),
    "gru cell": (nn.GRUCell(8, 5), (SEQUENCE[0],), ["weight_ih", "weight_hh"]),
    "rnn cell": (nn.RNNCell(8, 5), (SEQUENCE[0],), ["weight_ih", "weight_hh"]),
    "attention": (nn.MultiheadAttention(8, 2), (SEQUENCE,) * 3, ["in_proj_weight", "out_proj.weight"]),
    "cross attention": (
        nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
        (SEQUENCE, SEQUENCE[..., :6], SEQUENCE[..., :4]),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
    "transformer decoder": (
        nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0),
        (SEQUENCE, SEQUENCE),
        [f"{kind}.{name}" for kind in ("self_attn", "multihead_attn") for name in ("in_proj_weight", "out_proj.weight")]
        + ["linear1.weight", "linear2.weight"],
    ),
}


@pytest.fixture(params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    module, inputs, names = LAYERS[request.param]
    return copy.deepcopy(module), inputs, names


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_weights_and_scores_are_functions_of_seed_name_and_index(layer, ranking):
    module, _, names = layer
    iterand.prune_(module, 0.6, weights="uniform", scores="uniform", seed=7, ranking=ranking)
    masked = iterand.masked_layers(module)
    assert sorted(masked) == sorted(names)
    for name, tensor in masked.items():
        for stream, flat in enumerate((tensor.weight.flatten(), tensor.score.flatten())):
            expected = [reference.uniform(reference.words(i, 0, 7, name, stream)[0], 1.0) for i in range(len(flat))]
            assert flat.tolist() == expected
        assert not tensor.draw.any()


def test_exactly_the_top_scores_are_kept(layer):
    module, _, _ = layer
    iterand.prune_(module, 0.6)
    for tensor in iterand.masked_layers(module).values():
        scores = tensor.score.flatten().tolist()
        kept = reference.kept_by_sort(scores, len(scores) - round(0.6 * len(scores)))
        assert set(tensor.mask.flatten().nonzero().flatten().tolist()) == kept
        for owner, attribute in tensor.owners:
            assert torch.equal(getattr(owner, attribute), torch.where(tensor.mask, tensor.weight, 0.0))


def test_only_scores_are_trained(layer):
    module, inputs, _ = layer
    iterand.prune_(module, 0.6)
    first(module(*inputs)).square().sum().backward()
    with_gradient = {id(parameter) for parameter in module.parameters() if parameter.grad is not None}
    assert with_gradient == set(map(id, iterand.scores(module)))
    for parameter in module.parameters():
        assert parameter.requires_grad == (id(parameter) in with_gradient)


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_folding_gives_an_ordinary_module_back(layer, ranking):
    module, inputs, _ = layer
    before = anatomy(module)
    iterand.prune_(module, 0.6, ranking=ranking)
    iterand.randomize_(module, 0.5)
    expected = first(module(*inputs))
    assert iterand.fold_(module) is module
    assert anatomy(module) == before
    assert torch.equal(first(module(*inputs)), expected)
    assert torch.equal(first(pickle.loads(pickle.dumps(module))(*inputs)), expected)
    assert iterand.masked_layers(module) == {}


def test_a_folded_module_can_be_pruned_again(layer):
    module, inputs, _ = layer
    other = copy.deepcopy(module)
    iterand.prune_(iterand.fold_(iterand.prune_(module, 0.6)), 0.3, seed=5)
    iterand.prune_(other, 0.3, seed=5)
    assert torch.equal(first(module(*inputs)), first(other(*inputs)))


# --- Tied tensors ---------------------------------------------------------------------------------------------------


def tied_pair(**options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    return iterand.prune_(model, 0.5, **options)


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_a_tied_tensor_is_masked_once(ranking):
    model = tied_pair(ranking=ranking)
    (tensor,) = iterand.masked_layers(model).values()
    assert tensor.name == tensor.parametrization.settings.name == "0.weight"
    assert [(type(owner).__bases__[0], name) for owner, name in tensor.owners] == [(nn.Linear, "weight")] * 2
    assert len(iterand.scores(model)) == 1
    assert int(tensor.mask.sum()) == 32
    assert torch.equal(model[0].weight, model[2].weight)


def test_both_uses_of_a_tied_tensor_add_to_its_gradient():
    model = tied_pair()
    plain = iterand.fold_(copy.deepcopy(model))
    plain(SEQUENCE).square().sum().backward()
    model(SEQUENCE).square().sum().backward()
    (tensor,) = iterand.masked_layers(model).values()
    torch.testing.assert_close(tensor.score.grad, tensor.weight * plain[0].weight.grad)


def test_a_tied_tensor_stays_tied():
    model = tied_pair()
    iterand.randomize_(model, 1.0)
    expected = model(SEQUENCE)
    other = tied_pair(seed=5)
    with pytest.warns(UserWarning, match="the state has seed="):
        other.load_state_dict(model.state_dict())
    assert torch.equal(other(SEQUENCE), expected)
    for pruned in (copy.deepcopy(model), other):
        assert torch.equal(iterand.fold_(pruned)(SEQUENCE), expected)
        assert pruned[0].weight is pruned[2].weight


def test_a_tied_tensor_is_itself_whoever_names_it():
    for include in ("0", "2", "*"):
        (tensor,) = iterand.masked_layers(tied_pair(include=include)).values()
        assert tensor.parametrization.settings.name == tensor.name == "0.weight"


def test_owners_that_ask_for_different_things_are_refused():
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' are one tied tensor, .* 0\.5 and 0\.7"):
        tied_pair(overrides={"0": 0.5, "2": 0.7})
    with pytest.raises(ValueError, match="are one tied tensor, and only one of them is excluded"):
        tied_pair(exclude="2")


def test_recurrent_weights_can_be_tied():
    within, first_one, second_one = nn.RNN(8, 8), nn.LSTM(8, 4), nn.LSTM(8, 4)
    within.weight_hh_l0 = within.weight_ih_l0
    second_one.weight_ih_l0 = first_one.weight_ih_l0
    model = iterand.prune_(nn.ModuleList([within, first_one, second_one]), 0.5)
    assert list(iterand.masked_layers(model)) == ["0.weight_ih_l0"] + [
        f"{n}.{name}" for n, name in ((1, "weight_ih_l0"), (1, "weight_hh_l0"), (2, "weight_hh_l0"))
    ]
    expected = [first(part(SEQUENCE)) for part in model]
    iterand.fold_(model)
    assert all(torch.equal(first(part(SEQUENCE)), value) for part, value in zip(model, expected))
    assert within.weight_hh_l0 is within.weight_ih_l0
    assert second_one.weight_ih_l0 is first_one.weight_ih_l0


def test_one_module_in_two_places():
    shared = nn.Linear(8, 8)
    model = iterand.prune_(nn.Sequential(shared, nn.ReLU(), shared), 0.5, ranking="global")
    assert list(iterand.masked_layers(model)) == ["0.weight"]
    expected = model(SEQUENCE)
    assert torch.equal(iterand.fold_(model)(SEQUENCE), expected)
    assert model[0] is model[2]


@pytest.mark.parametrize("pattern", ["block.*", "block.0", "block.0.weight", "first"])
def test_a_module_is_itself_under_each_of_its_names(pattern):
    def build():
        model = nn.Sequential()
        model.first = nn.Linear(8, 8)
        model.block = nn.Sequential(model.first, nn.ReLU())
        model.last = nn.Linear(8, 8)
        return model

    model = build()
    before = model.first.weight.detach().clone()
    iterand.prune_(model, 0.5, exclude=pattern)
    assert list(iterand.masked_layers(model)) == ["last.weight"]
    assert torch.equal(model.first.weight, before)
    assert list(iterand.masked_layers(iterand.prune_(build(), 0.5, include=pattern))) == ["first.weight"]
    kept = iterand.masked_layers(iterand.prune_(build(), 0.5, overrides={pattern: "dense"}))
    assert [int(layer.mask.sum()) for layer in kept.values()] == [64, 32]


# --- Nesting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_parts_pruned_one_by_one_work_together(ranking):
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    iterand.prune_(model[0], 0.5, seed=1, ranking=ranking)
    iterand.prune_(model[1], 0.75, seed=2, ranking=ranking)
    assert list(iterand.masked_layers(model)) == ["0.0.weight", "0.1.weight", "1.weight"]
    model(SEQUENCE).sum().backward()
    assert all(score.grad is not None for score in iterand.scores(model))
    iterand.randomize_(model, 1.0)
    kept = [int(tensor.mask.sum()) for tensor in iterand.masked_layers(model).values()]
    assert (kept[0] + kept[1], kept[2]) == (64, 16)
    expected = model(SEQUENCE)
    iterand.fold_(model[1])
    assert torch.equal(model(SEQUENCE), expected)
    iterand.fold_(model)
    assert torch.equal(model(SEQUENCE), expected)
    assert all(len(part._forward_hooks) == 0 for part in model.modules())


def test_folding_a_part_leaves_the_rest_masked():
    model = iterand.prune_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 0.5, ranking="global")
    expected = model(SEQUENCE)
    iterand.fold_(model[0])
    assert list(iterand.masked_layers(model)) == ["1.weight"]
    assert torch.equal(model(SEQUENCE), expected)
    model(SEQUENCE).sum().backward()


def test_a_parametrization_on_top_of_a_mask_is_not_folded_away():
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model = iterand.prune_(nn.Sequential(nn.Linear(8, 8)), 0.5)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Double())
    expected = model(SEQUENCE)
    with pytest.raises(ValueError, match=r"'0\.weight' has another parametrization on top of its mask"):
        iterand.fold_(model)
    assert torch.equal(model(SEQUENCE), expected)


def test_wrappers_are_looked_through():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrapped = torch.compile(model, backend="eager")
    assert unwrap(wrapped) is model
    assert iterand.prune_(wrapped, 0.5) is wrapped
    assert list(iterand.masked_layers(wrapped)) == ["0.weight", "1.weight"]
    assert list(iterand.masked_layers(iterand.fold_(wrapped))) == []


def expanded():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.randn(4, 1).expand(4, 4))
    return model


def in_one_memory():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return model


def in_one_storage():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data[4:])
    return model


@torch.inference_mode()
def for_inference():
    return nn.Linear(4, 4)


class Registered(nn.Linear):
    """Wants every class below it to say its name."""

    def __init_subclass__(cls, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), Registered(4, 4)), "no subclass of Registered can be made"),
        (expanded, "'1.weight' is expanded, so its weights share memory"),
        (in_one_memory, "'0.weight' and '1.weight' are two parameters with one memory"),
        (in_one_storage, "'0.weight' and '1.weight' are two parameters with one memory"),
        (for_inference, "'weight' was made under torch.inference_mode"),
        (lambda: nn.Linear(4, 4).to(torch.float8_e4m3fn), "'weight' is torch.float8_e4m3fn, which a ticket cannot"),
        (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))), "made from another module; prune_ that one"),
    ],
    ids=["no subclass", "expanded", "in one memory", "in one storage", "inference", "float8", "traced"],
)
def test_a_model_that_cannot_be_masked_is_refused_and_left_as_it_was(made, sentence):
    model = made()
    before = type(model)
    with pytest.raises(ValueError, match=sentence):
        iterand.prune_(model, 0.5)
    assert iterand.masked_layers(model) == {}
    assert type(model) is before


@pytest.mark.parametrize("container", [nn.Sequential(nn.Linear(4, 4)), nn.ModuleList(), nn.ModuleDict()])
def test_a_parameter_of_a_container_is_refused(container):
    """A parametrization is a module of its owner, and a container runs, or counts, all of these."""
    container.register_parameter("position", nn.Parameter(torch.ones(3, 4)))
    model = nn.ModuleDict({"part": container, "head": nn.Linear(4, 2)})
    sentence = f"'part.position' is a parameter of a {type(container).__name__}, which would take its mask for one of"
    with pytest.raises(ValueError, match=sentence):
        iterand.prune_(model, 0.5, include="*")
    assert iterand.masked_layers(model) == {}
    iterand.prune_(model, 0.5, include="*", exclude="part.position")
    assert iterand.masked_layers(model)


@torch.inference_mode()
def test_pruning_in_inference_mode_is_refused():
    with pytest.raises(ValueError, match=r"made under torch\.inference_mode cannot be trained; call prune_ outside"):
        iterand.prune_(nn.Linear(4, 4), 0.5)


@pytest.mark.parametrize("setting", [{"exclude": [0]}, {"include": 3}, {"exclude": None}])
def test_patterns_that_are_none_are_refused(setting):
    with pytest.raises(ValueError, match="it must be a glob pattern over names"):
        iterand.prune_(nn.Linear(4, 4), 0.5, **setting)


def test_brackets_in_names_can_be_written():
    model = nn.Sequential(OrderedDict({"a[0]": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))
    with pytest.raises(ValueError, match=re.escape("write 'a[[]0]' for this name")):
        iterand.prune_(model, 0.5, exclude="a[0]")
    assert list(iterand.masked_layers(iterand.prune_(model, 0.5, exclude="a[[]0]"))) == ["b.weight"]


def test_numbers_of_numpy_are_numbers():
    given = {"seed": 3, "floor": 0.25}
    plain = iterand.prune_(nn.Linear(4, 4), 0.5, ranking="global", **given)
    numpy = {"seed": np.int64(3), "floor": np.float32(0.25)}
    model = iterand.prune_(nn.Linear(4, 4), np.float32(0.5), ranking="global", **numpy)
    assert model.state_dict().keys() == plain.state_dict().keys()  # which names the settings as JSON
    assert torch.equal(model.weight, plain.weight)


def test_inside_data_parallel_a_model_is_the_same():
    plain, wrapped = iterand.prune_(nn.Linear(4, 4), 0.5), iterand.prune_(nn.DataParallel(nn.Linear(4, 4)), 0.5)
    assert torch.equal(wrapped.module.weight, plain.weight)
    assert list(iterand.masked_layers(wrapped)) == ["weight"]


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_copies_of_data_parallel(ranking):
    layer = iterand.prune_(nn.Linear(4, 4), 0.5, ranking=ranking)
    copied = {module: module._replicate_for_data_parallel() for module in layer.modules()}  # as on several GPUs
    for module, replica in copied.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            replica._former_parameters = {}
            setattr(replica, name, tensor if tensor is None else tensor.view_as(tensor))
        for name, child in module._modules.items():
            setattr(replica, name, copied[child])
    if ranking == "layer":
        assert torch.equal(copied[layer].weight, layer.weight)
    else:
        with pytest.raises(ValueError, match=r"'weight' is ranked over .*; use DistributedDataParallel"):
            copied[layer].weight  # noqa: B018


class Forwarding(nn.Module):
    """A wrapper that answers for what it wraps, as those of peft do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, inputs):
        return self.inner(inputs)


def test_a_wrapper_that_answers_for_what_it_wraps_has_nothing_of_its_own(tmp_path):
    def build():
        return nn.Sequential(Forwarding(nn.Linear(4, 4)), Forwarding(nn.BatchNorm1d(4)), Forwarding(nn.LayerNorm(4)))

    model = iterand.prune_(build(), 0.5).eval()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    assert torch.equal(iterand.load_ticket(tmp_path / "a.ticket", build()).eval()(inputs), expected)
    assert torch.equal(iterand.fold_(model)(inputs), expected)
    assert set(model.state_dict()) == set(build().state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_wrapper_of_a_compiled_part_is_a_model_of_its_own():
    model = nn.Sequential(Forwarding(torch.compile(nn.Linear(4, 4), backend="eager")), nn.Linear(4, 4))
    assert len(iterand.masked_layers(iterand.prune_(Forwarding(model), 0.5))) == 2
    compiled = iterand.prune_(Forwarding(torch.compile(nn.Linear(4, 4), backend="eager")), 0.5)
    assert list(iterand.masked_layers(compiled)) == ["inner._orig_mod.weight"]


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match=r"model is 5; it must be a torch.nn.Module"):
        iterand.prune_(5, sparsity=0.5)

    for ask in (iterand.scores, iterand.masked_layers, iterand.summary, iterand.randomize_):
        with pytest.raises(ValueError, match=r"model is None; it must be a torch.nn.Module"):
            ask(None)


def test_what_is_no_model_is_shown_in_short():
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    refused = [
        lambda: iterand.prune_(layer.state_dict(), 0.5),
        lambda: iterand.scores(layer.state_dict()),
        lambda: iterand.TaskSet(layer.state_dict()),
        lambda: iterand.make_step(layer.state_dict(), optimizer, nn.functional.mse_loss),
        lambda: iterand.make_step(layer, list(layer.parameters()), nn.functional.mse_loss),
        lambda: iterand.prune_(layer, 0.5, exclude=[nn.Sequential(*[nn.Linear(1, 1) for _ in range(99)])]),
        lambda: iterand.prune_(layer, torch.rand(64, 64)),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"^(model|base|optimizer|exclude|sparsity) is ") as caught:
            call()
        assert len(str(caught.value)) < 500


def test_an_override_may_name_a_layer_of_a_mapping():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = iterand.masked_layers(iterand.prune_(model, {"*": 0.5, "0": 0.3}, overrides={"0": "dense"}))
    assert layers["0.weight"].mask.all()
    assert int(layers["1.weight"].mask.sum()) == 32


def test_a_mapping_may_keep_a_layer_dense():
    def layers(*arguments, **options):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return iterand.masked_layers(iterand.prune_(model, *arguments, **options))

    mapped, overridden = layers({"*": 0.5, "0": "dense"}), layers(0.5, overrides={"0": "dense"})
    assert mapped["0.weight"].mask.all()
    for name, layer in mapped.items():
        assert layer.parametrization.settings == overridden[name].parametrization.settings
        assert torch.equal(layer.weight * layer.mask, overridden[name].weight * overridden[name].mask)


def test_what_is_excluded_may_not_share_memory_with_what_is_masked():
    model = in_one_memory()
    before = model[1].weight.clone()
    with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' are two parameters with one memory"):
        iterand.prune_(model, 0.5, exclude="1")
    assert torch.equal(model[1].weight, before)


@pytest.mark.parametrize("options", [{"exclude": "0"}, {"trainable": "0"}])
def test_existing_weights_beside_a_layer_without_a_shape(options):
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet; run one forward pass before pruning"):
        iterand.prune_(model, 0.5, weights="existing", **options)
    assert not iterand.masked_layers(model)
    assert all(parameter.requires_grad for parameter in model[1].parameters())


def test_a_frozen_weight_is_masked_unless_it_is_excluded():
    def frozen():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        model[0].requires_grad_(False)
        return model

    masked = iterand.prune_(frozen(), 0.5)
    assert [score.requires_grad for score in iterand.scores(masked)] == [True, True]
    kept = frozen()
    before = kept[0].weight.clone()
    iterand.prune_(kept, 0.5, exclude="0.*")
    assert torch.equal(kept[0].weight, before)
    assert not kept[0].weight.requires_grad
    assert list(iterand.masked_layers(kept)) == ["2.weight"]
