"""What a run costs on a GPU, roughly: to tell a minute from a week before starting."""

from collections.abc import Iterable

from iterand.training.recipe import Recipe

MULTIPLY_ADDS = {  # of one example forwards at ρ = 1; of a review as long as the mean
    "digits_conv": 0.4e6,
    "conv6": 154e6,
    "resnet18_cifar": 555e6,
    "resnet34_cifar": 1_159e6,
    "resnet20": 41e6,
    "vgg11": 153e6,
    "resnet18_imagenet": 1_814e6,
    "resnet34_imagenet": 3_664e6,
    "resnet50_imagenet": 4_089e6,
    "resnet101_imagenet": 7_801e6,
    "wide_resnet50_2": 11_398e6,
    "lstm": 100e6,
    "bilstm": 200e6,
}
TRAINING_EXAMPLES = {"digits": 1_197, "cifar10": 45_000, "imagenet": 1_268_355, "imdb": 17_500}

_OPERATIONS_A_SECOND = 1e14  # what a data-centre GPU of today makes of convolutions in bfloat16
_SHORTEST_STEP = 2e-3  # seconds: launching the work of a step takes that long, however small it is
_RECURRENT_STEP = 4e-2  # an LSTM reads one word after the other


def gpu_minutes(recipes: Iterable[Recipe]) -> float:
    """Minutes on one GPU for all of these runs, one after the other."""
    return sum(_seconds(recipe) for recipe in recipes) / 60


def _seconds(recipe: Recipe) -> float:
    network, data, training = recipe.network, recipe.data, recipe.training
    examples = TRAINING_EXAMPLES[data.name]
    steps = min(examples, data.limit or examples) / training.batch_size * training.epochs
    # Forwards once and backwards twice, each multiply-add two operations.
    operations = 6 * MULTIPLY_ADDS[network.name] * network.width_factor**2 * training.batch_size
    shortest = _RECURRENT_STEP if data.name == "imdb" else _SHORTEST_STEP
    return float(steps * max(shortest, operations / _OPERATIONS_A_SECOND))
