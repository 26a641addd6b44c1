import dataclasses
import json
import math
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iterand.errors import RecipeError
from iterand.lab.experiments.library import find_recipe, recipe_names
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import METHODS, MethodRecipe, Recipe, TrainingRecipe, recipe_keys

names = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
methods = st.builds(
    MethodRecipe,
    name=st.sampled_from(METHODS),
    sparsity=st.floats(0, 1),
    rate=st.floats(0, 1),
    period=st.integers(1, 10**9),
    weight_distribution=st.sampled_from(["kaiming_uniform", "signed_constant"]),
)
recipes = st.builds(
    Recipe,
    name=names,
    description=names,
    seed=st.integers(0, 2**63 - 1),
    method=methods,
    training=st.builds(TrainingRecipe, epochs=st.integers(1, 250).map(lambda n: 4 * n), channels_last=st.booleans()),
)


@given(recipes)
def test_toml_and_back_is_the_same_recipe(recipe):
    assert recipe_file.from_toml(recipe_file.to_toml(recipe), "test") == recipe


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_of_the_package_is_the_same_after_toml(name):
    recipe = recipe_file.override(find_recipe(name), ["milestones=[1, 2]", 'description=a "quote"\tand\x7f ε'])
    again = recipe_file.from_toml(recipe_file.to_toml(recipe), "test")
    assert again == recipe
    assert recipe_file.digest(again) == recipe_file.digest(recipe)
    assert recipe_file.to_toml(recipe).startswith(f'name = "{name}"\ndescription = ')


@given(recipes)
def test_digest_depends_on_settings_alone(recipe):
    renamed = dataclasses.replace(recipe, name="other", description="other")
    reseeded = dataclasses.replace(recipe, seed=(recipe.seed + 1) % 2**63)
    assert recipe_file.digest(renamed) == recipe_file.digest(recipe) != recipe_file.digest(reseeded)


def test_every_key_stands_in_the_toml():
    own = {"data.path", "data.image_size", "data.sha256", "network.arguments", "network.sha256"}
    own |= {f"training.{key}" for key in ("teacher", "teacher_weight", "teacher_temperature", "teacher_sha256")}
    yours = recipe_file.override(Recipe(), ["data.name=image_folder", "network.name=timm:resnet18", "teacher=run"])
    for recipe, left_out in ((yours, set()), (Recipe(), own)):
        tables = tomllib.loads(recipe_file.to_toml(recipe))
        found = {f"{table}.{key}" for table, part in tables.items() if isinstance(part, dict) for key in part}
        assert found | {"name", "description", "seed", "scale"} == set(recipe_keys()) - left_out
        assert recipe_file.from_dict(tables) == recipe_file.from_dict(recipe_file.as_dict(recipe)) == recipe


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[method]\nperod = 3", "recipe has no key 'method.perod'; did you mean 'method.period'?"),
        ("[metod]\nperiod = 3", "recipe has no key 'metod'; did you mean 'method'?"),
        ("[method]\nperiod = 0", "method.period is 0; it must be at least 1"),
        ("[method]\nperiod = 2.5", "method.period is 2.5; it must be a whole number"),
        ("[method]\nperiod = true", "method.period is True; it must be a whole number"),
        ("[method]\nrate = -1", "method.rate is -1.0; it must be at least 0 and at most 1"),
        ("[method]\nsparsity = 1.5", "method.sparsity is 1.5; it must be at least 0 and at most 1"),
        ("[method]\nsparsity = nan", "method.sparsity is nan; it must be at least 0 and at most 1"),
        ("[method]\nsparsity = 'much'", "method.sparsity is 'much'; it must be a number"),
        ("[method]\nname = 'iterant'", "one of sgd, edge_popup, iterand, imp; did you mean 'iterand'?"),
        ("[method]\nweight_distribution = 'KU'", "unknown distribution 'KU'; there are kaiming_normal"),
        (
            "[learning_rate]\nmilestones = [1.5]",
            "learning_rate.milestones is [1.5]; it must be a list of whole numbers",
        ),
        ("[method]\ninclude = 3", "method.include is 3; it must be a text, such as *.weight, or a list of texts"),
        ("[learning_rate]\nschedule = 'warmup_cosine'", "take 10 epochs, training.epochs is 10"),
        ("[training]\nchannels_last = 1", "training.channels_last is 1; it must be true or false"),
        ("[method", "is not valid TOML"),
        ("method = 3", "recipe key 'method' is a table; its keys are method.name, method.sparsity"),
    ],
)
def test_mistakes_get_a_sentence(text, sentence):
    with pytest.raises(RecipeError) as caught:
        recipe_file.from_toml(text, "mine.toml")
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("mine.toml")


