import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import iterand
from iterand.errors import TicketError
from iterand.ticket import encode
from ticket_models import SEQUENCES, WORDS, Mixed, mixed, stir_

LABELS = torch.tensor([0, 1, 2, 3, 4])


@pytest.mark.parametrize("weights", ["kaiming_uniform", "signed_constant"])
@pytest.mark.parametrize(
    "options",
    [{}, {"ranking": "global"}, {"ranking": "global", "floor": 0.2}, {"rank_by": "magnitude"}],
    ids=["layer", "global", "floor", "magnitude"],
)
def test_the_search_goes_on_from_the_ticket(tmp_path, weights, options):
    model = mixed(weights=weights, **options)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    again = iterand.prune_(Mixed(), 0.5, exclude="free", weights=weights, **options).eval()
    iterand.read_ticket(tmp_path / "a.ticket").resume_(again)
    assert torch.equal(again(SEQUENCES, WORDS), model(SEQUENCES, WORDS))
    for name, layer in iterand.masked_layers(model).items():
        other = iterand.masked_layers(again)[name]
        assert other.mask.equal(layer.mask)
        assert other.weight[layer.mask].equal(layer.weight[layer.mask])
        assert other.parametrization.history.runs == layer.parametrization.history.runs
        assert other.weight.equal(other.parametrization.weight())  # draws and weights agree, pruned ones too
    stir_(again, 11)
    iterand.randomize_(again, 0.5)
    iterand.save_ticket(again, tmp_path / "b.ticket")
    plain = iterand.load_ticket(tmp_path / "b.ticket", Mixed()).eval()
    assert torch.equal(plain(SEQUENCES, WORDS), again(SEQUENCES, WORDS))


def test_a_copy_of_a_resumed_model_goes_on_as_the_model_does(tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    resumed = iterand.prune_(Mixed(), 0.5, exclude="free").eval()
    iterand.read_ticket(tmp_path / "a.ticket").resume_(resumed)
    copied = copy.deepcopy(resumed)
    for model in (resumed, copied):
        stir_(model, 11)
        iterand.randomize_(model, 0.5)
    for layer, other in zip(iterand.masked_layers(resumed).values(), iterand.masked_layers(copied).values()):
        assert other.parametrization.history.runs == layer.parametrization.history.runs
        assert other.weight.equal(layer.weight)


def test_levels_stored_instead_of_draws_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_expected_bits", lambda state, draw: {"first": float("inf")})
    model = mixed(weights="signed_constant")
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    assert {layer.header.stored for layer in ticket.layers.values()} == {"level"}
    again = iterand.prune_(Mixed(), 0.5, exclude="free", weights="signed_constant").eval()
    ticket.resume_(again)
    assert torch.equal(again(SEQUENCES, WORDS), model(SEQUENCES, WORDS))
    assert all(layer.draw.max() <= 6 for layer in iterand.masked_layers(again).values())


def test_the_search_may_go_on_sparser(tmp_path):
    model = mixed()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    sparser = iterand.prune_(Mixed(), 0.75, exclude="free")
    iterand.read_ticket(tmp_path / "a.ticket").resume_(sparser)
    for name, layer in iterand.masked_layers(model).items():
        kept = iterand.masked_layers(sparser)[name].mask
        assert kept.sum() == layer.mask.numel() / 4
        assert not (kept & ~layer.mask).any()


@pytest.mark.parametrize("ranking", ["layer", "global"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_the_search_goes_on_in_the_middle_of_a_schedule(tmp_path, ranking, scheduled):
    def build(sparsity=0.8):
        return iterand.prune_(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)), sparsity, ranking=ranking)

    model = build()
    schedule = iterand.SparsitySchedule(model, "linear", steps=10)
    for _ in range(5):
        schedule.step()
    with pytest.warns(UserWarning, match="save after the last step of the model's SparsitySchedule"):
        iterand.save_ticket(model, tmp_path / "a.ticket")
    again = build()
    if scheduled:
        iterand.SparsitySchedule(again, "linear", steps=10)  # which keeps everything until its first step
    iterand.read_ticket(tmp_path / "a.ticket").resume_(again)
    for layer, other in zip(iterand.masked_layers(model).values(), iterand.masked_layers(again).values()):
        assert torch.equal(layer.mask, other.mask)
    sparser = build(0.9)
    iterand.read_ticket(tmp_path / "a.ticket").resume_(sparser)
    assert iterand.summary(sparser).kept == iterand.summary(build(0.9)).kept


def test_the_search_does_not_go_on_denser(tmp_path):
    iterand.save_ticket(iterand.prune_(nn.Linear(8, 8), 0.5), tmp_path / "a.ticket")
    with pytest.raises(TicketError, match=r"'weight' has sparsity 0\.5 in the ticket and 0\.3 in the model"):
        iterand.read_ticket(tmp_path / "a.ticket").resume_(iterand.prune_(nn.Linear(8, 8), 0.3))


def lopsided() -> nn.Sequential:
    """Two layers of 100 weights; ranked together, the first keeps all of its own."""
    model = iterand.prune_(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), 0.5, ranking="global")
    with torch.no_grad():
        iterand.scores(model)[0].add_(100)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"keeps 0 weights of '1\.weight', and the model 50, .*; prune_ it with ranking='global', as it was"),
        ({"ranking": "global", "floor": 0.2}, r"keeps 0 weights of '1\.weight', and the model 20, .* as it was"),
        ({"ranking": "global", "overrides": {"1": 0.9}}, r"keeps 0 weights of '1\.weight', and the model 10,"),
    ],
)
def test_a_model_that_would_put_pruned_weights_back_in_is_refused(tmp_path, options, message):
    iterand.save_ticket(lopsided(), tmp_path / "a.ticket")
    model = iterand.prune_(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), 0.5, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TicketError, match=message):
        iterand.read_ticket(tmp_path / "a.ticket").resume_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_ranking_over_the_network_that_keeps_more_is_refused(tmp_path):
    """Each layer of 7 keeps 7 − round(3.5) = 3, both together 14 − round(7.0) = 7."""

    def two(ranking: str) -> nn.Module:
        return iterand.prune_(nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 7)), 0.5, ranking=ranking)

    iterand.save_ticket(two("layer"), tmp_path / "a.ticket")
    with pytest.raises(
        TicketError, match=r"keeps 6 weights of all that is ranked together with '0\.weight', and .* 7,"
    ):
        iterand.read_ticket(tmp_path / "a.ticket").resume_(two("global"))


