"""The example of the public interface as a user types it, on five shapes of network."""

import re

import torch
from torch.nn import functional as F

import iterand


def test_the_example_as_printed(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    MyNetwork = example.build
    loader = [(example.images, example.labels)] * 60

    model = MyNetwork()
    iterand.prune_(model, sparsity=0.6, weights="signed_constant", seed=0)
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.1, momentum=0.9, weight_decay=5e-4)
    randomizer = iterand.IterativeRandomization(model, period=60, rate=0.1)

    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        randomizer.step()

    print(iterand.summary(model))
    iterand.save_ticket(model, "mine.ticket")
    plain = iterand.load_ticket("mine.ticket", MyNetwork())

    model.eval()
    assert torch.equal(plain.eval()(example.images), model(example.images))
    assert [type(module) for module in plain.modules()] == [type(module) for module in MyNetwork().modules()]
    assert re.search("1 rounds? of randomization", capsys.readouterr().out)
    first = iterand.prune_(MyNetwork(), 0.6, weights="signed_constant", seed=0)
    assert example.loss(model) < example.loss(first.eval())


def test_without_the_extra_line_it_is_edge_popup(example):
    """A loop that forgets the stepper trains with correct masks and unchanged weights."""
    model = iterand.prune_(example.build(), sparsity=0.6, weights="signed_constant", seed=0)
    before = [layer.weight.clone() for layer in iterand.masked_layers(model).values()]
    optimizer = torch.optim.SGD(iterand.scores(model), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        example.loss(model).backward()
        optimizer.step()
    for layer, weight in zip(iterand.masked_layers(model).values(), before):
        assert torch.equal(layer.weight, weight)
        for module, name in layer.owners:
            mask = iterand.calculate_mask(layer.score, 0.6)
            assert torch.equal(getattr(module, name), torch.where(mask, weight, 0.0))
