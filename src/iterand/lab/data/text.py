"""Texts as sequences of numbered words, in batches of similar length."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.lab.data.dataset import Batch, Random, Split

UNKNOWN = 0
PADDING = 1
VOCABULARY_WORDS = 25_000

_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")

Tokens = NDArray[np.int16]


def tokenize(text: str) -> list[str]:
    """Lower-case words, with the apostrophes inside them, and single punctuation marks; a line break is a space."""
    return _WORD.findall(text.replace("<br />", " ").lower())


class Vocabulary:
    """Words and their numbers: 0 is an unknown word, 1 padding, the others follow in the order given."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._numbers = {word: number for number, word in enumerate(self.words, start=2)}

    @classmethod
    def most_frequent(cls, texts: Iterable[str], count: int = VOCABULARY_WORDS) -> "Vocabulary":
        """The most frequent words of the texts; of equally frequent ones the first in the alphabet."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(tokenize(text))
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls([word for word, _ in ranked[:count]])

    def __len__(self) -> int:
        return len(self.words) + 2

    def encode(self, text: str) -> Tokens:
        """The numbers of a text's words; a text without any is one unknown word, since no network reads nothing."""
        numbers = [self._numbers.get(word, UNKNOWN) for word in tokenize(text)]
        return np.array(numbers or [UNKNOWN], np.int16)


_POOL = 100  # batches whose texts are sorted by length


def arranged(split: Split, order: Tensor, size: int) -> Tensor:
    """The order in which examples are best taken in batches: as it is, but for texts."""
    return split.grouped(order, size) if isinstance(split, TextSplit) else order


class TextSplit:
    """Texts as numbers of words: ``tokens`` holds one text after the other, the n-th of ``lengths[n]`` words.

    ``lengths`` stays on the CPU, all else on the device.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, labels: Tensor, vocabulary: Vocabulary) -> None:
        self.labels = labels
        self.vocabulary = vocabulary
        self._tokens = tokens
        self._lengths = lengths
        ends = lengths.cumsum(0).to(labels.device)
        self._starts, self._ends = ends - lengths.to(labels.device), ends

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def longest(self) -> int:
        """How many words the longest text has."""
        return int(self._lengths.max())

    def grouped(self, order: Tensor, size: int) -> Tensor:
        """The same order, but texts of about one length share a batch, which is as long as its longest.

        Of every hundred batches the texts are sorted by length; the batches themselves come in an order as random as
        the one that was given. What is left over for a smaller last batch stays there.
        """
        whole = len(order) - len(order) % size
        texts, left_over = order.cpu()[:whole], order.cpu()[whole:]
        batches, places = [], []
        for start in range(0, len(texts), _POOL * size):
            pool = texts[start : start + _POOL * size]
            by_length = self._lengths[pool].argsort(stable=True)
            batches.append(pool[by_length].view(-1, size))
            places.append(start + by_length.view(-1, size)[:, 0])
        if not batches:
            return order
        mixed = torch.cat(batches)[torch.cat(places).argsort()]
        return torch.cat([mixed.flatten(), left_over]).to(order.device)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of (tokens [batch, time], lengths on the CPU); nothing is augmented.

        A batch is as long as its longest text, which the CPU knows: no batch waits for the device.
        """
        device = self.labels.device
        for here, there in zip(torch.split(order.cpu(), size), torch.split(order.to(device), size)):
            lengths = self._lengths[here]
            places = self._starts[there][:, None] + torch.arange(int(lengths.max()), device=device)
            tokens = self._tokens[places.clamp(max=len(self._tokens) - 1)].long()
            tokens.masked_fill_(places >= self._ends[there][:, None], PADDING)
            yield Batch((tokens, lengths), self.labels[there])