@pytest.mark.parametrize(("before", "after"), [("layer", "global"), ("global", "layer")])
def test_the_ranking_may_change_where_no_pruned_weight_comes_back(tmp_path, before, after):
    model = iterand.prune_(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), 0.5, ranking=before)
    iterand.save_ticket(model, tmp_path / "a.ticket")
    sparser = iterand.prune_(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), 0.8, ranking=after)
    iterand.read_ticket(tmp_path / "a.ticket").resume_(sparser)
    for name, layer in iterand.masked_layers(sparser).items():
        assert layer.mask.any()
        assert not (layer.mask & ~iterand.masked_layers(model)[name].mask).any()


def test_a_ticket_of_a_part_of_a_global_ranking_is_not_resumed_in_it(tmp_path):
    model = lopsided()
    iterand.save_ticket(model[1], tmp_path / "a.ticket")
    with pytest.raises(ValueError, match=r"'weight' is ranked together with '0\.weight'"):
        iterand.read_ticket(tmp_path / "a.ticket").resume_(model[1])


@pytest.mark.parametrize("magnitude", [0.0, 1.0], ids=["zeros", "ones"])
@pytest.mark.parametrize("rank_by", ["score", "magnitude"])
@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_equal_scores_do_not_change_the_mask(tmp_path, ranking, rank_by, magnitude):
    def pruned():
        base = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        for parameter in base.parameters():
            nn.init.constant_(parameter, magnitude)
        return iterand.prune_(base, 0.5, weights="existing", scores="magnitude", ranking=ranking, rank_by=rank_by)

    model = pruned()
    with torch.no_grad():
        for number, score in enumerate(iterand.scores(model)):
            score.copy_(torch.randn(score.shape, generator=torch.Generator().manual_seed(number)))
    iterand.save_ticket(model, tmp_path / "a.ticket")
    again = pruned()
    iterand.read_ticket(tmp_path / "a.ticket").resume_(again)
    for name, layer in iterand.masked_layers(model).items():
        assert iterand.masked_layers(again)[name].mask.equal(layer.mask)


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_equal_scores_do_not_exchange_weights_for_padding(tmp_path, ranking):
    def pruned():
        base = nn.Sequential(nn.Embedding(12, 16, padding_idx=3), nn.Linear(16, 16))
        return iterand.prune_(base, 0.5, weights="signed_constant", ranking=ranking)

    model, again = pruned(), pruned()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    for score in iterand.scores(again):
        nn.init.zeros_(score)
    iterand.read_ticket(tmp_path / "a.ticket").resume_(again)
    for name, layer in iterand.masked_layers(model).items():
        clear = layer.parametrization.clear_padding_  # whose weights are zero whether they are kept or not
        assert clear(iterand.masked_layers(again)[name].mask).equal(clear(layer.mask))


