"""Models of timm and Hugging Face, small and built without downloads: nearly all is masked, and the rest is said."""

import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import iterand
import zoo

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(2, 100, (2, 10), generator=torch.Generator().manual_seed(1))
TEXT = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION |= {"image_size": 32, "patch_size": 8}

Library = ModuleType
Build = Callable[[Library], nn.Module]

TIMM: dict[str, tuple[Build, set[str], int]] = {
    "resnet18": (lambda t: t.create_model("resnet18", channels=(16, 24, 32, 48), stem_width=16), set(), 0),
    "vit_tiny": (
        lambda t: t.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48),
        {"cls_token", "pos_embed"},
        0,
    ),
    "convnext_atto": (
        lambda t: t.create_model("convnext_atto", dims=(16, 24, 32, 48), depths=(1, 1, 2, 1)),
        set(),
        5,
    ),
    "mobilenetv3": (lambda t: t.create_model("mobilenetv3_small_050"), set(), 0),
    "mixer": (lambda t: t.models.MlpMixer(img_size=32, patch_size=8, num_blocks=2, embed_dim=32), set(), 0),
    "swin": (
        lambda t: t.models.SwinTransformer(
            img_size=32, window_size=4, embed_dim=24, depths=(2, 1), num_heads=(2, 2), num_classes=10
        ),
        {"relative_position_bias_table"},
        0,
    ),
    "deit3": (
        lambda t: t.create_model("deit3_small_patch16_224", img_size=32, depth=2, embed_dim=48),
        {"cls_token", "pos_embed"},
        4,
    ),
}
"""Model of timm → how it is built, the ends of the names that are left alone, and how many layer scales it has."""


def hugging_face() -> dict[str, tuple[Build, set[str]]]:
    """Model of Hugging Face → how it is built, and the ends of the names that are left alone."""
    few_heads = {"num_key_value_heads": 1, "head_dim": 16}
    gpt2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    t5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    return {
        "BERT": (lambda t: t.BertForMaskedLM(t.BertConfig(**TEXT)), set()),
        "GPT-2": (lambda t: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, **ends)), set()),
        "Llama": (lambda t: t.LlamaForCausalLM(t.LlamaConfig(**TEXT)), set()),
        "T5": (lambda t: t.T5ForConditionalGeneration(t.T5Config(**t5)), set()),
        "ViT": (lambda t: t.ViTForImageClassification(t.ViTConfig(**VISION)), {"cls_token", "position_embeddings"}),
        "Gemma": (lambda t: t.GemmaForCausalLM(t.GemmaConfig(**TEXT, **few_heads)), set()),
        "CLIP": (
            lambda t: t.CLIPModel(t.CLIPConfig(text_config=TEXT | ends, vision_config=VISION)),
            {"class_embedding", "logit_scale"},
        ),
        "ConvNeXt": (
            lambda t: t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])),
            set(),
        ),
    }


def outputs(model: nn.Module) -> Tensor:
    """What a model makes of words, of images, or of both."""
    inputs = {"input_ids": WORDS, "decoder_input_ids": WORDS, "pixel_values": IMAGES}
    expected = getattr(model, "main_input_name", None)
    if expected is None:
        return model(IMAGES)
    names = {"T5": ["input_ids", "decoder_input_ids"], "CLIP": ["input_ids", "pixel_values"]}
    kind = next((kind for kind in names if kind in type(model).__name__), None)
    made = model(**{name: inputs[name] for name in (names[kind] if kind else [expected])})
    return next(value for value in made.to_tuple() if value is not None)


def search(build: Callable[[], nn.Module], tmp_path, **options: object) -> tuple[nn.Module, list[str]]:
    """Prune a model, take three steps and redraw once. Its ticket gives the same outputs. Returns warnings too."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True, category=iterand.UnmaskedWarning) as caught:
        warnings.simplefilter("always", iterand.UnmaskedWarning)
        model = iterand.prune_(build(), 0.5, weights="signed_constant", **options)
        optimizer = torch.optim.SGD(iterand.scores(model), lr=0.01)
        randomizer = iterand.IterativeRandomization(model, period=3, rate=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            made = outputs(model)
            (made * torch.linspace(-1, 1, made.numel()).view(made.shape)).mean().backward()
            optimizer.step()
            randomizer.step()
        iterand.save_ticket(model.eval(), tmp_path / "a.ticket")
    torch.manual_seed(1)
    plain = iterand.load_ticket(tmp_path / "a.ticket", build().eval())
    with torch.no_grad():
        # Frozen, since torch chooses kernels for attention by what takes gradients.
        assert torch.equal(outputs(plain.requires_grad_(False)), outputs(model))
    assert outputs(model).std() > 1e-3
    return model, [str(warning.message) for warning in caught]


def check(model: nn.Module, messages: list[str], left_alone: set[str]) -> iterand.Summary:
    """Nearly all of it is masked; what is not is frozen or said."""
    summary = iterand.summary(model)
    assert summary.rounds == 1
    assert summary.masked_share >= 0.95
    free = [one.name for one in summary.unmasked if not one.frozen]
    assert {name.rpartition(".")[2] for name in free} == left_alone
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in trained if name.endswith(".score") or name in free or not name.strip()} | {
        *free
    }
    assert len(messages) == (2 if free else 0)  # when it is pruned, and when its ticket is saved
    for message in messages:
        assert f"{summary.left_alone:,} parameters in " in message
        assert any(name in message for name in free)
    masked = sum(mask.numel() for mask in iterand.scores(model))
    assert masked + sum(torch.Size(one.shape).numel() for one in summary.unmasked) == sum(
        parameter.numel() for name, parameter in model.named_parameters() if not name.endswith(".original")
    )
    return summary


@pytest.fixture(scope="module")
def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    return zoo.import_timm()


@pytest.mark.parametrize("name", TIMM)
def test_timm(name, timm, tmp_path):
    build, left_alone, scales = TIMM[name]
    model, messages = search(lambda: build(timm), tmp_path)
    summary = check(model, messages, left_alone)
    assert sum(one.layer_scale for one in summary.unmasked) == scales


@pytest.mark.parametrize("name", hugging_face())
def test_hugging_face(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    build, left_alone = hugging_face()[name]
    model, messages = search(lambda: build(transformers), tmp_path)
    summary = check(model, messages, left_alone)
    assert all(one.frozen for one in summary.unmasked if "norm" in one.name.lower())
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            assert not module.weight[module.padding_idx].any(), path
        if "norm" in type(module).__name__.lower():  # 1 + weight in Gemma
            assert (module.weight == (name != "Gemma")).all(), path
    if name == "GPT-2":
        layer = iterand.masked_layers(model)["transformer.h.0.mlp.c_fc.weight"]
        assert (tuple(layer.weight.shape), layer.parametrization.settings.fan_in) == ((32, 128), 32)
