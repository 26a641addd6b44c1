"""Two ranks under real torchrun: they agree to the bit, do what one process does, and end together."""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore

import made_up_data
from distributed_worker import RECIPES, RECORDS, broken, recipe, small_data
from iterand.errors import IterandError
from iterand.lab.data.dataset import Dataset, TensorSplit
from iterand.lab.experiments.library import find_recipe
from iterand.lab.training import distributed, rank_errors, recipe_file
from iterand.lab.training.checkpoint import read_checkpoint
from iterand.lab.training.distributed import ALONE, Ranks, digest, joined
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.loop import steps_per_epoch
from iterand.lab.training.rank_errors import ReportedByOtherRank, error_to_raise
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.run import run
from iterand.lab.training.sync_batch_norm import share_batch_norms_

CPU = torch.device("cpu")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
FORKING = "import torch._dynamo; from torch.distributed.run import main; main()"  # once, and not in every rank
WORKER = Path(__file__).with_name("distributed_worker.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Everything that two ranks do, once."""
    folder = tmp_path_factory.mktemp("two")
    made_up_data.write_cifar_binary(folder / "data", made_up_data.cifar_records(RECORDS))
    broken("iterand", folder / "one, two", ALONE)
    done = subprocess.run([*TORCHRUN, str(WORKER), str(folder)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def one(two):
    """The same recipes in one process."""
    folder = two.parent / "one"
    with small_data():
        for name in RECIPES:
            run(recipe(name), RunFolder(folder / name), device=CPU, data_dir=two / "data")
    return folder


def seen(two):
    return [json.loads((two / f"rank-{number}.json").read_text()) for number in (0, 1)]


def record(folder):
    return json.loads((folder / "record.json").read_text())


def state(folder):
    return read_checkpoint(folder).tensors


def test_ranks_know_who_they_are(two):
    assert [rank["ranks"] for rank in seen(two)] == [[0, 2, True], [1, 2, False]]


def test_no_thread_is_left_that_would_abort_the_process_at_its_end(two):
    assert [rank["threads"] for rank in seen(two)] == [[], []]


@pytest.mark.parametrize("name", RECIPES)
def test_both_ranks_hold_the_same_bits(two, name):
    """Scores, weights and draws after several randomizations; batch norm statistics; what IMP pruned."""
    first, second = (rank["digests"][name] for rank in seen(two))
    assert first == second
    assert len(set(first)) > 4


@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_do_what_one_process_does(two, one, name):
    """Up to the order of sums: the same examples, redraws and masks; the scores and metrics as close as float32 is."""
    ours, alone = state(two / name), state(one / name)
    assert ours.keys() == alone.keys()
    for key, tensor in ours.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, alone[key], rtol=1e-3, atol=1e-4, msg=key)
        elif not key.startswith(("random", "correct")):
            assert torch.equal(tensor, alone[key]), key
    for mine, other in zip(record(two / name)["metrics"], record(one / name)["metrics"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
    a, b = record(two / name), record(one / name)
    assert a["result"]["test_loss"] == pytest.approx(b["result"]["test_loss"], rel=1e-4)
    assert a["recipe"] == b["recipe"]
    assert (a["environment"]["world_size"], b["environment"]["world_size"]) == (2, 1)


def test_where_no_sum_decides_two_ranks_are_bit_equal_to_one_process(two, one):
    """Weights, coins and redraws over 4 rounds of randomization, with scores that stay as they were drawn."""
    a, b = record(two / "still")["result"], record(one / "still")["result"]
    assert a["model_sha256"] == b["model_sha256"]
    assert state(two / "still")["model.classifier.parametrizations.weight.0.draw"].max() == 4


def test_a_broken_run_of_two_ranks_ends_like_an_unbroken_one(two):
    a, b = record(two / "two, two"), record(two / "iterand")
    assert (a["metrics"], a["result"]) == (b["metrics"], b["result"])


def test_one_rank_goes_on_with_a_run_of_two_and_the_other_way_round(two, one):
    end = record(one / "iterand")
    run(recipe("iterand"), RunFolder(two / "two, one"), device=CPU)
    for folder, size in (("two, one", 1), ("one, two", 2)):
        mixed = record(two / folder)
        assert mixed["environment"]["world_size"] == size
        for mine, other in zip(mixed["metrics"], end["metrics"], strict=True):
            assert mine == pytest.approx(other, rel=1e-4)
        for key, tensor in state(two / folder).items():
            if key.endswith("draw"):
                assert torch.equal(tensor, state(one / "iterand")[key])


@pytest.mark.parametrize("what", ["scores", "weights", "draws"])
def test_a_difference_is_caught_in_its_epoch_and_names_layer_and_ranks(two, what):
    for rank in seen(two):
        message = rank["poisoned"][what]
        assert message.startswith(f"after epoch 2 the {what} of 'classifier.weight' differ between rank 0 and rank 1;")
        assert "--fresh" in message


def test_ranks_with_other_settings_are_refused(two):
    for rank in seen(two):
        assert rank["mismatched"] == (
            "rank 1 differs from rank 0: training.batch_size is 32 here and 300 there; give all ranks the same recipe "
            "and data"
        )


def test_a_layer_that_takes_no_part_is_named(two):
    for rank in seen(two):
        assert rank["unused"].startswith("'unused.weight' takes no part in a training step, and ranks average the")


def test_a_batch_norm_of_another_kind_is_refused():
    class Own(nn.BatchNorm1d):
        pass

    with pytest.raises(IterandError, match=r"'1' is a Own, a batch norm that cannot use the statistics of all ranks"):
        share_batch_norms_(nn.Sequential(nn.Linear(2, 2), Own(2)), CPU)


def test_batch_norm_over_two_ranks_is_that_of_the_whole_batch(two):
    """Outputs, gradients, running statistics and the outputs in evaluation, with 3 and 5 examples."""
    for rank in seen(two):
        assert len(rank["batch norm"]) == 12
        assert max(rank["batch norm"].values()) < 1e-5


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 100))
def test_parts_are_contiguous_cover_every_batch_once_and_weigh_to_its_mean(count, size, examples):
    values = torch.arange(examples, dtype=torch.float64)
    split, order = (
        TensorSplit(values, values),
        torch.randperm(examples, generator=torch.Generator().manual_seed(examples)),
    )
    whole = [order[start : start + size] for start in range(0, examples, size)]
    ranks = [Ranks(number, count) for number in range(count)]
    data = Dataset(split, split, split, classes=2)
    recipe = recipe_file.override(Recipe(), [f"batch_size={size}", "drop_last=false"])
    if min(map(len, whole)) < count:
        with pytest.raises(ValueError, match=f"{count} ranks cannot share; start fewer"):
            steps_per_epoch(recipe, data, count)
        return
    assert steps_per_epoch(recipe, data, count) == len(whole)
    streams = [rank.batches(split, order, size) for rank in ranks]
    for expected in whole:
        parts = [next(stream).labels for stream in streams]
        assert torch.cat(parts).tolist() == expected.tolist()
        assert {rank.whole(len(part)) for rank, part in zip(ranks, parts)} == {len(expected)}
        losses = [rank.weighted(part.mean(), len(part)) for rank, part in zip(ranks, parts)]
        assert float(sum(losses)) / count == pytest.approx(float(expected.double().mean()))
    assert [next(stream, None) for stream in streams] == [None] * count
    shares = [rank.share_of(examples) for rank in ranks]
    assert torch.cat(shares).tolist() == list(range(examples))


def test_nothing_left_of_an_epoch_is_no_batch():
    split = TensorSplit(torch.zeros(3), torch.zeros(3))
    for ranks in (ALONE, Ranks(0, 2)):
        assert list(ranks.batches(split, torch.arange(0), 2)) == []


def test_each_rank_and_iteration_draws_its_own_and_again_the_same():
    def drawn(number, iteration):
        Ranks(number, 2).seed(0, iteration)
        return torch.rand(3).tolist()

    before = torch.get_rng_state()
    places = [(number, iteration) for number in (0, 1) for iteration in (0, 1)]
    assert len({tuple(drawn(*place)) for place in places}) == 4
    assert drawn(1, 1) == drawn(1, 1)
    torch.set_rng_state(before)
    ALONE.seed(0, 0)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=50))
