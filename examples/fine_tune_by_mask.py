"""Fine-tune a BERT-like encoder of Hugging Face by a mask: no weight of it changes, and the task is a small file.

python examples/fine_tune_by_mask.py sentence-transformers/all-MiniLM-L6-v2 train.csv test.csv    # columns text, label
"""

import argparse
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoTokenizer

import iterand


class Classifier(torch.nn.Module):
    """An encoder, and a linear head on the mean of its tokens."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(name, add_pooling_layer=False)
        self.head = torch.nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits for token numbers and for which of them count."""
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self.head((hidden * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True))


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("encoder", help="its name on the Hub, or its folder")
parser.add_argument("files", nargs=2, metavar="CSV", help="one for training, one for the test; columns text and label")
name, files = vars(parser.parse_args()).values()
device, tokenizer, splits = "cuda" if torch.cuda.is_available() else "cpu", AutoTokenizer.from_pretrained(name), []
torch.manual_seed(0)
for path in files:
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [row["text"] for row in rows]
    inputs = tokenizer(texts, truncation=True, max_length=200, padding=True, return_tensors="pt")
    labels = torch.tensor([int(row["label"]) for row in rows])
    splits.append(TensorDataset(*(one.to(device) for one in (inputs["input_ids"], inputs["attention_mask"], labels))))
classes = int(splits[0].tensors[2].max()) + 1
model = Classifier(name, classes).to(device)
iterand.prune_(model, 0.05, weights="existing", include="encoder.encoder.*", trainable="head*")
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3, weight_decay=0)
step = iterand.make_step(model, optimizer, F.cross_entropy, precision=torch.bfloat16 if device == "cuda" else None)
for _ in range(3):
    for tokens, mask, labels in DataLoader(splits[0], batch_size=32, shuffle=True):
        step((tokens, mask), labels)

iterand.save_ticket(model, "task.ticket", base=name)
plain = iterand.load_ticket("task.ticket", Classifier(name, classes)).to(device).eval()
with torch.no_grad():
    right = sum(int((plain(a, b).argmax(1) == y).sum()) for a, b, y in DataLoader(splits[1], batch_size=64))
size = Path("task.ticket").stat().st_size / 1000
print(f"{100 * right / len(splits[1]):.2f} % of the test texts, {size:.1f} kB in task.ticket")
