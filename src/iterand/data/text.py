"""From text to numbers: words, and the vocabulary that counts them."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

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