def test_a_digest_is_a_sum_of_words_by_odd_numbers(words):
    total = sum(word * (2 * place + 1) for place, word in enumerate(words))
    assert int(digest(torch.tensor(words, dtype=torch.int32))) % (1 << 64) == total % (1 << 64)


@pytest.mark.parametrize("tensor", [torch.zeros(70_000), torch.zeros(3, dtype=torch.bool), torch.tensor(1)], ids=str)
def test_a_digest_sees_the_last_bit(tensor):
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    assert int(digest(tensor)) != int(digest(changed))


class Clock:
    """A clock that goes on only while all ranks sleep, so that none is too late, however slow the machine is."""

    def __init__(self, ranks):
        self.now, self.ranks, self.sleeping = 0.0, ranks, []
        self.changed = threading.Condition()

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        with self.changed:
            until = self.now + seconds
            self.sleeping.append(until)
            self._go_on()
            self.changed.wait_for(lambda: self.now >= until)

    def leave(self):
        """A rank has ended."""
        with self.changed:
            self.ranks -= 1
            self._go_on()

    def _go_on(self):
        if self.sleeping and len(self.sleeping) == self.ranks:
            self.now = min(self.sleeping)
            self.sleeping = [until for until in self.sleeping if until > self.now]
            self.changed.notify_all()


