import copy
import re
from itertools import cycle, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import iterand
from iterand import distributions
from iterand.distributions import Distribution
from iterand.errors import TicketError
from iterand.lab.networks import build_network, network_names
from iterand.ticket import draws, encode, read
from ticket_models import SEQUENCES, WORDS, Mixed, drawn_in_rounds, mixed, searched, stir_

WEIGHTS = ("kaiming_uniform", "signed_constant", "kaiming_normal", "uniform")
TERNARY = Distribution("ternary_for_tickets", lambda words: words[0] % 3 - 1, lambda fan: 0.1, support=(1, 0, -1))
ODD = Distribution("odd_for_tickets", lambda words: (words[0] >> 20) * 2 + 1, lambda fan: 1 / (3 * fan))


@pytest.fixture(autouse=True)
def own_distributions(monkeypatch):
    monkeypatch.setattr(distributions, "_REGISTRY", {**distributions._REGISTRY, TERNARY.name: TERNARY, ODD.name: ODD})


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def folded_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return iterand.fold_(copy.deepcopy(model)).state_dict()


@pytest.mark.parametrize(("weights", "ranking"), [*zip(WEIGHTS, cycle(["layer", "global"]))])
def test_every_kind_of_model_comes_back_bit_for_bit(example, tmp_path, weights, ranking):
    model = searched(example.build(), weights=weights, ranking=ranking, rank_by="magnitude")
    model(example.images)  # batch norm has seen something
    expected = model.eval()(example.images)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", example.build()).eval()
    assert torch.equal(plain(example.images), expected)
    assert same_bits(plain.state_dict(), folded_state(model))
    assert not any(torch.nn.utils.parametrize.is_parametrized(module) for module in plain.modules())


@pytest.mark.parametrize("weights", [*WEIGHTS, TERNARY.name, ODD.name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_distribution_in_every_type(tmp_path, weights, dtype):
    model = mixed(weights=weights).to(dtype)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", Mixed().to(dtype)).eval()
    assert torch.equal(plain(SEQUENCES.to(dtype), WORDS), model(SEQUENCES.to(dtype), WORDS))
    assert same_bits(plain.state_dict(), folded_state(model))


@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=4),
    st.sampled_from([*WEIGHTS, TERNARY.name, ODD.name]),
    st.sampled_from([0.0, 0.2, 0.5, 0.9]),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), max_size=5),
    st.integers(0, 2**63 - 1),
)
def test_random_models_distributions_sparsities_and_rounds(tmp_path_factory, sizes, weights, sparsity, rates, seed):
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))

    path = tmp_path_factory.getbasetemp() / "property.ticket"
    model = build()
    try:
        iterand.prune_(model, sparsity, weights=weights, seed=seed)
    except ValueError:  # a layer too small for this sparsity
        iterand.prune_(model, 0.0, weights=weights, seed=seed)
    for number, rate in enumerate(rates):
        stir_(model, number)
        iterand.randomize_(model, rate)
    iterand.save_ticket(model, path)
    assert same_bits(iterand.load_ticket(path, build()).state_dict(), folded_state(model))
    masks = {name: layer.mask for name, layer in iterand.masked_layers(model).items()}
    for name, layer in iterand.read_ticket(path).layers.items():
        assert layer.mask.equal(masks[name])
        found = layer.draws()
        if found is not None:
            assert found.tolist() == iterand.masked_layers(model)[name].draw[masks[name]].tolist()


@pytest.mark.parametrize("name", network_names())
def test_own_networks_are_built_from_the_recipe(tmp_path, name):
    options = {"name": name, "width_factor": 0.1}
    if "lstm" in name:
        options["vocabulary_size"] = 30
    model = iterand.prune_(build_network(**options), 0.5, weights="signed_constant").eval()
    iterand.save_ticket(model, tmp_path / "a.ticket", recipe={"network": options})
    torch.manual_seed(7)
    before = torch.get_rng_state()
    plain = iterand.load_ticket(tmp_path / "a.ticket")
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(plain.state_dict(), folded_state(model))
    assert not plain.training
    assert all(tensor.device.type == "cpu" for tensor in [*plain.parameters(), *plain.buffers()])
    assert all(parameter.requires_grad for parameter in plain.parameters())


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path):
    model = mixed()
    model.free.weight = nn.Parameter(torch.randn(4, 4))
    model.twin = nn.Linear(4, 4, bias=False)
    model.twin.weight = model.free.weight
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    assert ticket.header.aliases == {"decoder.weight": "embedding.weight", "twin.weight": "free.weight"}
    assert set(ticket.stored) == {"free.weight", "free.bias", "norm.running_mean", "norm.running_var", "steps", "flags"}
    target = Mixed()
    target.twin = nn.Linear(4, 4, bias=False)
    target.twin.weight = target.free.weight
    plain = iterand.load_ticket(tmp_path / "a.ticket", target)
    assert plain.decoder.weight is plain.embedding.weight
    assert plain.twin.weight is plain.free.weight
    assert torch.equal(plain.twin.weight, model.free.weight)