def test_override_by_full_and_by_short_key():
    recipe = recipe_file.override(Recipe(), ["method.rate=0.25", "epochs=7", "weight_distribution=signed_constant"])
    assert (recipe.method.rate, recipe.training.epochs) == (0.25, 7)
    assert recipe.method.weight_distribution == "signed_constant"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("rate", "has no '='"),
        ("perod=3", "did you mean 'method.period'?"),
        ("training.final=3", "recipe has no key 'training.final'"),
        ("factor=0.1", None),
    ],
)
def test_override_mistakes(setting, sentence):
    if sentence is None:
        assert recipe_file.override(Recipe(), [setting]).learning_rate.factor == 0.1
    else:
        with pytest.raises(RecipeError, match=sentence.replace("?", r"\?")):
            recipe_file.override(Recipe(), [setting])


def test_the_old_key_of_records_and_run_folders_is_read():
    best = recipe_file.override(Recipe(), ["select_epoch=best_validation"])
    assert recipe_file.from_dict({"training": {"tested": "best"}}) == best
    assert recipe_file.from_dict({"training": {"tested": "last"}}) == Recipe()
    assert recipe_file.from_toml('[training]\ntested = "best"\n', "old") == best
    with pytest.raises(
        RecipeError, match=r"training\.select_epoch is 'worst'; it must be one of last, best_validation"
    ):
        recipe_file.from_dict({"training": {"tested": "worst"}})
    both = {"training": {"tested": "best", "select_epoch": "last"}}
    with pytest.raises(RecipeError, match=r"no key 'training.tested'; did you mean 'training.select_epoch'\?"):
        recipe_file.from_dict(both)
    with pytest.raises(RecipeError, match=r"no key 'tested'; did you mean 'training.select_epoch'\?"):
        recipe_file.override(Recipe(), ["tested=best"])


def test_an_old_recipe_that_extends_another_overrides_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "lstm"\n[training]\ntested = "last"\n')
    assert find_recipe("lstm").training.select_epoch == "best_validation"
    assert find_recipe(str(path)).training.select_epoch == "last"


def test_digests_do_not_change_with_the_name_of_a_key():
    """Records and run folders are found by them: these were recorded while the key was ``training.tested``."""
    assert recipe_file.digest(find_recipe("lstm")) == "789610e3c8"
    assert recipe_file.digest(find_recipe("bilstm-sgd")) == "cff59151a2"
    assert recipe_file.digest(find_recipe("digits", ["weight_decay=1e-4"])) == "a12757b6e9"


def test_ambiguous_short_key_is_refused():
    with pytest.raises(RecipeError, match=r"learning_rate\.schedule"):
        recipe_file.override(Recipe(), ["schdule=cosine"])
    assert recipe_file.override(Recipe(), ["name=mine"]).name == "mine"  # the recipe's own name comes first


@pytest.mark.parametrize("full", ["method.name=edge_popup", "network.name=conv6", "data.name=image_folder"])
def test_a_name_that_is_meant_for_a_table_is_refused(full):
    short = full.partition(".")[2]
    with pytest.raises(RecipeError, match=f"but name only names the run; write {full}$"):
        find_recipe("digits", [short])
    assert find_recipe("digits", ["name=mine"]).name == "mine"
    assert find_recipe("conv6", ["name=conv6"]).name == "conv6"


def test_difference_names_both_values():
    assert recipe_file.difference(Recipe(), recipe_file.override(Recipe(), ["rate=0.5"])) == [
        "method.rate is 0.5 here and 0.1 there"
    ]


def test_own_recipe_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nseed = 4\n')
    assert find_recipe(str(path)) == Recipe(name="mine", seed=4)
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        find_recipe(str(tmp_path / "none.toml"))


