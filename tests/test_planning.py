"""Which parameters ``prune_`` masks, by pattern; and what it refuses, leaving the model as it was."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import iterand
import reference

INPUTS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


def snapshot(model: nn.Module) -> list[Any]:
    """Everything ``prune_`` could change."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items()}
    return [
        {name: (tensor.shape, tensor.dtype, tensor.numpy().tobytes()) for name, tensor in tensors.items()},
        [type(module) for module in model.modules()],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        [getattr(module, "affine", None) for module in model.modules()],
    ]


# --- Bare parameters ------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.token = nn.Parameter(torch.ones(8))
        self.table = nn.ParameterList([nn.Parameter(torch.ones(8, 8)) for _ in range(2)])
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.ones(8, 8))})
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs * self.token
        for table in self.table:
            hidden = hidden @ table
        return self.linear(hidden @ self.named["out"]) * self.scale


def test_bare_parameters_are_left_alone_unless_named():
    with pytest.warns(iterand.UnmaskedWarning):
        model = iterand.prune_(Bare(), 0.5)
    assert list(iterand.masked_layers(model)) == ["linear.weight"]
    assert model.scale.item() == 2.0
    assert model.token.requires_grad


@pytest.mark.parametrize(
    ("include", "masked"),
    [
        ("*", ["scale", "token", "table.0", "table.1", "named.out", "linear.weight"]),
        (["token", "linear"], ["token", "linear.weight"]),
        ("table", ["table.0", "table.1"]),
        ("table.?", ["table.0", "table.1"]),
        ("named.out", ["named.out"]),
        ("scale", ["scale"]),
    ],
)
def test_bare_parameters_by_name(include, masked):
    model = iterand.prune_(Bare(), 0.4, include=include)
    assert sorted(iterand.masked_layers(model)) == sorted(masked)
    expected = model(INPUTS)
    expected.sum().backward()
    assert all(score.grad is not None for score in iterand.scores(model))
    iterand.randomize_(model, 1.0)
    folded = iterand.fold_(copy.deepcopy(model))
    assert torch.equal(folded(INPUTS), model(INPUTS))
    assert list(folded.state_dict()) == list(Bare().state_dict())


def test_patterns_may_come_from_a_generator():
    masked = iterand.masked_layers(iterand.prune_(Bare(), 0.5, include=(name for name in ("token", "scale"))))
    assert sorted(masked) == ["scale", "token"]


def test_an_override_adds_a_bare_parameter():
    with pytest.warns(iterand.UnmaskedWarning, match=r"193 parameters in table\.0 \(8×8\)"):
        model = iterand.prune_(Bare(), 0.5, overrides={"token": 0.25})
    masked = iterand.masked_layers(model)
    assert {name: int(tensor.mask.sum()) for name, tensor in masked.items()} == {"token": 6, "linear.weight": 32}