class Words(nn.Module):
    """An embedding and a layer that may have its weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_a_model_with_other_ties_is_refused(tmp_path):
    iterand.save_ticket(iterand.prune_(Words(tied=False), 0.5), tmp_path / "a.ticket")
    with pytest.raises(
        TicketError, match=r"'embedding.weight' and 'head.weight' are one tensor in Words, but two in it"
    ):
        iterand.load_ticket(tmp_path / "a.ticket", Words(tied=True))


def test_tied_weights_of_a_model_without_memory_stay_tied(tmp_path):
    iterand.save_ticket(iterand.prune_(Words(tied=True), 0.5), tmp_path / "a.ticket")
    with torch.device("meta"):
        model = iterand.load_ticket(tmp_path / "a.ticket", Words(tied=True))
    assert model.head.weight is model.embedding.weight
    assert same_bits(model.state_dict(), iterand.load_ticket(tmp_path / "a.ticket", Words(tied=True)).state_dict())


@pytest.mark.parametrize("weights", ["kaiming_uniform", "signed_constant"])
def test_defaults_of_torch_do_not_matter(tmp_path, weights):
    iterand.save_ticket(searched(nn.Linear(30, 30), weights=weights), tmp_path / "a.ticket")
    expected = iterand.read_ticket(tmp_path / "a.ticket").state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = iterand.read_ticket(tmp_path / "a.ticket").state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert same_bits(found, expected)


def test_a_module_used_under_two_names_comes_back(tmp_path):
    def build() -> nn.Module:
        shared = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return nn.ModuleDict({"first": shared, "second": shared})

    model = searched(build())
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", build()).state_dict(), folded_state(model))


def test_what_was_frozen_is_one_and_zero_and_what_is_left_out_stays(tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    target = Mixed()
    with torch.no_grad():
        target.norm.weight.fill_(5)
        target.convolution.bias.fill_(5)
        target.cache.fill_(5)
    plain = iterand.load_ticket(tmp_path / "a.ticket", target)
    assert plain.norm.weight.tolist() == [1, 1, 1, 1]
    assert plain.norm.bias.tolist() == [0, 0, 0, 0]
    assert plain.convolution.bias.tolist() == [0, 0, 0, 0]
    assert plain.norm.num_batches_tracked.item() == 17
    assert plain.steps.tolist() == [3, 1, 2]
    assert plain.flags.tolist() == [True, False, True]
    assert plain.cache.tolist() == [5, 5]


def test_kept_biases_and_norms_are_stored_as_they_are(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    iterand.prune_(model, 0.5, biases="keep", norms="keep")
    iterand.save_ticket(model, tmp_path / "a.ticket")
    fresh = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    plain = iterand.load_ticket(tmp_path / "a.ticket", fresh).state_dict()
    assert all(torch.equal(plain[name], state[name]) for name in state if name != "0.weight")


def test_dense_layers_and_emptied_ones(tmp_path):
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False), nn.Linear(40, 2, bias=False))
    iterand.prune_(model, 0.5, ranking="global", overrides={"2": "dense"})
    with torch.no_grad():
        model[0].parametrizations.weight[0].score.fill_(-9)  # nothing of it survives
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    assert [layer.header.kept for layer in ticket.layers.values()] == [0, 1600, 80]
    assert ticket.stream.data == b""
    fresh = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False), nn.Linear(40, 2, bias=False))
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", fresh).state_dict(), folded_state(model))


def test_a_bare_parameter_at_the_root(tmp_path):
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))

    model = iterand.prune_(Bare(), 0.4, include="weight")
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert list(iterand.read_ticket(tmp_path / "a.ticket").layers) == ["weight"]
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", Bare()).state_dict(), folded_state(model))


def test_a_part_pruned_by_itself_keeps_the_name_it_was_drawn_under(tmp_path):
    part = nn.Linear(8, 8)
    model = nn.Sequential(nn.ReLU(), iterand.prune_(part, 0.5))
    iterand.save_ticket(model, tmp_path / "a.ticket")
    layer = iterand.read_ticket(tmp_path / "a.ticket").layers["1.weight"]
    assert layer.header.settings.name == "weight"
    plain = iterand.load_ticket(tmp_path / "a.ticket", nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    assert same_bits(plain.state_dict(), folded_state(model))


def test_wrapped_models_are_opened(tmp_path, mlp):
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    model = searched(mlp.build())
    iterand.save_ticket(model, tmp_path / "plain.ticket")
    iterand.save_ticket(Wrapper(model), tmp_path / "wrapped.ticket")
    assert (tmp_path / "plain.ticket").read_bytes() == (tmp_path / "wrapped.ticket").read_bytes()
    target = Wrapper(mlp.build())
    assert iterand.load_ticket(tmp_path / "plain.ticket", target) is target
    assert same_bits(target._orig_mod.state_dict(), folded_state(model))


def test_saving_leaves_the_model_alone_and_gives_the_same_bytes_again(tmp_path):
    model = mixed(weights="signed_constant")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    iterand.save_ticket(model, tmp_path / "a.ticket")
    iterand.save_ticket(model, tmp_path / "b.ticket")
    assert (tmp_path / "a.ticket").read_bytes() == (tmp_path / "b.ticket").read_bytes()
    assert same_bits(model.state_dict(), before)


def test_channels_last_weights_are_read_in_the_order_of_their_indices(tmp_path, cnn):
    model = searched(cnn.build().to(memory_format=torch.channels_last))
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", cnn.build()).state_dict(), folded_state(model))


def test_half_stores_other_tensors_in_float16_but_none_that_overflows(tmp_path):
    model = mixed()
    with torch.no_grad():
        model.norm.running_mean.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        model.norm.running_var.copy_(torch.tensor([1e6, 1.0, 2.0, 3.0]))
    iterand.save_ticket(model, tmp_path / "a.ticket", half=True)
    plain = iterand.load_ticket(tmp_path / "a.ticket", Mixed())
    assert plain.norm.running_mean.dtype == torch.float32
    assert plain.norm.running_mean.tolist() == np.array([0.1, 0.2, 0.3, 0.4], np.float16).astype(np.float32).tolist()
    assert plain.norm.running_var.tolist() == [1e6, 1.0, 2.0, 3.0]
    assert plain.convolution.weight.equal(folded_state(model)["convolution.weight"])
    tensors = iterand.read_ticket(tmp_path / "a.ticket").header.tensors
    halved = {name for name, tensor in tensors.items() if (tensor.dtype, tensor.saved_as) == ("F32", "F16")}
    assert halved == {"free.weight", "free.bias", "norm.running_mean"}


def test_half_can_be_restricted_to_what_loses_nothing(tmp_path):
    model = mixed()
    odd = torch.tensor([-0.0, 2.0**-24, float("inf"), 65504.0])
    with torch.no_grad():
        model.norm.running_mean.copy_(odd)
        model.norm.running_var.copy_(torch.tensor([0.1, 1.0, 2.0, 3.0]))
    iterand.save_ticket(model, tmp_path / "a.ticket", half="exact")
    tensors = iterand.read_ticket(tmp_path / "a.ticket").header.tensors
    assert (tensors["norm.running_mean"].saved_as, tensors["norm.running_var"].saved_as) == ("F16", "F32")
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", Mixed()).state_dict(), folded_state(model))
    with torch.no_grad():
        model.norm.running_mean[0] = float("nan")
    iterand.save_ticket(model, tmp_path / "b.ticket", half="exact")
    assert iterand.read_ticket(tmp_path / "b.ticket").header.tensors["norm.running_mean"].saved_as == "F32"


def test_recipe_and_metrics_are_json(tmp_path):
    recipe = {"network": {"name": "conv6"}, "folder": tmp_path, "count": np.int64(3)}
    metrics = {"accuracy": torch.tensor(0.5), "loss": float("nan"), "steps": [1, 2]}
    iterand.save_ticket(mixed(), tmp_path / "a.ticket", recipe=recipe, metrics=metrics)
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    assert ticket.recipe == {"network": {"name": "conv6"}, "folder": str(tmp_path), "count": 3}
    assert ticket.metrics == {"accuracy": 0.5, "loss": None, "steps": [1, 2]}
    with pytest.raises(ValueError, match=r"metrics cannot be written as JSON: .*object"):
        iterand.save_ticket(mixed(), tmp_path / "b.ticket", metrics={"what": object()})
    for wrong in ([1, 2], 3):
        with pytest.raises(ValueError, match=r"metrics is .*; it must be a mapping"):
            iterand.save_ticket(mixed(), tmp_path / "b.ticket", metrics=wrong)
    with pytest.raises(ValueError, match="half is 'no'; it must be True, False or 'exact'"):
        iterand.save_ticket(mixed(), tmp_path / "b.ticket", half="no")


def test_the_settings_can_be_read(tmp_path):
    iterand.save_ticket(mixed(weights="signed_constant", seed=9, sparsity=0.25), tmp_path / "a.ticket")
    layer = iterand.read_ticket(tmp_path / "a.ticket").layers["convolution.weight"].header
    assert (layer.settings.seed, layer.settings.weight_distribution, layer.settings.fan_in) == (9, "signed_constant", 9)
    assert (layer.settings.sparsity, layer.settings.ranking, layer.settings.rank_by) == (0.25, "layer", "score")
    assert layer.history.runs == ((round(0.4 * 2**32), 6),)
    assert (layer.shape, layer.dtype, layer.kept, layer.rounds) == ((4, 3, 3), "F32", 27, 6)


def test_signs_or_draws_whichever_is_smaller(tmp_path, monkeypatch):
    def stored(rounds: int, rate: float) -> str:
        model = searched(nn.Linear(100, 100), rounds, rate, weights="signed_constant")
        iterand.save_ticket(model, tmp_path / "a.ticket")
        layer = iterand.read_ticket(tmp_path / "a.ticket").layers["weight"]
        assert same_bits(
            iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(100, 100)).state_dict(), folded_state(model)
        )
        return layer.header.stored

    assert stored(0, 1.0) == "round"  # never redrawn: the seed says it all
    assert stored(1, 0.01) == "first"  # hardly redrawn
    assert stored(6, 0.4) == "level"
    monkeypatch.setattr(encode, "_MAX_GENERATOR_CALLS", 1000)
    assert stored(1, 0.01) == "level"  # draws would be smaller, but take longer to find again


def test_places_where_coins_are_tossed_and_rounds_where_all_fall_or_they_are_too_many(tmp_path, monkeypatch):
    model = searched(nn.Linear(30, 30), rate=1.0)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert iterand.read_ticket(tmp_path / "a.ticket").layers["weight"].header.stored == "round"
    model = searched(nn.Linear(30, 30), rate=0.5)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert iterand.read_ticket(tmp_path / "a.ticket").layers["weight"].header.stored in ("first", "latest")
    monkeypatch.setattr(draws, "allowed_coins", lambda size: 10)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert iterand.read_ticket(tmp_path / "a.ticket").layers["weight"].header.stored == "round"
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(30, 30)).state_dict(), folded_state(model))


def test_as_many_draws_as_the_coder_can_tell_apart(tmp_path):
    model = drawn_in_rounds(1 << 16)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert len(iterand.read_ticket(tmp_path / "a.ticket").layers["weight"].header.counts) == 1 << 16
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", nn.Linear(256, 257)).state_dict(), folded_state(model))
    with pytest.raises(ValueError, match=r"'weight' holds 65537 different draws; a ticket holds 65536: randomize less"):
        iterand.save_ticket(drawn_in_rounds((1 << 16) + 1), tmp_path / "b.ticket")
    assert not (tmp_path / "b.ticket").exists()


@pytest.mark.parametrize("weights", ["kaiming_uniform", "signed_constant"])
def test_weights_edited_by_hand_are_refused_by_name(tmp_path, weights):
    model = mixed(weights=weights)
    layer = iterand.masked_layers(model)["embedding.weight"]
    with torch.no_grad():
        layer.weight.view(-1)[layer.mask.view(-1).nonzero()[3]] = 0.123
    with pytest.raises(ValueError, match=r"kept weights of 'embedding.weight'.*differs is 0.123, drawn was"):
        iterand.save_ticket(model, tmp_path / "a.ticket")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_message_tells_a_rounded_weight_from_the_drawn_one(tmp_path, dtype):
    model = iterand.prune_(nn.Linear(8, 8, dtype=dtype), 0.5)
    layer = iterand.masked_layers(model)["weight"]
    with torch.no_grad():
        layer.weight.copy_(torch.nextafter(layer.weight, torch.zeros_like(layer.weight)))
    with pytest.raises(ValueError, match=r"the first that differs is \S+, drawn was \S+\);") as caught:
        iterand.save_ticket(model, tmp_path / "a.ticket")
    held, drawn = re.findall(r"(?:is|was) (-?[\de.-]+)[,)]", str(caught.value))
    assert torch.tensor(float(held), dtype=dtype) != torch.tensor(float(drawn), dtype=dtype)


def test_pruned_weights_may_be_anything(tmp_path):
    model = mixed()
    expected = folded_state(model)
    with torch.no_grad():
        for layer in iterand.masked_layers(model).values():
            layer.weight[~layer.mask] = 3.0
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert same_bits(iterand.load_ticket(tmp_path / "a.ticket", Mixed()).state_dict(), expected)


def test_models_that_cannot_be_saved_say_why(tmp_path):
    with pytest.raises(ValueError, match="no masked layer"):
        iterand.save_ticket(nn.Linear(2, 2), tmp_path / "a.ticket")
    model = mixed()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'odd' is torch.complex128, which a ticket cannot hold"):
        iterand.save_ticket(model, tmp_path / "a.ticket")

    class Remembering(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(ValueError, match=r"'_extra_state' in the model's state is a dict"):
        iterand.save_ticket(iterand.prune_(Remembering(4, 4), 0.5), tmp_path / "a.ticket")
    model = mixed()
    with torch.no_grad():
        iterand.scores(model)[0].view(-1)[0] = float("nan")
    with pytest.raises(ValueError, match=r"'convolution.weight' contain NaN"):
        iterand.save_ticket(model, tmp_path / "a.ticket")


def test_a_masked_model_is_not_filled(tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    with pytest.raises(ValueError, match=r"is masked; load_ticket fills ordinary ones"):
        iterand.load_ticket(tmp_path / "a.ticket", mixed())


def test_a_distribution_that_is_gone_or_changed_is_named(tmp_path, monkeypatch):
    iterand.save_ticket(mixed(weights=ODD.name), tmp_path / "odd.ticket")
    iterand.save_ticket(searched(nn.Linear(90, 90), weights=TERNARY.name), tmp_path / "ternary.ticket")
    known = dict(distributions._REGISTRY)
    del known[ODD.name], known[TERNARY.name]
    monkeypatch.setattr(distributions, "_REGISTRY", known)
    with pytest.raises(TicketError, match=r"'convolution.weight': unknown distribution 'odd_for_tickets'"):
        iterand.load_ticket(tmp_path / "odd.ticket", Mixed())
    iterand.load_ticket(tmp_path / "ternary.ticket", nn.Linear(90, 90))  # its levels are in the file
    known[ODD.name] = Distribution(ODD.name, ODD.levels, lambda fan: 1 / (4 * fan))
    with pytest.raises(TicketError, match=r"of unit .*; the one registered here has"):
        iterand.load_ticket(tmp_path / "odd.ticket", Mixed())
    known[ODD.name] = Distribution(ODD.name, lambda words: (words[1] >> 20) * 2 + 1, ODD.unit)
    target = Mixed()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(TicketError, match="not the ones that were saved"):
        iterand.load_ticket(tmp_path / "odd.ticket", target)
    assert same_bits(target.state_dict(), before)


def test_the_writer_keeps_to_the_readers_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_ELEMENTS_ALLOWANCE", 10)
    monkeypatch.setattr(read, "_ELEMENTS_PER_BYTE", 0)
    with pytest.raises(TicketError, match=r"describes \d+ elements in \d+ bytes; the limit is 10"):
        iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    assert list(tmp_path.iterdir()) == []
