"""LSTM and BiLSTM for text (Appendix C.6)."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from iterand.lab.networks.convolutional import scaled


class LSTMClassifier(nn.Module):
    """An embedding of 100, one LSTM layer of 256ρ in one or both directions, dropout, a linear layer.

    Two classes need one logit; the sigmoid of the paper's table is part of the loss. Embeddings are multiplied by
    ``word_scale``. Forget gates start with a bias of ``forget_bias``: at 0, a gate forgets half of the state at each
    word.
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
        self.register_buffer("word_scale", torch.tensor(word_scale))  # a buffer, so that a ticket contains it
        self.embedding = nn.Embedding(vocabulary_size, 100)
        self.recurrent = nn.LSTM(100, hidden, batch_first=True, bidirectional=bidirectional)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(hidden * (2 if bidirectional else 1), 1 if classes == 2 else classes)

    @torch.no_grad()
    def set_gates_(self) -> None:
        """Set the bias of the forget gates to ``forget_bias``."""
        hidden = self.recurrent.hidden_size
        for name, bias in self.recurrent.named_parameters():
            if name.startswith("bias_ih"):
                bias[hidden : 2 * hidden] = self.forget_bias

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits for token ids [batch, time]; the rest of a row after its length (`lengths` [batch]) is padding.

        Lengths on the CPU avoid a synchronization with the device.
        """
        embedded, lengths = self.embedding(tokens) * self.word_scale, lengths.cpu()
        if (lengths < 1).any():
            raise ValueError("a text has no word; leave it out, or give it one that stands for nothing")
        last = self._packed(embedded, lengths) if embedded.is_cuda else self._padded(embedded, lengths)
        logits: Tensor = self.classifier(self.dropout(torch.cat(last, dim=1)))
        return logits

    def _packed(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """The last state of each direction, by torch's packed sequences."""
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.recurrent(packed)
        return tuple(last)

    def _padded(self, embedded: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """The same on padded texts: on a CPU, the time of gradients of packed texts is quadratic in their length."""
        layer, times = self.recurrent, torch.arange(embedded.shape[1])
        reversed_times = (lengths[:, None] - 1 - times).clamp(min=0)
        rows = torch.arange(len(lengths))
        last = []
        for suffix in ("l0", "l0_reverse")[: 2 if layer.bidirectional else 1]:
            weights = [getattr(layer, f"{kind}_{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            words = embedded if suffix == "l0" else embedded[rows[:, None], reversed_times]
            zeros = embedded.new_zeros(1, len(lengths), layer.hidden_size)
            states, _, _ = torch.lstm(words, (zeros, zeros), weights, True, 1, 0.0, self.training, False, True)
            last.append(states[rows, lengths - 1])  # the rest is padding
        return tuple(last)
