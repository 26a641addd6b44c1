"""The networks against the tables of Appendix B and C, and against sums worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from iterand.lab.networks import build_network, kaiming_uniform_, network_names

CIFAR = ("conv6", "resnet18_cifar", "resnet34_cifar", "resnet20", "vgg11")
IMAGENET = ("resnet18_imagenet", "resnet34_imagenet", "resnet50_imagenet", "resnet101_imagenet", "wide_resnet50_2")
TEXT = ("lstm", "bilstm")


def structure(name: str, **options: float) -> nn.Module:
    """A network whose tensors have shapes and no numbers, which takes no time however large it is."""
    with torch.device("meta"):
        return build_network(name, **options)


def weights(network: nn.Module, kind: type[nn.Module]) -> int:
    return sum(module.weight.numel() for module in network.modules() if isinstance(module, kind))


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def shapes(network: nn.Module, image: Tensor) -> str:
    """What the image goes through: C convolution, M max pooling, A average pooling, each as <channels>@<side>."""
    letters = {nn.Conv2d: "C", nn.MaxPool2d: "M", nn.AdaptiveAvgPool2d: "A"}
    seen: list[str] = []

    def note(module: nn.Module, _: object, output: Tensor) -> None:
        seen.append(f"{letters[type(module)]}{output.shape[1]}@{output.shape[2]}")

    for module in network.modules():
        if type(module) in letters:
            module.register_forward_hook(note)
    network.eval()(image)
    return " ".join(seen)


# --- The shapes of Appendix B and C --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width_factor", "a", "b", "c"),
    [
        (0.25, 16, 32, 64),
        (0.5, 32, 64, 128),
        (0.65, 42, 83, 166),
        (1.0, 64, 128, 256),
        (2.0, 128, 256, 512),
        (0.001, 1, 1, 1),
    ],
)
def test_conv6_has_the_layers_of_appendix_b(width_factor: float, a: int, b: int, c: int) -> None:
    network = build_network("conv6", width_factor=width_factor)
    expected = f"C{a}@32 C{a}@32 M{a}@16 C{b}@16 C{b}@16 M{b}@8 C{c}@8 C{c}@8 M{c}@4"
    assert shapes(network, torch.zeros(2, 3, 32, 32)) == expected
    linears = [(one.in_features, one.out_features) for one in network.modules() if isinstance(one, nn.Linear)]
    assert linears == [(16 * c, c), (c, c), (c, 10)]
    assert all(one.bias is not None for one in network.modules() if isinstance(one, nn.Conv2d | nn.Linear))
    assert all(one.kernel_size == (3, 3) for one in network.modules() if isinstance(one, nn.Conv2d))


# Two convolutions a block; the odd one of a stage is the shortcut of its first block.
@pytest.mark.parametrize(
    ("name", "width_factor", "expected"),
    [
        ("resnet18_cifar", 1.0, "C64@32 " * 5 + "C128@16 " * 5 + "C256@8 " * 5 + "C512@4 " * 5 + "A512@1"),
        ("resnet18_cifar", 0.5, "C64@32 " + "C32@32 " * 5 + "C64@16 " * 5 + "C128@8 " * 5 + "C256@4 " * 5 + "A256@1"),
        ("resnet34_cifar", 1.0, "C64@32 " * 7 + "C128@16 " * 9 + "C256@8 " * 13 + "C512@4 " * 7 + "A512@1"),
        ("resnet34_cifar", 0.25, "C64@32 " + "C16@32 " * 7 + "C32@16 " * 9 + "C64@8 " * 13 + "C128@4 " * 7 + "A128@1"),
        ("resnet20", 1.0, "C16@32 " * 7 + "C32@16 " * 7 + "C64@8 " * 7 + "A64@1"),
        ("resnet20", 0.5, "C8@32 " * 7 + "C16@16 " * 7 + "C32@8 " * 7 + "A32@1"),
    ],
)
def test_cifar_resnets_have_the_layers_of_appendix_b_and_openlth(name: str, width_factor: float, expected: str) -> None:
    assert shapes(build_network(name, width_factor=width_factor), torch.zeros(1, 3, 32, 32)) == expected


def bottlenecks(*stages: tuple[int, int, int, int]) -> str:
    """(inner width, outer width, side, blocks) a stage; the 3×3 convolution, the second of a block, has the stride."""
    layers, before = "", 56
    for inner, outer, side, blocks in stages:
        layers += f"C{inner}@{before} C{inner}@{side} C{outer}@{side} C{outer}@{side} "
        layers += f"C{inner}@{side} C{inner}@{side} C{outer}@{side} " * (blocks - 1)
        before = side
    return layers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18_imagenet", "C8@56 " * 5 + "C16@28 " * 5 + "C32@14 " * 5 + "C64@7 " * 5 + "A64@1"),
        ("resnet34_imagenet", "C8@56 " * 7 + "C16@28 " * 9 + "C32@14 " * 13 + "C64@7 " * 7 + "A64@1"),
        (
            "resnet50_imagenet",
            bottlenecks((8, 32, 56, 3), (16, 64, 28, 4), (32, 128, 14, 6), (64, 256, 7, 3)) + "A256@1",
        ),
        (
            "resnet101_imagenet",
            bottlenecks((8, 32, 56, 3), (16, 64, 28, 4), (32, 128, 14, 23), (64, 256, 7, 3)) + "A256@1",
        ),
        (
            "wide_resnet50_2",
            bottlenecks((16, 32, 56, 3), (32, 64, 28, 4), (64, 128, 14, 6), (128, 256, 7, 3)) + "A256@1",
        ),
    ],
)
def test_imagenet_resnets_have_the_layers_of_appendix_b(name: str, expected: str) -> None:
    network = build_network(name, width_factor=0.125)
    assert shapes(network, torch.zeros(1, 3, 224, 224)) == "C64@112 M64@56 " + expected


@pytest.mark.parametrize(("width_factor", "a", "b", "c", "d"), [(0.5, 32, 64, 128, 256), (1.0, 64, 128, 256, 512)])
def test_vgg11_has_the_layers_of_openlth(width_factor: float, a: int, b: int, c: int, d: int) -> None:
    assert shapes(build_network("vgg11", width_factor=width_factor), torch.zeros(1, 3, 32, 32)) == (
        f"C{a}@32 M{a}@16 C{b}@16 M{b}@8 C{c}@8 C{c}@8 M{c}@4 C{d}@4 C{d}@4 M{d}@2 C{d}@2 C{d}@2 A{d}@1"
    )


def test_digits_conv_is_small_and_has_no_batch_norm() -> None:
    network = build_network("digits_conv", width_factor=0.5)
    assert shapes(network, torch.zeros(1, 1, 8, 8)) == "C8@8 C8@8 M8@4 C16@4 C16@4 M16@2"
    # 9 (1·8 + 8·8 + 8·16 + 16·16) convolution weights, 64·10 linear weights, biases 8 + 8 + 16 + 16 + 10, no more.
    assert parameters(network) == 9 * 456 + 640 + 58


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet34_cifar"])
@pytest.mark.parametrize("width_factor", [0.25, 1.0, 2.0])
def test_cifar_stem_is_3x3_with_stride_1_and_64_channels(name: str, width_factor: float) -> None:
    stem = next(one for one in structure(name, width_factor=width_factor).modules() if isinstance(one, nn.Conv2d))
    assert (stem.in_channels, stem.out_channels, stem.kernel_size, stem.stride) == (3, 64, (3, 3), (1, 1))


@pytest.mark.parametrize("width_factor", [0.125, 2.0])
def test_imagenet_stem_is_7x7_with_stride_2_and_64_channels(width_factor: float) -> None:
    network = structure("resnet18_imagenet", width_factor=width_factor)
    stem = next(one for one in network.modules() if isinstance(one, nn.Conv2d))
    pooling = next(one for one in network.modules() if isinstance(one, nn.MaxPool2d))
    assert (stem.out_channels, stem.kernel_size, stem.stride, stem.padding) == (64, (7, 7), (2, 2), (3, 3))
    assert (pooling.kernel_size, pooling.stride, pooling.padding) == (3, 2, 1)


@pytest.mark.parametrize(
    ("name", "width_factor", "changes"),
    [
        ("resnet18_cifar", 1.0, [(64, 128, 2), (128, 256, 2), (256, 512, 2)]),
        ("resnet18_cifar", 0.5, [(64, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)]),
        # The 64 channels of the stem are 256ρ here, so the first block needs no shortcut of its own.
        ("resnet50_imagenet", 0.25, [(64, 128, 2), (128, 256, 2), (256, 512, 2)]),
        ("resnet20", 1.0, [(16, 32, 2), (32, 64, 2)]),
    ],
)
def test_shortcuts_are_1x1_convolutions_where_the_shape_changes(
    name: str, width_factor: float, changes: list[tuple[int, int, int]]
) -> None:
    network = structure(name, width_factor=width_factor)
    shortcuts = [module for path, module in network.named_modules() if path.endswith("shortcut.convolution")]
    assert [(one.in_channels, one.out_channels, one.stride[0]) for one in shortcuts] == changes
    assert all(one.kernel_size == (1, 1) for one in shortcuts)


@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet50_imagenet", "resnet20", "vgg11"])
def test_a_batch_norm_follows_every_convolution(name: str) -> None:
    layers = [
        module
        for module in structure(name, width_factor=0.125).modules()
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d)
    ]
    for convolution, normalization in zip(layers[::2], layers[1::2], strict=True):
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(normalization, nn.BatchNorm2d)
        assert convolution.bias is None
        assert convolution.out_channels == normalization.num_features


def test_a_residual_block_is_the_rectified_sum_of_branch_and_shortcut() -> None:
    block = build_network("resnet18_cifar", width_factor=0.125).eval().get_submodule("stages.1.0")
    image = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    state = block.state_dict()
    one = nn.functional.conv2d(image, state["branch.0.convolution.weight"], stride=2, padding=1)
    two = nn.functional.conv2d(
        (one / math.sqrt(1 + 1e-5)).clamp(min=0), state["branch.2.convolution.weight"], padding=1
    )
    shortcut = nn.functional.conv2d(image, state["shortcut.convolution.weight"], stride=2)
    expected = ((two + shortcut) / math.sqrt(1 + 1e-5)).clamp(min=0)  # fresh statistics are mean 0 and variance 1
    torch.testing.assert_close(block(image), expected)


# --- What the paper counts -----------------------------------------------------------------------------------------


def basic_convolutions(stem: int, first: int, blocks: tuple[int, ...], widths: tuple[int, ...]) -> int:
    """Stem, then per stage 2 × blocks convolutions of 9 w² but for the first, and a 1×1 shortcut into a new width."""
    total, before = stem, first
    for width, count in zip(widths, blocks, strict=True):
        total += 9 * before * width + (2 * count - 1) * 9 * width * width
        total += before * width if before != width else 0
        before = width
    return total


def bottleneck_convolutions(blocks: tuple[int, ...], inner: tuple[int, ...], outer: tuple[int, ...]) -> int:
    total, before = 3 * 64 * 49, 64
    for width, wide, count in zip(inner, outer, blocks, strict=True):
        total += before * width + 9 * width * width + width * wide + before * wide
        total += (count - 1) * (wide * width + 9 * width * width + width * wide)
        before = wide
    return total


def test_conv6_counts_2_26_million_weights() -> None:
    network = structure("conv6")
    convolutions = 9 * (3 * 64 + 64 * 64 + 64 * 128 + 128 * 128 + 128 * 256 + 256 * 256)
    linears = 4 * 4 * 256 * 256 + 256 * 256 + 256 * 10
    assert weights(network, nn.Conv2d) == convolutions == 1_144_512
    assert weights(network, nn.Linear) == linears == 1_116_672
    assert convolutions + linears == 2_261_184  # 2.26M
    assert parameters(network) == 2_261_184 + 2 * (64 + 128 + 256) + 256 + 256 + 10


WIDTHS = (64, 128, 256, 512)
OUTER = (256, 512, 1024, 2048)


@pytest.mark.parametrize(
    ("name", "by_hand", "convolutions", "classifier"),
    [
        ("resnet18_cifar", basic_convolutions(3 * 64 * 9, 64, (2, 2, 2, 2), WIDTHS), 11_159_232, 5_120),
        ("resnet34_cifar", basic_convolutions(3 * 64 * 9, 64, (3, 4, 6, 3), WIDTHS), 21_259_968, 5_120),
        ("resnet20", basic_convolutions(3 * 16 * 9, 16, (3, 3, 3), (16, 32, 64)), 270_256, 640),
    ],
)
def test_cifar_resnet_counts(name: str, by_hand: int, convolutions: int, classifier: int) -> None:
    network = structure(name)
    assert weights(network, nn.Conv2d) == by_hand == convolutions
    assert weights(network, nn.Linear) == classifier


# The table of Figure 3 counts convolutions only: two decimals of a million, cut; pruned rows 30 % of that, rounded.
@pytest.mark.parametrize(
    ("name", "by_hand", "convolutions", "hundredths", "kept"),
    [
        ("resnet18_imagenet", basic_convolutions(3 * 64 * 49, 64, (2, 2, 2, 2), WIDTHS), 11_166_912, 1116, None),
        ("resnet34_imagenet", basic_convolutions(3 * 64 * 49, 64, (3, 4, 6, 3), WIDTHS), 21_267_648, 2126, 6.38),
        ("resnet50_imagenet", bottleneck_convolutions((3, 4, 6, 3), WIDTHS, OUTER), 23_454_912, 2345, 7.04),
        ("resnet101_imagenet", bottleneck_convolutions((3, 4, 23, 3), WIDTHS, OUTER), 42_394_816, 4239, 12.72),
    ],
)
def test_imagenet_counts_of_figure_3(
    name: str, by_hand: int, convolutions: int, hundredths: int, kept: float | None
) -> None:
    assert weights(structure(name), nn.Conv2d) == by_hand == convolutions
    assert convolutions // 10_000 == hundredths
    assert kept is None or round(0.3 * convolutions / 1e6, 2) == kept


# Appendix C.5 counts the classifier too (2048ρ · 1000 weights) and rounds to one decimal.
@pytest.mark.parametrize(
    ("name", "width_factor", "inner", "outer", "counted", "printed"),
    [
        ("wide_resnet50_2", 1.0, (128, 256, 512, 1024), (256, 512, 1024, 2048), 68_814_016, 68.8),
        ("resnet50_imagenet", 2.0, (128, 256, 512, 1024), (512, 1024, 2048, 4096), 97_846_464, 97.8),
    ],
)
def test_large_scale_counts_of_appendix_c5(
    name: str, width_factor: float, inner: tuple[int, ...], outer: tuple[int, ...], counted: int, printed: float
) -> None:
    network = structure(name, width_factor=width_factor)
    by_hand = bottleneck_convolutions((3, 4, 6, 3), inner, outer) + outer[-1] * 1000
    assert weights(network, nn.Conv2d) + weights(network, nn.Linear) == by_hand == counted
    assert round(counted / 1e6, 1) == printed


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("resnet18_imagenet", 11_689_512),
        ("resnet34_imagenet", 21_797_672),
        ("resnet50_imagenet", 25_557_032),
        ("resnet101_imagenet", 44_549_160),
        ("wide_resnet50_2", 68_883_240),
    ],
)
def test_all_parameters_at_width_1_are_those_of_the_well_known_networks(name: str, total: int) -> None:
    """Biases and batch norm included: the sizes under which these networks are published everywhere."""
    assert parameters(structure(name)) == total


def test_vgg11_counts() -> None:
    network = structure("vgg11")
    convolutions = 9 * (3 * 64 + 64 * 128 + 128 * 256 + 256 * 256 + 256 * 512 + 3 * 512 * 512)
    assert weights(network, nn.Conv2d) == convolutions == 9_217_728
    assert weights(network, nn.Linear) == 512 * 10


@pytest.mark.parametrize(("name", "directions"), [("lstm", 1), ("bilstm", 2)])
def test_lstm_counts(name: str, directions: int) -> None:
    network = structure(name)
    recurrent = directions * (4 * 256 * 100 + 4 * 256 * 256)  # four gates
    biases = directions * 2 * 4 * 256 + 1
    assert parameters(network) == 25_002 * 100 + recurrent + directions * 256 + biases


# --- Text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXT)
def test_an_lstm_gives_one_logit_that_padding_does_not_change(name: str) -> None:
    network = build_network(name, width_factor=0.0625, vocabulary_size=50).eval()
    tokens = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 7, 1])  # unsorted on purpose
    logits = network(tokens, lengths)
    assert logits.shape == (3, 1)
    for row, length in enumerate(lengths.tolist()):
        alone = network(tokens[row : row + 1, :length], torch.tensor([length]))
        torch.testing.assert_close(logits[row : row + 1], alone)
    padded = tokens.clone()
    padded[0, 4:] = 49 - padded[0, 4:]
    assert torch.equal(network(padded, lengths), logits)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 50
    assert network(changed, lengths)[0] != logits[0]


@pytest.mark.parametrize("name", TEXT)
def test_the_way_of_an_lstm_on_a_cpu_is_that_of_packed_texts(name: str) -> None:
    network = build_network(name, width_factor=0.0625, vocabulary_size=50).eval()
    tokens = torch.randint(0, 50, (5, 9), generator=torch.Generator().manual_seed(0))
    lengths, embedded = torch.tensor([4, 9, 1, 9, 6]), network.embedding(tokens)
    found, wanted = network._padded(embedded, lengths), network._packed(embedded, lengths)
    assert len(found) == len(wanted) == 1 + (name == "bilstm")
    parameters = list(network.recurrent.parameters())
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs)
    gradients, right = (
        torch.autograd.grad(torch.cat(last).square().sum(), [embedded, *parameters], retain_graph=True)
        for last in (found, wanted)
    )
    for ours, theirs in zip(gradients, right):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("width_factor", "hidden"), [(0.5, 128), (1.0, 256)])
@pytest.mark.parametrize(("name", "directions"), [("lstm", 1), ("bilstm", 2)])
def test_an_lstm_has_the_layers_of_appendix_c6(name: str, directions: int, width_factor: float, hidden: int) -> None:
    network = build_network(name, width_factor=width_factor, vocabulary_size=50)
    layers = dict(network.named_children())
    assert layers["embedding"].weight.shape == (50, 100)
    assert (layers["recurrent"].hidden_size, layers["recurrent"].num_layers) == (hidden, 1)
    assert layers["recurrent"].bidirectional == (directions == 2)
    assert layers["dropout"].p == 0.2
    assert layers["classifier"].weight.shape == (1, directions * hidden)


@pytest.mark.parametrize("name", TEXT)
def test_forget_gates_begin_as_they_are_told_and_words_are_scaled(name: str) -> None:
    plain, told = (
        build_network(name, width_factor=0.0625, vocabulary_size=50, **options).eval()
        for options in ({}, {"forget_bias": 1.0, "word_scale": 10.0})
    )
    hidden = told.recurrent.hidden_size
    for key, bias in told.recurrent.named_parameters():
        if key.startswith("bias"):
            open_gates = torch.zeros(4, hidden)
            open_gates[1] = 1.0 if key.startswith("bias_ih") else 0.0  # input, forget, cell, output
            assert torch.equal(bias, open_gates.flatten())
    tokens = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 7, 1])
    assert not torch.equal(told(tokens, lengths), plain(tokens, lengths))
    with torch.no_grad():
        plain.load_state_dict(told.state_dict())
        plain.embedding.weight.mul_(10.0)
        plain.word_scale.fill_(1.0)
    torch.testing.assert_close(told(tokens, lengths), plain(tokens, lengths))


# --- Building by name ----------------------------------------------------------------------------------------------


def test_every_network_is_named() -> None:
    assert set(network_names()) == {*CIFAR, *IMAGENET, *TEXT, "digits_conv"}


@pytest.mark.parametrize("name", [*CIFAR, *IMAGENET, "digits_conv"])
@pytest.mark.parametrize("classes", [None, 7])
def test_logits_are_finite_and_one_a_class(name: str, classes: int | None) -> None:
    network = build_network(name, width_factor=0.0625, classes=classes)
    shape = (2, 1, 8, 8) if name == "digits_conv" else (2, 3, 64, 64) if name in IMAGENET else (2, 3, 32, 32)
    logits = network(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (2, classes or (1000 if name in IMAGENET else 10))
    assert torch.isfinite(logits).all()
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_an_lstm_of_more_than_two_classes_gives_a_logit_a_class() -> None:
    network = build_network("lstm", width_factor=0.0625, classes=5, vocabulary_size=10)
    assert network(torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 2])).shape == (2, 5)


def test_an_unknown_name_is_refused_with_a_suggestion_and_the_list() -> None:
    with pytest.raises(ValueError, match="'resnet18_cifer'; did you mean 'resnet18_cifar'") as caught:
        build_network("resnet18_cifer")
    assert all(name in str(caught.value) for name in network_names())
    with pytest.raises(ValueError, match=r"did you mean 'resnet18_cifar' or 'resnet18_imagenet'\?"):
        build_network("resnet18")
    with pytest.raises(ValueError, match=r"no network is called 'xyzzy'; the names are conv6, "):
        build_network("xyzzy")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="'conv6' has no option 'depth'; it takes none"):
        build_network("conv6", depth=3)
    with pytest.raises(
        ValueError, match="'lstm' has no option 'bidirectional'; it takes vocabulary_size, forget_bias, word_scale"
    ):
        build_network("lstm", bidirectional=True)


@pytest.mark.parametrize("width_factor", [0.0, -1.0, math.inf, math.nan])
def test_a_width_factor_that_is_not_positive_is_refused(width_factor: float) -> None:
    with pytest.raises(ValueError, match=f"width_factor is {width_factor}"):
        build_network("conv6", width_factor=width_factor)


def test_fewer_than_two_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="classes is 1"):
        build_network("conv6", classes=1)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary_size is 0"):
        build_network("lstm", vocabulary_size=0)


# --- The start of ordinary training --------------------------------------------------------------------------------


def test_weights_fill_the_kaiming_uniform_interval() -> None:
    network = build_network("resnet18_cifar", width_factor=0.5, seed=3)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            bound = math.sqrt(6 / fan_in)
            assert module.weight.abs().max() <= bound
            # The variance of a uniform distribution over ±bound is bound²/3; five deviations of its estimate.
            assert abs(module.weight.var().item() * 3 / bound**2 - 1) < 5 * math.sqrt(0.8 / module.weight.numel())
    first = network.get_submodule("stem.0.convolution").weight
    assert first.abs().max() > 0.99 * math.sqrt(6 / 27)


def test_recurrent_and_embedding_weights_are_drawn_too() -> None:
    network = build_network("lstm", width_factor=0.25, vocabulary_size=200)
    bounds = {"embedding.weight": 100, "recurrent.weight_ih_l0": 100, "recurrent.weight_hh_l0": 64}
    for name, fan_in in bounds.items():
        largest = network.get_parameter(name).abs().max().item()
        assert 0.99 * math.sqrt(6 / fan_in) < largest <= math.sqrt(6 / fan_in)


@pytest.mark.parametrize("name", ["conv6", "resnet20", "bilstm"])
def test_biases_start_at_zero_and_batch_norm_at_one(name: str) -> None:
    network = build_network(name, width_factor=0.125)
    biases = [one for path, one in network.named_parameters() if path.rpartition(".")[2].startswith("bias")]
    assert biases
    assert all(not one.any() for one in biases)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()


def test_the_seed_and_nothing_else_decides_the_weights() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = build_network("conv6", width_factor=0.125, seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    same = build_network("conv6", width_factor=0.125, seed=5)
    assert all(torch.equal(value, one[name]) for name, value in same.state_dict().items())
    kaiming_uniform_(same, seed=6)
    other = build_network("conv6", width_factor=0.125, seed=6).state_dict()
    for name, value in same.state_dict().items():
        assert torch.equal(value, other[name])
        if name.endswith("weight"):
            assert not torch.equal(value, one[name])
