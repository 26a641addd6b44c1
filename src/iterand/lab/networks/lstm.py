"""LSTM and BiLSTM for text (Appendix C.6)."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from iterand.lab.networks.convolutional import scaled


class LSTMClassifier(nn.Module):
    """Embedding of 100, one LSTM layer of 256ρ in one direction or both, dropout, linear layer.

    Two classes need one logit; the sigmoid of the paper's table belongs to the loss. Words are multiplied by
    ``word_scale``, and forget gates begin with a bias of ``forget_bias``: at 0 a gate lets half of all go at each word.
    """

    def __init__(
        self,
        *,
        bidirectional: bool,
        width_factor: float = 1.0,
        classes: int = 2,
        vocabulary_size: int = 25_002,  # the 25,000 most frequent words, unknown and padding
        forget_bias: float = 0.0,
        word_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if vocabulary_size < 1:
            raise ValueError(f"vocabulary_size is {vocabulary_size}, but it must be at least 1")
        hidden = scaled(256, width_factor)
        self.forget_bias = forget_bias
        self.word_scale: Tensor
        self.register_buffer("word_scale", torch.tensor(word_scale))  # so that a ticket knows it
        self.embedding = nn.Embedding(vocabulary_size, 100)
        self.recurrent = nn.LSTM(100, hidden, batch_first=True, bidirectional=bidirectional)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(hidden * (2 if bidirectional else 1), 1 if classes == 2 else classes)

    @torch.no_grad()
    def set_gates_(self) -> None:
        """Give the forget gates their bias."""
        hidden = self.recurrent.hidden_size
        for name, bias in self.recurrent.named_parameters():
            if name.startswith("bias_ih"):
                bias[hidden : 2 * hidden] = self.forget_bias

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits of token ids [batch, time], of which the first `lengths` [batch] of each row count.

        They are known on the CPU: kept there, they cost no wait for the device.
        """
        embedded, lengths = self.embedding(tokens) * self.word_scale, lengths.cpu()
        if (lengths < 1).any():
            raise ValueError("a text has no word; leave it out, or give it one that stands for nothing")
        last = self._packed(embedded, lengths) if embedded.is_cuda else self._padded(embedded, lengths)
        logits: Tensor = self.classifier(self.dropout(torch.cat(last, dim=1)))
        return logits

    def _packed(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """The last state of each direction."""
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.recurrent(packed)
        return tuple(last)

    def _padded(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """The same by another way: on a CPU gradients of packed texts take a time that is quadratic in their length."""
        layer, times = self.recurrent, torch.arange(embedded.shape[1])
        backwards = (lengths[:, None] - 1 - times).clamp(min=0)
        rows = torch.arange(len(lengths))
        found = []
        for suffix in ("l0", "l0_reverse")[: 2 if layer.bidirectional else 1]:
            weights = [getattr(layer, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            words = embedded if suffix == "l0" else embedded[rows[:, None], backwards]
            nothing = embedded.new_zeros(1, len(lengths), layer.hidden_size)
            states, _, _ = torch.lstm(words, (nothing, nothing), weights, True, 1, 0.0, self.training, False, True)
            found.append(states[rows, lengths - 1])  # what comes after is padding
        return tuple(found)
