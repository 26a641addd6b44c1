"""LSTM and BiLSTM for text (Appendix C.6)."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from .layers import scaled


class LSTMClassifier(nn.Module):
    """Embedding of 100, one LSTM layer of 256ρ in one direction or both, dropout, linear layer.

    Two classes need one logit; the sigmoid of the paper's table belongs to the loss.
    """

    def __init__(
        self,
        *,
        bidirectional: bool,
        width_factor: float = 1.0,
        classes: int = 2,
        vocabulary_size: int = 25_002,  # the 25,000 most frequent words, unknown and padding
    ) -> None:
        super().__init__()
        if vocabulary_size < 1:
            raise ValueError(f"vocabulary_size is {vocabulary_size}, but it must be at least 1")
        hidden = scaled(256, width_factor)
        self.embedding = nn.Embedding(vocabulary_size, 100)
        self.recurrent = nn.LSTM(100, hidden, batch_first=True, bidirectional=bidirectional)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(hidden * (2 if bidirectional else 1), 1 if classes == 2 else classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits of token ids [batch, time], of which the first `lengths` [batch] of each row count.

        Packing needs the lengths on the CPU: kept there, they cost no wait for the device.
        """
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.recurrent(packed)
        logits: Tensor = self.classifier(self.dropout(torch.cat(tuple(last), dim=1)))
        return logits