def test_scores_are_the_initial_ones_in_another_order(tmp_path):
    model = mixed()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    again = iterand.prune_(Mixed(), 0.5, exclude="free")
    before = [score.detach().flatten().sort().values for score in iterand.scores(again)]
    iterand.read_ticket(tmp_path / "a.ticket").resume_(again)
    for score, initial in zip(iterand.scores(again), before):
        assert score.detach().flatten().sort().values.equal(initial)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "'convolution.weight' has seed 0 in the ticket and 1 in the model"),
        (
            {"weights": "signed_constant"},
            "has weight_distribution 'kaiming_uniform' in the ticket and 'signed_constant'",
        ),
        ({"exclude": ["free", "convolution"]}, "'convolution.weight' is masked in only one"),
    ],
)
def test_a_model_drawn_otherwise_is_refused_and_left_alone(tmp_path, options, message):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    model = iterand.prune_(Mixed(), 0.5, **{"exclude": "free", **options})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TicketError, match=message):
        iterand.read_ticket(tmp_path / "a.ticket").resume_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="no masked layer"):
        iterand.read_ticket(tmp_path / "a.ticket").resume_(Mixed())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_kept_weights_are_fine_tuned_and_zeros_stay(tmp_path, optimizer):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    model = iterand.load_ticket(tmp_path / "a.ticket", Mixed())
    before = model.convolution.weight.detach().clone()
    handles = ticket.hold_zeros_(model)
    trainer = optimizer(model.parameters(), lr=0.05, weight_decay=0.1)

    def step() -> float:
        trainer.zero_grad()
        loss = F.cross_entropy(model(SEQUENCES, WORDS), LABELS)
        loss.backward()
        trainer.step()
        return loss.item()

    first = step()
    for _ in range(30):
        last = step()
    assert last < 0.7 * first
    mask = ticket.layers["convolution.weight"].mask
    assert (model.convolution.weight[~mask] == 0).all()
    assert (model.convolution.weight[mask] != before[mask]).all()
    assert (model.decoder.weight[~ticket.layers["embedding.weight"].mask] == 0).all()
    for handle in handles:
        handle.remove()
    step()
    assert (model.convolution.weight[~mask] != 0).any()


def test_zeros_of_an_embedding_with_sparse_gradients_stay(tmp_path):
    iterand.save_ticket(iterand.prune_(nn.Embedding(20, 4), 0.5), tmp_path / "a.ticket")
    model = iterand.load_ticket(tmp_path / "a.ticket", nn.Embedding(20, 4, sparse=True))
    before, kept = model.weight.detach().clone(), iterand.read_ticket(tmp_path / "a.ticket").layers["weight"].mask
    iterand.read_ticket(tmp_path / "a.ticket").hold_zeros_(model)
    model(torch.tensor([3, 7, 3])).sum().backward()
    assert model.weight.grad.is_sparse
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    read = torch.zeros(20, dtype=torch.bool).index_fill(0, torch.tensor([3, 7]), True)[:, None]
    assert torch.equal(model.weight != before, kept & read)


def test_a_loaded_network_can_be_pruned_anew(tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    plain = iterand.load_ticket(tmp_path / "a.ticket", Mixed())
    iterand.prune_(plain, 0.8, seed=5)
    iterand.save_ticket(plain, tmp_path / "b.ticket")
    assert iterand.read_ticket(tmp_path / "b.ticket").layers["convolution.weight"].header.settings.seed == 5


def test_holding_another_model_is_refused(tmp_path):
    iterand.save_ticket(mixed(), tmp_path / "a.ticket")
    with pytest.raises(TicketError, match=r"'convolution.weight', which Linear does not have"):
        iterand.read_ticket(tmp_path / "a.ticket").hold_zeros_(nn.Linear(2, 2))
    with pytest.raises(TicketError, match="of Mixed is not zero where it prunes; fill it with load_ticket first"):
        iterand.read_ticket(tmp_path / "a.ticket").hold_zeros_(Mixed())
    with pytest.raises(ValueError, match="the model is masked; hold_zeros_ is for ordinary ones"):
        iterand.read_ticket(tmp_path / "a.ticket").hold_zeros_(mixed())
