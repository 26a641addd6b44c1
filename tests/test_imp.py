"""Iterative magnitude pruning: what is pruned, what is rewound, and what the loop makes of it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from iterand.errors import RecipeError
from iterand.lab.training import recipe_file
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.methods import IterativeMagnitudePruning, pruned_count, round_sparsity
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import run

CPU = torch.device("cpu")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(1, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 3)

    def forward(self, images):
        return self.head(F.relu(self.norm(self.convolution(images))).flatten(1))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 1, 8, 8, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def step(model, optimizer, batch):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def plain_imp(sparsity, rounds, epochs, data):
    """The method written out: a mask a weight, the global order by a sort, a fresh optimizer each time."""
    model = Network()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    masks = {name: torch.ones_like(start[name]) for name in ("convolution.weight", "head.weight")}
    total = sum(mask.numel() for mask in masks.values())
    for phase in range(rounds + 1):
        if phase:
            left = [
                (abs(float(model.state_dict()[name].flatten()[i])), name, i)
                for name, mask in masks.items()
                for i in range(mask.numel())
                if mask.flatten()[i]
            ]
            keep = total - round((1 - (1 - sparsity) ** (phase / rounds)) * total)
            for _, name, i in sorted(left)[: len(left) - keep]:
                masks[name].view(-1)[i] = 0
        state = {name: value * masks.get(name, 1) for name, value in start.items()}
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(epochs):
            for batch in data:
                step(model, optimizer, batch)
                with torch.no_grad():
                    for name, mask in masks.items():
                        model.get_parameter(name).mul_(mask)
    return model, masks


@pytest.mark.parametrize(("sparsity", "rounds"), [(0.9, 3), (0.5, 1)])
def test_it_is_train_prune_rewind(sparsity, rounds):
    data, epochs = batches(3), 2
    expected, masks = plain_imp(sparsity, rounds, epochs, data)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruning = IterativeMagnitudePruning(model, sparsity, rounds, epochs)
    for epoch in range(epochs * (rounds + 1)):
        for batch in data:
            step(model, optimizer, batch)
            pruning.constrain()
        pruning.begin_epoch(epoch + 1, optimizer)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    for name, mask in masks.items():
        assert torch.equal(model.get_buffer(f"{name}_pruned"), mask == 0)
    assert pruned_count(model) == round(sparsity * (4 * 9 + 3 * 4 * 36))


def test_every_round_leaves_the_same_share():
    assert [round_sparsity(0.875, number, 3) for number in (1, 2, 3)] == pytest.approx([0.5, 0.75, 0.875])
    assert round_sparsity(0.3, 3, 3) == 0.3


def test_pruned_weights_never_come_back_and_stay_at_zero():
    model, data = Network(), batches(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-2)
    pruning = IterativeMagnitudePruning(model, 0.9, 3, 1)
    before = torch.zeros(0)
    for epoch in range(4):
        for batch in data:
            step(model, optimizer, batch)
            pruning.constrain()
            pruned = model.get_buffer("head.weight_pruned")
            assert bool((model.head.weight[pruned] == 0).all())
        pruning.begin_epoch(epoch + 1, optimizer)
        now = model.get_buffer("head.weight_pruned").clone()
        assert before.numel() == 0 or bool((now >= before).all())
        before = now


def test_rewinding_restores_everything_and_forgets_the_momentum():
    model = Network()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruning = IterativeMagnitudePruning(model, 0.5, 2, 1)
    for batch in batches(2):
        step(model, optimizer, batch)
    pruning.begin_epoch(1, optimizer)
    for name, value in start.items():
        pruned = dict(model.named_buffers()).get(f"{name}_pruned", torch.zeros_like(value, dtype=torch.bool))
        assert torch.equal(model.state_dict()[name], value.masked_fill(pruned, 0))
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values())


def test_an_optimizer_without_momentum_is_no_problem():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruning = IterativeMagnitudePruning(model, 0.5, 1, 1)
    step(model, optimizer, batches(1)[0])
    assert optimizer.state[model.head.weight] == {}  # looked at, as a checkpoint does
    pruning.begin_epoch(1, optimizer)
    assert pruned_count(model) == (36 + 432) / 2


def test_a_sparsity_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="sparsity 1 leaves none of the 468 weights"):
        IterativeMagnitudePruning(Network(), 1.0, 3, 1)


def recipe(*settings):
    base = ["method.name=imp", "epochs=8", "width_factor=0.25", "batch_size=300", "learning_rate.initial=0.1"]
    return recipe_file.override(Recipe(name="imp"), [*base, "sparsity=0.8", *settings])


def test_a_run_restarts_its_learning_rate_and_ends_at_its_sparsity(tmp_path):
    record = run(recipe(), RunFolder(tmp_path), device=CPU)
    assert [line["learning_rate"] for line in record["metrics"]] == pytest.approx([0.1, 0.05] * 4)
    result = record["result"]
    weights = 4 * 9 + 4 * 4 * 9 + 8 * 4 * 9 + 8 * 8 * 9 + 10 * 32
    assert result["weights"] == weights
    assert result["kept"] == weights - round(0.8 * weights)
    assert "ticket_bytes" not in result


def test_the_first_training_is_plain_sgd_and_measured_before_it_is_undone(tmp_path):
    imp = run(recipe(), RunFolder(tmp_path / "imp"), device=CPU)["metrics"]
    sgd = run(recipe("method.name=sgd", "epochs=2"), RunFolder(tmp_path / "sgd"), device=CPU)["metrics"]
    assert imp[:2] == sgd


def test_epochs_must_be_shared_equally():
    with pytest.raises(RecipeError, match=r"training.epochs is 10, but imp .* trains 4 times; make it a multiple of 4"):
        recipe("epochs=10")
    assert recipe().phase_epochs == 2
    assert recipe("method.name=sgd", "epochs=10").phase_epochs == 10