def test_own_parameters_of_a_subclass_are_bare():
    class Gained(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.gain = nn.Parameter(torch.full((8,), 3.0))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.gain

    with pytest.warns(iterand.UnmaskedWarning, match=r"8 parameters in 0\.gain \(8\)"):
        model = iterand.prune_(nn.Sequential(Gained()), 0.5)
    assert list(iterand.masked_layers(model)) == ["0.weight"]
    assert model[0].gain.tolist() == [3.0] * 8
    single = Gained()
    single.gain = nn.Parameter(torch.tensor(3.0))
    with pytest.warns(iterand.UnmaskedWarning, match=r"has 1 parameter in gain \(1\)"):
        iterand.prune_(single, 0.5)
    assert list(iterand.masked_layers(iterand.prune_(nn.Sequential(Gained()), 0.5, include="*"))) == [
        "0.weight",
        "0.gain",
    ]


@pytest.mark.parametrize("norms", ["fixed", "shifted"])
def test_a_bias_under_another_name_is_no_bare_parameter(norms):
    """As in language models of Hugging Face, whose head has the bias of its last layer as its own, too."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(4))
            self.token = nn.Parameter(torch.ones(8))
            self.norm = nn.LayerNorm(8)
            self.decoder = nn.Linear(8, 4)
            self.decoder.bias = self.bias

        def forward(self, inputs: Tensor) -> Tensor:
            return self.decoder(self.norm(inputs + self.token))

    shift = ["norm.bias"] if norms == "shifted" else []
    model = iterand.prune_(Head(), 0.5, include="*", norms=norms)
    assert list(iterand.masked_layers(model)) == ["token", *shift, "decoder.weight"]
    assert model.bias is model.decoder.bias
    assert model.bias.tolist() == [0.0] * 4
    assert not model.bias.requires_grad
    with pytest.raises(ValueError, match="include pattern 'bias' matches nothing that can be masked"):
        iterand.prune_(Head(), 0.5, include="bias")


# --- What is left alone is said -------------------------------------------------------------------------------------


def test_a_warning_names_what_is_neither_masked_nor_frozen():
    with pytest.warns(iterand.UnmaskedWarning) as caught:
        iterand.prune_(Bare(), 0.5)
    (warning,) = caught
    assert str(warning.message) == (
        "Bare has 201 parameters in table.0 (8×8), table.1 (8×8), named.out (8×8), token (8), scale (1), neither "
        "masked nor frozen: kept as is, and trainable (25.0 % of the parameters in matrices are masked); mask them "
        "too with include='*' or overrides=, or name them in exclude="
    )
    assert warning.filename == __file__


def test_the_largest_are_named_and_the_others_counted():
    model = nn.Sequential(nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.ones(n)) for n in range(1, 8)]))
    with pytest.warns(iterand.UnmaskedWarning, match=r"28 parameters in 1\.6 \(7\), .* 1\.2 \(3\), 2 more, neither"):
        iterand.prune_(model, 0.5)


def test_strict_refuses_what_would_be_left_alone():
    model = Bare()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"strict is True, but Bare has 201 .*; mask them too with include='\*' or"):
        iterand.prune_(model, 0.5, strict=True)
    assert snapshot(model) == before
    iterand.prune_(model, 0.5, strict=True, include="*")
    assert all(parameter.requires_grad for parameter in iterand.scores(model))


@pytest.mark.parametrize(
    "options",
    [
        {"include": "linear"},
        {"exclude": ["scale", "token", "table*", "named*"]},
        {"exclude": ["scale", "token", "table*"], "overrides": {"named*": 0.5}},
        {"include": "*"},
    ],
    ids=str,
)
def test_what_was_asked_for_needs_no_warning(options):
    iterand.prune_(Bare(), 0.5, strict=True, **options)


def test_biases_and_norms_that_are_kept_need_no_warning():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4))
    iterand.prune_(model, 0.5, strict=True, biases="keep", norms="keep", exclude="2.weight")
    assert len(list(model.parameters())) == 8  # seven and a score


def test_a_bias_that_has_a_second_name_is_not_left_alone():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(4))
            self.linear = nn.Linear(4, 4)
            self.linear.bias = self.bias

    model = iterand.prune_(Named(), 0.5, strict=True)
    assert not model.bias.any()
    assert iterand.summary(model).left_alone == 0


def test_strict_is_true_or_false():
    with pytest.raises(ValueError, match="strict is 'yes'; it must be True or False"):
        iterand.prune_(nn.Linear(3, 3), 0.5, strict="yes")


def test_frozen_parameters_are_not_called_trainable():
    model = nn.Sequential(nn.Linear(4, 4), nn.ParameterList([nn.Parameter(torch.ones(3, 3), requires_grad=False)]))
    with pytest.warns(iterand.UnmaskedWarning, match=r"1\.0 \(3×3\), .*: kept as is \(64\.0 % of"):
        iterand.prune_(model, 0.5)


def test_a_ticket_warns_of_what_it_stores_in_full(tmp_path):
    with pytest.warns(iterand.UnmaskedWarning):
        model = iterand.prune_(Bare(), 0.5)
    with pytest.warns(
        iterand.UnmaskedWarning, match=r"a\.ticket stores 201 parameters in table\.0 .* in full"
    ) as caught:
        iterand.save_ticket(model, tmp_path / "a.ticket")
    assert caught[0].filename == __file__
    plain = iterand.load_ticket(tmp_path / "a.ticket", Bare())
    assert torch.equal(plain(INPUTS), model(INPUTS))
    iterand.save_ticket(iterand.prune_(Bare(), 0.5, include="linear"), tmp_path / "b.ticket")
    folded = iterand.prune_(iterand.fold_(model), 0.5, include="linear")
    iterand.save_ticket(folded, tmp_path / "c.ticket")


# --- Patterns -------------------------------------------------------------------------------------------------------


def three() -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10))


def kept(model: nn.Module) -> dict[str, int]:
    return {name: int(tensor.mask.sum()) for name, tensor in iterand.masked_layers(model).items()}


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_patterns_choose_and_overrides_set_the_sparsity(ranking):
    options = {"ranking": ranking, "exclude": "0", "overrides": {"*": 0.9, "2.weight": "dense"}}
    assert kept(iterand.prune_(three(), 0.6, **options)) == {"1.weight": 10, "2.weight": 100}
    assert kept(iterand.prune_(three(), 0.6, include=["[12].*"], ranking="layer")) == {"1.weight": 40, "2.weight": 40}
    found = kept(iterand.prune_(three(), {"*.weight": 0.2, "0": 0.1}))
    assert found == {"0.weight": 90, "1.weight": 80, "2.weight": 80}


def test_a_pattern_may_name_what_has_an_override():
    found = kept(iterand.prune_(three(), {"0": 0.1, "*.weight": 0.2}, overrides={"0": 0.5}))
    assert found == {"0.weight": 50, "1.weight": 80, "2.weight": 80}


@pytest.mark.parametrize(
    ("sparsity", "overrides", "argument"),
    [({"0": 0.1, "*.weight": 0.2}, None, "sparsity"), (0.5, {"0": "dense", "*.weight": 0.2}, "overrides")],
)
def test_a_pattern_that_decides_nothing_is_refused(sparsity, overrides, argument):
    model = three()
    before = snapshot(model)
    sentence = (
        rf"{argument} pattern '0' has no effect, since '\*.weight' names more .*; put '0' after it, or leave it out"
    )
    with pytest.raises(ValueError, match=sentence):
        iterand.prune_(model, sparsity, overrides=overrides)
    assert snapshot(model) == before
    default = {"*": 0.9, "0": 0.1, "1": 0.2, "2": 0.3}  # of which nothing is left here
    assert kept(iterand.prune_(three(), default)) == {"0.weight": 90, "1.weight": 80, "2.weight": 70}
    with pytest.raises(ValueError, match=r"says nothing of '2\.weight'; add it, or begin with"):
        iterand.prune_(model, {"0": 0.1, "1": 0.2})


class Holding(nn.Module):
    """Has its weight a second time, where no mask reaches it."""

    def __init__(self, hold) -> None:
        super().__init__()
        self.encoder, self.other = nn.Linear(4, 8), nn.Linear(4, 8)
        self.held = hold(self.encoder.weight)


@pytest.mark.parametrize(
    "hold",
    [
        lambda weight: [weight],
        lambda weight: {"tied": ({1: weight},)},
        lambda weight: weight.t,
        lambda weight: functools.partial(torch.add, weight),
    ],
    ids=["list", "nested", "method", "partial"],
)
def test_a_parameter_that_is_held_outside_of_modules_is_refused(hold):
    model = Holding(hold)
    before = snapshot(model)
    sentence = "'held' holds the parameter 'encoder.weight' outside of torch's modules, where it would stay without a"
    with pytest.raises(ValueError, match=sentence):
        iterand.prune_(model, 0.5)
    assert snapshot(model) == before
    assert list(iterand.masked_layers(iterand.prune_(model, 0.5, exclude="encoder"))) == ["other.weight"]


def test_an_object_that_answers_every_name_holds_nothing():
    class Lazy:
        def __getattr__(self, name):
            return self

        def __call__(self):
            return self

    model = Holding(lambda weight: Lazy())
    assert "encoder.weight" in iterand.masked_layers(iterand.prune_(model, 0.5))


def test_layers_outside_a_global_ranking_take_nothing_from_it():
    model = iterand.prune_(three(), 0.8, ranking="global", overrides={"1": 0.5, "2": "dense"})
    assert kept(model) == {"0.weight": 20, "1.weight": 50, "2.weight": 100}
    with torch.no_grad():
        iterand.masked_layers(model)["1.weight"].score.add_(100)
    assert kept(model)["0.weight"] == 20


def test_dense_weights_are_random_and_never_redrawn():
    model = iterand.prune_(three(), 0.5, overrides={"0": "dense"}, weights="uniform")
    before = model[0].weight.clone()
    iterand.randomize_(model, 1.0)
    assert torch.equal(model[0].weight, before)
    assert before[0, 0] == reference.uniform(reference.words(0, 0, 0, "0.weight")[0], 1.0)


def test_what_is_excluded_is_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    nn.init.constant_(model[1].weight, 5.0)
    before = copy.deepcopy(model)
    iterand.prune_(model, 0.5, exclude=["0", "1", "2.bias"])
    assert list(iterand.masked_layers(model)) == ["2.weight"]
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.bias"):
        parameter = model.get_parameter(name)
        assert torch.equal(parameter, before.get_parameter(name)), name
        assert parameter.requires_grad, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.5}, "sparsity is 1.5"),
        ({"sparsity": -0.1}, "sparsity is -0.1"),
        ({"sparsity": "0.5"}, "sparsity is '0.5'"),
        ({"sparsity": 1.0}, r"sparsity 1 leaves none of the 100 weights of '0\.weight'"),
        ({"sparsity": 0.996}, "leaves none"),
        ({"sparsity": 1.0, "ranking": "global"}, "leaves 0 of 300 weights"),
        ({"sparsity": {"0": 0.5}}, r"says nothing of '1\.weight'"),
        ({"sparsity": {"*": 0.5, "7": 0.5}}, "sparsity pattern '7' matches nothing"),
        ({"sparsity": {"*": 2}}, r"sparsity\['\*'\] is 2"),
        ({"sparsity": {5: 0.5}}, r"sparsity is \{5: 0\.5\}; it must be a mapping from glob patterns"),
        (
            {"sparsity": {"*": 0.5}, "ranking": "global"},
            "ranking is 'global', but a sparsity mapping gives every layer",
        ),
        (
            {"sparsity": {"*": 0.5}, "allocation": "erk"},
            "allocation is 'erk', but a sparsity mapping gives every layer",
        ),
        ({"sparsity": {"*": 0.5}, "floor": 0.2}, r"floor is 0\.2, but a sparsity mapping .*; leave floor out, or"),
        ({"sparsity": {"*": 0.5}, "ranking": "global", "floor": 0.2}, "but a sparsity mapping"),
        ({"weights": "kaiming"}, "unknown distribution 'kaiming'"),
        ({"scores": "kaimin_normal"}, "did you mean 'kaiming_normal'"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1 << 63}, "seed is"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"ranking": "globl"}, "ranking is 'globl'; it must be one of layer, global"),
        ({"rank_by": "size"}, "rank_by is 'size'"),
        ({"allocation": "foo"}, "allocation is 'foo'; it must be one of uniform, erk"),
        ({"allocation": "foo", "ranking": "global"}, "allocation is 'foo'"),
        ({"allocation": "erk", "ranking": "global"}, "allocation is 'erk', which needs ranking='layer'"),
        ({"sparsity": 1.0, "ranking": "global"}, "so nothing to search; lower it"),
        ({"allocation": "foo", "sparsity": {"*": 0.5}}, "allocation is 'foo'"),
        ({"biases": "train"}, "biases is 'train'"),
        ({"norms": "free"}, "norms is 'free'"),
        ({"ranking": "global", "floor": 0.6}, "leaves 150 of 300 weights, and floor= asks for 180"),
        ({"ranking": "global", "floor": -0.1}, "floor is -0.1"),
        ({"ranking": "global", "floor": 1.5}, "floor is 1.5"),
        ({"floor": 7.0}, "floor is 7.0"),
        ({"include": "conv*"}, r"include pattern 'conv\*' matches nothing that can be masked"),
        ({"include": "0.wieght"}, r"did you mean '0\.weight'"),
        ({"exclude": "3"}, "exclude pattern '3' matches nothing"),
        ({"overrides": {"nothing": 0.5}}, "overrides pattern 'nothing' matches nothing"),
        ({"overrides": {"0": 1.0}}, r"leaves none of the 100 weights of '0\.weight'"),
        ({"overrides": {"0": "sparse"}}, r"overrides\['0'\] is 'sparse'"),
        ({"overrides": [("0", 0.1)]}, r"overrides is \[\('0', 0\.1\)\]; it must be a mapping from glob patterns"),
        ({"overrides": {5: 0.1}}, r"overrides is \{5: 0\.1\}; it must be a mapping from glob patterns"),
        (
            {"overrides": {"0": 0.9}, "exclude": "0"},
            "overrides pattern '0' names only what exclude= or trainable= leaves",
        ),
        ({"overrides": {"0": "dense", "1": 0.9}, "exclude": ["2", "[01].weight"]}, "overrides pattern '0' names only"),
        ({"sparsity": 5, "ranking": "global", "overrides": {"*": 0.9}}, "sparsity is 5"),
        ({"include": "0.bias"}, "matches nothing that can be masked"),
        ({"exclude": "*"}, "nothing to mask"),
    ],
)
def test_a_model_that_is_refused_is_left_as_it_was(options, message):
    model = three()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        iterand.prune_(model, **{"sparsity": 0.5, **options})
    assert snapshot(model) == before


def test_a_distribution_that_fails_leaves_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr("iterand.distributions._REGISTRY", dict(iterand.distributions._REGISTRY))
    iterand.register_distribution(iterand.Distribution("halves", lambda words: words[0] / 2, lambda fan_in: 1.0))
    for option in ("weights", "scores"):
        model = three()
        before = snapshot(model)
        with pytest.raises(ValueError, match="must be whole numbers"):
            iterand.prune_(model, 0.5, **{option: "halves"})
        assert snapshot(model) == before


def test_pruning_twice_is_refused():
    model = iterand.prune_(three(), 0.5)
    with pytest.raises(ValueError, match=r"'0\.weight' is masked already; fold_ the model first"):
        iterand.prune_(model, 0.5)
    with pytest.raises(ValueError, match=r"'1\.0\.weight' is masked already"):
        iterand.prune_(nn.Sequential(nn.Linear(10, 10), model), 0.5)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential(nn.BatchNorm1d(3)), Bare().table])
def test_a_model_without_weights_is_refused(model):
    with pytest.raises(ValueError, match="has nothing to mask"):
        iterand.prune_(model, 0.5)


@pytest.mark.parametrize("function", [iterand.scores, iterand.fold_, iterand.randomize_])
def test_a_model_that_is_not_pruned_has_no_masks(function):
    with pytest.raises(ValueError, match="Sequential has no masked layer; call prune_ on it first"):
        function(three())


def test_lazy_empty_and_complex_weights_are_refused():
    lazy = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with pytest.raises(ValueError, match=r"'1\.weight' has no shape yet; run one forward pass before pruning"):
        iterand.prune_(lazy, 0.5)
    assert all(parameter.requires_grad for parameter in lazy.parameters())
    lazy(INPUTS)
    assert len(iterand.masked_layers(iterand.prune_(lazy, 0.5))) == 2
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64, and only real floating-point .*; exclude it$"):
        iterand.prune_(nn.Linear(4, 4, dtype=torch.complex64), 0.5)
    empty = nn.Linear(4, 4)
    empty.weight = nn.Parameter(torch.empty(0, 4))
    with pytest.raises(ValueError, match="is empty"):
        iterand.prune_(empty, 0.5)


def test_a_weight_that_something_else_computes():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"'0\.weight' is computed from other tensors; undo that first, or exclude"):
        iterand.prune_(model, 0.5)
    assert list(iterand.masked_layers(iterand.prune_(copy.deepcopy(model), 0.5, exclude="0*"))) == ["1.weight"]
    assert list(iterand.masked_layers(iterand.prune_(model, 0.5, include="1"))) == ["1.weight"]


class Named(nn.Module):
    """A model with something of its own under the name that torch.nn.utils.parametrize uses."""

    def __init__(self, named: Any) -> None:
        super().__init__()
        self.first, self.parametrizations = nn.Linear(8, 8), named

    def forward(self, inputs: Tensor) -> Tensor:
        (last,) = [module for module in self.parametrizations.modules() if isinstance(module, nn.Linear)]
        return last(self.first(inputs))


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_scripted_part_is_left_alone_and_never_masked():
    def build():
        return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 4))

    with pytest.warns(iterand.UnmaskedWarning, match=r"0\.weight \(4×4\)"):
        assert list(iterand.masked_layers(iterand.prune_(build(), 0.5))) == ["1.weight"]
    with pytest.raises(ValueError, match=r"'0\.weight' is in a scripted module"):
        iterand.prune_(build(), 0.5, include="*")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda layer: layer, "parametrizations.weight"),
        (nn.Sequential, "parametrizations.0.weight"),
        (lambda layer: nn.ModuleDict({"weight": layer}), "parametrizations.weight.weight"),
    ],
)
def test_a_submodule_may_be_called_parametrizations(wrap, name, nested, tmp_path):
    def build() -> nn.Module:
        model = Named(wrap(nn.Linear(8, 8)))
        return nn.Sequential(model) if nested else model

    model = iterand.prune_(build(), 0.5, ranking="global")
    prefix = "0." if nested else ""
    assert list(iterand.masked_layers(model)) == [f"{prefix}first.weight", prefix + name]
    model(INPUTS).sum().backward()
    assert all(score.grad is not None for score in iterand.scores(model))
    iterand.save_ticket(model, tmp_path / "a.ticket")
    expected = model(INPUTS)
    assert torch.equal(iterand.load_ticket(tmp_path / "a.ticket", build())(INPUTS), expected)
    assert torch.equal(iterand.fold_(model)(INPUTS), expected)
    assert type(model) is type(build())


@pytest.mark.parametrize("named", [nn.Linear(8, 8), nn.ModuleDict({"bias": nn.Linear(8, 8)}), ["a"], 3, None])
def test_a_masked_module_may_have_nothing_called_parametrizations(named):
    """torch would replace it, or add its own to it."""

    class Taken(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Taken(8, 8))
    model[1].parametrizations = named
    before = snapshot(model)
    sentence = r"'1\.weight' cannot be masked: its Taken has something of its own called 'parametrizations'"
    with pytest.raises(ValueError, match=sentence):
        iterand.prune_(model, 0.5)
    assert snapshot(model) == before
    assert model[1].parametrizations is named
    iterand.prune_(model, 0.5, exclude="1.*")
    assert list(iterand.masked_layers(model)) == ["0.weight"]
    assert list(iterand.masked_layers(iterand.fold_(model))) == []
    assert model[1].parametrizations is named


def test_a_model_wrapped_for_many_processes_is_refused(tmp_path):
    """The wrapper fixed which gradients it exchanges: the scores would not be among them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = iterand.prune_(three(), 0.5, ranking="global")
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(torch.ones(2, 10)).sum().backward()
        assert all(score.grad is not None for score in iterand.scores(wrapped))
        with pytest.raises(ValueError, match="DistributedDataParallel already; prune_ it first, then wrap it"):
            iterand.prune_(nn.parallel.DistributedDataParallel(three()), 0.5)
        with pytest.raises(ValueError, match=r"the scores of '0\.weight' are spread over several processes \(FSDP\)"):
            iterand.scores(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
    finally:
        torch.distributed.destroy_process_group()


def test_scores_that_were_flattened_are_refused():
    """As FullyShardedDataParallel flattens them."""
    model = iterand.prune_(three(), 0.5)
    layer = next(iter(iterand.masked_layers(model).values()))
    layer.score.data = layer.score.data.flatten()
    for use in (iterand.scores, iterand.IterativeRandomization, iterand.summary):
        with pytest.raises(ValueError, match=r"spread over several processes \(FSDP\)"):
            use(model)