def test_a_tilde_is_the_home_folder_of_a_user_who_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("USERPROFILE", "/home/me")
    for path, expected in (("~/mine", "/home/me/mine"), ("~nobody-here/mine", f"{tmp_path}/~nobody-here/mine")):
        data = find_recipe("digits", ["data.name=image_folder", f"data.path={path}"]).data
        assert data.path == os.path.normpath(expected)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no devices that are files on this system")
def test_a_device_is_not_read(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "/dev/zero"\n')
    for path in ("/dev/zero", str(tmp_path / "mine.toml")):
        with pytest.raises(RecipeError, match="cannot read the recipe /dev/zero: this is a device, not a file"):
            find_recipe(path)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "ε"\n', encoding="utf-8-sig")
    assert find_recipe(str(path)) == Recipe(name="ε")


def test_a_recipe_extends_one_of_the_package(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "digits"\nname = "mine"\n[method]\nrate = 0.3\n')
    expected = recipe_file.override(find_recipe("digits"), ["name=mine", "rate=0.3"])
    assert find_recipe(str(path)) == expected
    for text, sentence in (
        ('extends = "digit"', "did you mean 'digits'"),
        ("extends = 3", "extends is 3; it must be the name of a recipe"),
        ('extends = "digits"\n[method]\nperod = 3', "no key 'method.perod'; did you mean 'method.period'"),
        ('extends = "digits"\nmethod = 3', "'method' is a table"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=sentence):
            find_recipe(str(path))


def test_unknown_recipe_gets_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        find_recipe("digit")


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_of_the_package_are_valid_and_described(name):
    recipe = find_recipe(name)
    assert recipe.name == name
    assert recipe.description


def test_recipe_survives_json():
    recipe = Recipe()
    assert recipe_file.from_dict(json.loads(json.dumps(recipe_file.as_dict(recipe)))) == recipe
    assert math.isfinite(recipe.learning_rate.final)


@pytest.mark.parametrize(("text", "value"), [(".5", 0.5), ("1.", 1.0), ("+.5e0", 0.5), ("5e-1", 0.5)])
def test_numbers_as_people_write_them(text, value):
    assert recipe_file.override(Recipe(), [f"sparsity={text}"]).method.sparsity == value


@pytest.mark.parametrize("text", [".", ".5.", "5e", "1.x", "0.5\nmethod.rate=0.2"])
def test_what_is_no_number_is_refused(text):
    with pytest.raises(RecipeError, match="it must be a number"):
        recipe_file.override(Recipe(), [f"sparsity={text}"])


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("forget_bias=nan", "at least -1000 and at most 1000"),
        ("forget_bias=-inf", "at least -1000 and at most 1000"),
        ("word_scale=inf", "at least 1e-06 and at most 10000"),
        ("weight_decay=inf", r"at least 0 and at most 1e\+30"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(setting, rule):
    with pytest.raises(RecipeError, match=rf"is -?(nan|inf); it must be {rule}"):
        recipe_file.override(Recipe(), [setting])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["classes=" + "9" * 30], f"network.classes is {'9' * 30}; it must be at least 0 and at most 2147483647"),
        (["learning_rate.initial=1e39"], "learning_rate.initial is 1e+39; it must be at least 0 and at most 1e+30"),
        (["weight_decay=1e308"], "optimizer.weight_decay is 1e+308; it must be at least 0 and at most 1e+30"),
        (
            ["weight_decay=" + "9" * 30],
            f"optimizer.weight_decay is {'9' * 30}; it must be at least 0 and at most 1e+30",
        ),
        (["width_factor=-" + "9" * 30], f"width_factor is -{'9' * 30}; it must be at least 1e-06 and at most 1e+12"),
        (["milestones=[-1,-2]"], "milestones is [-1, -2]; each must be at least 0 and at most 2147483647"),
        (
            ["schedule=multi_step", "factor=1e15", "milestones=[3,2,1]"],
            "learning_rate.factor is 1e+15; at 3 milestones it makes the rate larger than 1e+30, so lower it",
        ),
        (["epochs=" + "9" * 5000], "training.epochs is '9999"),
        (["epochs=0x" + "f" * 5000], "training.epochs is a whole number of thousands of digits; it must be at least 1"),
        (["network.name=\udcff"], r"network.name is '\udcff'; it must be text that UTF-8 can hold"),
    ],
)
def test_numbers_and_names_that_no_run_could_use(settings, sentence):
    with pytest.raises(RecipeError) as caught:
        recipe_file.override(Recipe(), settings)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300


NASTY = ["", "-1", "1e-320", "-1e308", "1e400", "nan", "-inf", "9" * 30, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000]
NASTY += [
    "true",
    "[]",
    "[-1, 1e9]",
    "[" * 3000,
    "{a = 1}",
    "2020-01-01",
    "\udcff",
    "'\\u0000'",
    "x" * 5000,
    "1\nseed=2",
]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["mask=multicoat"], "method.coats is 1; set it to the number of coats"),
        (["mask=gem_miner"], "method.score_distribution is 'kaiming_uniform'; set it to 'unit_uniform'"),
        (["mask=bernoulli", "sparsity_schedule=cubic"], "method.sparsity_schedule is 'cubic'; set it to 'constant'"),
        (["mask=signed", "candidates=negative"], "method.mask is 'signed', where the sign of a score says nothing"),
        (["mask=bernoulli", "redrawn_scores=follow"], "method.mask is 'bernoulli', where the sign of a score says"),
        (["rank_by=magnitude", "candidates=negative"], "method.rank_by is 'magnitude', where the sign of a score says"),
    ],
)
def test_what_does_not_go_with_a_kind_of_mask(settings, sentence):
    recipe = find_recipe("conv6")
    with pytest.raises(RecipeError, match=sentence):
        recipe_file.override(recipe, settings)
    recipe_file.override(recipe, [*settings, "method.name=sgd"])  # which masks nothing