@pytest.fixture
def ended(monkeypatch):
    """What each rank raises in the end, if this went wrong on it; nothing of a rank that was killed."""

    def ended(*errors):
        store = HashStore()
        ranks = [(number, error) for number, error in enumerate(errors) if error is not None]
        clock = Clock(len(ranks))
        monkeypatch.setattr(rank_errors, "time", clock)

        def end(rank):
            try:
                return error_to_raise(store, rank[0], len(errors), rank[1])
            finally:
                clock.leave()

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(end, ranks))

    return ended


LOST = RuntimeError("[pair.cc in gloo] Connection closed by peer")


def test_an_error_on_all_ranks_is_said_by_the_first(ended):
    first, second = ended(ValueError("wrong"), ValueError("wrong"))
    assert str(first) == "wrong"
    assert isinstance(second, ReportedByOtherRank)


def test_an_error_on_one_rank_is_said_by_it(ended):
    first, second = ended(LOST, IterandError("no data here"))
    assert isinstance(first, ReportedByOtherRank)
    assert str(second) == "rank 1: no data here"


def test_ranks_that_are_gone_are_named_by_the_lowest_that_is_left(ended):
    second, third = ended(None, LOST, LOST, None)
    assert str(second).startswith("ranks 0, 3 ended without a word")
    assert "resumes from the last checkpoint" in str(second)
    assert isinstance(third, ReportedByOtherRank)


def test_ranks_that_only_lost_contact_say_so(ended):
    first, second = ended(LOST, LOST)
    assert "lost contact with each other ([pair.cc in gloo] Connection closed by peer)" in str(first)
    assert isinstance(second, ReportedByOtherRank)


def test_a_bug_is_not_hidden(ended):
    first, second = ended(LOST, KeyError("bug"))
    assert isinstance(second, KeyError)
    assert isinstance(first, ReportedByOtherRank)


def test_one_process_is_one_rank(monkeypatch):
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "8"}):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with joined() as ranks:
            assert ranks is ALONE
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("init_sync", [False, True])
def test_nothing_is_broadcast_at_the_start_where_torch_lets_it_be(monkeypatch, init_sync):
    class Parallel:  # torch 2.6 has no init_sync
        def __init__(self, module, broadcast_buffers=True, **options):
            self.seen = {"broadcast_buffers": broadcast_buffers}

    class Later(Parallel):
        def __init__(self, module, broadcast_buffers=True, init_sync=True, **options):
            self.seen = {"broadcast_buffers": broadcast_buffers, "init_sync": init_sync}

    monkeypatch.setattr(distributed, "DistributedDataParallel", Later if init_sync else Parallel)
    seen = Ranks(0, 2).parallel(nn.Linear(2, 2), CPU).seen
    assert seen == {"broadcast_buffers": False} | ({"init_sync": False} if init_sync else {})


def test_a_rank_takes_its_own_gpu_or_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    cuda = torch.device("cuda")
    assert Ranks(5, 8, 1).device(cuda) == torch.device("cuda:1")
    assert Ranks(5, 8, 1).device(CPU) == CPU
    assert ALONE.device(torch.device("cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="use --device cuda"):
        Ranks(1, 2, 1).device(torch.device("cuda:0"))
    with pytest.raises(ValueError, match="2 GPUs, but more ranks; start at most 2"):
        Ranks(2, 3, 2).device(cuda)


def train(folder, ends, *options):
    """The command under torchrun, which ends as ``distributed_worker.py`` says: its exit code, and what it prints."""
    changed = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = ["train", "digits", "--device", "cpu", "--out", str(folder), *changed]
    forking = [sys.executable, "-c", FORKING, *TORCHRUN[3:], "--run-path", "--start-method", "fork"]
    done = subprocess.run(
        [*forking, *options, str(WORKER), ends, *arguments], env=ENVIRONMENT, capture_output=True, text=True
    )
    return done.returncode, done.stdout, ours(done.stderr)


def ours(err):
    """What iterand says, without torchrun's own report; no traceback goes through it."""
    assert not re.search(r'File ".*iterand.(cli|training|experiments)', err)
    return [line for line in err.splitlines() if line.startswith(("error:", "stopped", "warning:"))]


SETTINGS = ["epochs=4", "learning_rate.initial=0", "weight_decay=0"]  # bit-equal whatever the number of ranks


def test_killed_restarted_stopped_and_finished_by_one_process(tmp_path):
    folder = tmp_path / "run"
    code, out, (said,) = train(folder, "1")
    assert said.startswith("error: rank 1 ended without a word: killed, out of memory, or cut off; start the same")
    assert (code, out) == (1, "")
    assert read_checkpoint(folder).state["epoch"] == 1

    _, _, (killed, stopped) = train(folder, "0,stop", "--max-restarts", "1")
    assert killed.startswith("error: rank 0 ended without a word")
    assert stopped == "stopped and saved; run the same command to resume"
    assert read_checkpoint(folder).state["epoch"] == 2

    settled = recipe_file.override(find_recipe("digits"), SETTINGS)
    result = run(settled, RunFolder(folder), device=CPU)["result"]
    assert result == run(settled, RunFolder(tmp_path / "whole"), device=CPU)["result"]
