"""Texts as sequences of token ids: tokenizer, vocabulary, and batches of similar length."""

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
_POOL = 100  # batches whose texts are sorted by length

_WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")

Tokens = NDArray[np.int16]


def tokenize(text: str) -> list[str]:
    """Lower-case words, with the apostrophes inside them, and single punctuation marks; a line break is a space."""
    return _WORD.findall(text.replace("<br />", " ").lower())


class Vocabulary:
    """Words and their token ids: 0 is unknown, 1 is padding, the words follow in the given order."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._ids = {word: token for token, word in enumerate(self.words, start=2)}

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
        """The token ids of a text; a text without words is one unknown word, since a network needs at least one."""
        ids = [self._ids.get(word, UNKNOWN) for word in tokenize(text)]
        return np.array(ids or [UNKNOWN], np.int16)


def arranged(split: Split, order: Tensor, size: int) -> Tensor:
    """The order for training in batches: unchanged for images; texts of similar length are grouped."""
    return split.grouped(order, size) if isinstance(split, TextSplit) else order


class TextSplit:
    """Texts as token ids: ``tokens`` is their concatenation, text n has ``lengths[n]`` tokens.

    ``lengths`` is on the CPU, everything else on the device.
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
        """The number of tokens of the longest text."""
        return int(self._lengths.max())

    def grouped(self, order: Tensor, size: int) -> Tensor:
        """Reorder so that texts of similar length share a batch, since a batch is padded to its longest text.

        The texts of every hundred batches are sorted by length; the order of the batches is as random as the given
        order. A smaller last batch keeps its texts.
        """
        whole = len(order) - len(order) % size
        texts, rest = order.cpu()[:whole], order.cpu()[whole:]
        batches, positions = [], []
        for start in range(0, len(texts), _POOL * size):
            pool = texts[start : start + _POOL * size]
            by_length = self._lengths[pool].argsort(stable=True)
            batches.append(pool[by_length].view(-1, size))
            positions.append(start + by_length.view(-1, size)[:, 0])
        if not batches:
            return order
        mixed = torch.cat(batches)[torch.cat(positions).argsort()]
        return torch.cat([mixed.flatten(), rest]).to(order.device)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of (tokens [batch, time], lengths on the CPU), without augmentation.

        The CPU knows the longest text of a batch, so there is no synchronization with the device.
        """
        device = self.labels.device
        for on_cpu, index in zip(torch.split(order.cpu(), size), torch.split(order.to(device), size)):
            lengths = self._lengths[on_cpu]
            positions = self._starts[index][:, None] + torch.arange(int(lengths.max()), device=device)
            tokens = self._tokens[positions.clamp(max=len(self._tokens) - 1)].long()
            tokens.masked_fill_(positions >= self._ends[index][:, None], PADDING)
            yield Batch((tokens, lengths), self.labels[index])