def test_signs_of_scores_are_read_only_where_weights_are_redrawn():
    recipe_file.override(find_recipe("conv6"), ["mask=signed", "candidates=negative", "method.name=edge_popup"])


@pytest.mark.parametrize("key", recipe_keys())
def test_any_setting_gives_a_recipe_or_a_short_sentence(key):
    for value in NASTY:
        try:
            recipe = recipe_file.override(Recipe(), [f"{key}={value}"])
        except RecipeError as error:
            sentence = str(error)
        else:
            sentence = ""
            assert recipe_file.from_toml(recipe_file.to_toml(recipe), "test") == recipe
        assert len(sentence) < 500


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "seed = " + "9" * 5000, "seed = 1979-99-99"])
def test_a_file_that_no_parser_reads_is_named(text):
    with pytest.raises(RecipeError, match=r"^mine\.toml is not valid TOML"):
        recipe_file.from_toml(text, "mine.toml")


def test_a_list_of_texts_may_be_one_text():
    assert recipe_file.override(Recipe(), ["include=conv*"]).method.include == ("conv*",)
    assert recipe_file.override(Recipe(), ['include=["a", "b"]']).method.include == ("a", "b")
    assert recipe_file.from_toml("[method]\nexclude = 'a'", "here").method.exclude == ("a",)


def test_a_dry_run_is_no_setting():
    with pytest.raises(RecipeError, match="to make one, use 'iterand reproduce EXPERIMENT --scale tiny'"):
        recipe_file.override(Recipe(), ["scale=tiny"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["milestones=[1]"],
            "learning_rate.milestones is for learning_rate.schedule = 'multi_step', but it is 'cosine'",
        ),
        (["warmup_epochs=1"], "learning_rate.warmup_epochs is for learning_rate.schedule = 'warmup_cosine', but it is"),
        (
            ["rounds=9"],
            "method.rounds is for method.name = 'imp', but it is 'iterand'; leave it out, or set method.name",
        ),
        (
            ["sparsity_schedule_share=0.1"],
            "method.sparsity_schedule_share is for method.sparsity_schedule = 'linear' or",
        ),
        (["milestones=[1]", "learning_rate.schedule=multi_step"], None),
        (["rounds=3"], None),  # the default
    ],
)
def test_what_a_run_would_not_read_is_refused(settings, sentence, cli):
    options = [part for setting in settings for part in ("--set", setting)]
    code, _, err = cli("recipes", "digits", *options)
    assert (code, err.startswith(f"error: {sentence}")) == ((0, False) if sentence is None else (1, True))
