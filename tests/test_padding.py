"""The padding row of an embedding is zero, in every pass, after every redraw and in the ticket."""

import copy

import pytest
import torch
from torch import Tensor, nn

import iterand
from iterand import philox, randomization

WORDS = torch.tensor([[0, 3, 5, 1, 2], [3, 3, 9, 8, 7]])
PADDING = 3


class Reader(nn.Module):
    """Words, whose padding is a row in the middle; the embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=PADDING)
        self.middle = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 10)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.middle(self.embedding(words).sum(1)).relu())


def searched(**options: object) -> nn.Module:
    model = iterand.prune_(Reader(), **{"sparsity": 0.5, **options})
    optimizer = torch.optim.SGD(iterand.scores(model), lr=1.0, weight_decay=0.1)
    ways = {} if options.get("rank_by") else {"candidates": "negative", "redrawn_scores": "follow"}
    randomizer = iterand.IterativeRandomization(model, 1, 0.5, **ways)
    for _ in range(5):
        optimizer.zero_grad()
        model(WORDS).square().mean().backward()
        optimizer.step()
        randomizer.step()
        assert not model.embedding(torch.tensor(PADDING)).any()
        assert not iterand.masked_layers(model)["embedding.weight"].weight[PADDING].any()
    return model


@pytest.mark.parametrize("weights", ["signed_constant", "kaiming_uniform"])
@pytest.mark.parametrize("options", [{}, {"ranking": "global"}, {"sparsity": 0.0}, {"rank_by": "magnitude"}], ids=str)
def test_the_padding_row_stays_zero(weights, options, tmp_path):
    model = searched(weights=weights, **options)
    assert (model.embedding.weight[:PADDING] != 0).any()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    ticket = iterand.read_ticket(tmp_path / "a.ticket")
    assert not ticket.layers["embedding.weight"].mask[PADDING].any()
    loaded = iterand.load_ticket(tmp_path / "a.ticket", Reader())
    assert not loaded.embedding.weight[PADDING].any()
    assert torch.equal(loaded(WORDS), model(WORDS))
    kept = [layer.kept for layer in ticket.header.layers]
    assert [layer.kept for layer in iterand.summary(model).layers] == kept
    again = iterand.prune_(Reader(), **{"sparsity": 0.5, "weights": weights, **options})
    ticket.resume_(again)
    assert torch.equal(again(WORDS), model(WORDS))
    iterand.save_ticket(again, tmp_path / "b.ticket")
    assert [layer.kept for layer in iterand.read_ticket(tmp_path / "b.ticket").header.layers] == kept
    assert torch.equal(iterand.fold_(copy.deepcopy(model))(WORDS), model(WORDS))


def test_weights_outside_the_row_are_those_without_padding():
    padded = iterand.prune_(nn.Embedding(10, 8, padding_idx=PADDING), 0.5)
    plain = iterand.prune_(nn.Embedding(10, 8), 0.5)
    iterand.randomize_(padded, 0.5)
    iterand.randomize_(plain, 0.5)
    ours, theirs = iterand.masked_layers(padded)["weight"], iterand.masked_layers(plain)["weight"]
    others = [row for row in range(10) if row != PADDING]
    assert torch.equal(ours.weight[others], theirs.weight[others])
    assert torch.equal(ours.draw, theirs.draw)
    assert torch.equal(ours.mask, theirs.mask)
    assert theirs.weight[PADDING].all()
    assert padded.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(ours.parametrization.get_extra_state(), theirs.parametrization.get_extra_state())


def test_kernels_leave_the_row_at_zero():
    pytest.importorskip("triton", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the kernels are interpreted
    ours, theirs = (iterand.prune_(Reader(), 0.6, seed=2) for _ in range(2))
    theirs.to(device)
    threshold = philox.coin_threshold(0.5)
    for _ in range(3):
        iterand.randomize_(ours, 0.5, candidates="negative", redrawn_scores="follow")
        layers = list(iterand.masked_layers(theirs).values())
        cuts = randomization.find_cuts_on_device(layers)
        randomization.redraw_on_device_(layers, cuts, threshold, negative=True, follow=True)
        for layer, other in zip(layers, iterand.masked_layers(ours).values()):
            layer.parametrization.add_round(threshold)
            for tensor in ("weight", "score", "draw"):
                assert torch.equal(getattr(layer, tensor).cpu(), getattr(other, tensor))
    assert not theirs.embedding.weight[PADDING].any()


def test_a_checkpoint_is_resumed_with_its_padding():
    model = searched()
    other = iterand.prune_(Reader(), 0.5, seed=9)
    with pytest.warns(UserWarning, match="the state has seed=0"):
        other.load_state_dict(model.state_dict())
    assert torch.equal(other(WORDS), model(WORDS))
    iterand.randomize_(other, 1.0)
    assert not other.embedding.weight[PADDING].any()


def test_a_bag_of_embeddings():
    bag = iterand.prune_(nn.EmbeddingBag(10, 8, padding_idx=-1), 0.2)
    iterand.randomize_(bag, 1.0)
    assert not bag.weight[9].any()
    assert bag.weight[8].any()


def test_a_model_of_padding_alone(tmp_path):
    model = iterand.prune_(nn.Embedding(1, 4, padding_idx=0), 0.5, weights="signed_constant")
    iterand.save_ticket(model, tmp_path / "a.ticket")
    assert iterand.load_ticket(tmp_path / "a.ticket", nn.Embedding(1, 4)).weight.tolist() == [[0.0] * 4]
