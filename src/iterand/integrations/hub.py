"""Tickets on the Hugging Face Hub: a folder of ``model.ticket``, ``config.json`` and a model card ``README.md``.

``save_pretrained`` and ``from_pretrained`` take any model. A class of your own that inherits ``TicketHubMixin`` has
both as methods, and ``push_to_hub``. Nothing in a folder runs code: the caller gives the model or its class.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn

from iterand.errors import TicketError, extra, first_line
from iterand.files import atomic_write
from iterand.summarizing import summary
from iterand.surgery import masked_layers
from iterand.ticket import load_ticket, save_ticket

with extra("hub", "the Hugging Face Hub"):
    from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

Model = TypeVar("Model", bound=nn.Module)
TICKET = "model.ticket"
_TAGS = ["iterand", "pruning"]
_CARD = """---
{{ card_data }}
---

# {{ name }}

This network is a subnetwork of {{ origin }}, found by pruning with IteRand.
`model.ticket` holds its mask and rebuilds it exactly.

{{ numbers }}

```python
from iterand.integrations.hub import from_pretrained

model = from_pretrained("this repository or folder", {{ class_name }}())
```
"""


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> None:
    """Save a masked model as a folder that ``huggingface_hub.upload_folder`` can publish.

    Args:
        model: A model that ``prune_`` masked.
        folder: Where to write; it is made if it does not exist. A ``README.md`` that is there already stays.
        config: What builds the model, JSON-serializable; for readers of the folder, ``from_pretrained`` ignores it.
        metrics: Results such as the accuracy, for the ticket and the card.
    """
    target = Path(folder)
    try:
        text = json.dumps(dict(config or {}), indent=2, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config cannot be written as JSON: {error}; give numbers, strings, lists and dicts") from None
    card = _card(model, ModelCardData(library_name="iterand", tags=_TAGS), metrics)
    target.mkdir(parents=True, exist_ok=True)
    save_ticket(model, target / TICKET, metrics=metrics)
    atomic_write(target / "config.json", f"{text}\n".encode())
    if not (target / "README.md").exists():
        atomic_write(target / "README.md", str(card).encode())


def from_pretrained(source: str | os.PathLike[str], model: Model, **download: Any) -> Model:
    """Load the ticket of a folder, or of a repository on the Hub, into an unmasked model; gives it in ``eval()`` mode.

    Args:
        source: A folder, or a repository such as ``"user/name"``.
        model: A model of the same architecture, with any weights; for a ticket on existing weights, with these.
        download: Arguments of ``huggingface_hub.hf_hub_download``, such as ``revision``.
    """
    load_ticket(_find_ticket(source, **download), model).eval()
    return model


class TicketHubMixin(  # type: ignore[call-arg]
    ModelHubMixin, library_name="iterand", tags=list(_TAGS), model_card_template=_CARD
):
    """``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` for a model class of your own.

    ``config.json`` holds the arguments of the constructor, as with ``huggingface_hub.PyTorchModelHubMixin``. What
    ``from_pretrained`` gives is an unmasked module in ``eval()`` mode.
    """

    def generate_model_card(self, *args: Any, **fields: Any) -> ModelCard:
        """The card, with the numbers of the ticket."""
        info = self._hub_mixin_info
        return _card(self, info.model_card_data, None, info.model_card_template, **fields)

    def _save_pretrained(self, save_directory: Path) -> None:
        assert isinstance(self, nn.Module)
        save_ticket(self, save_directory / TICKET)

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        **arguments: Any,
    ) -> Self:
        older = {name: arguments.pop(name, None) for name in ("proxies", "resume_download")}  # before release 1.0
        path = _find_ticket(
            model_id,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            **{name: value for name, value in older.items() if value is not None},
        )
        model = cls(**arguments)
        load_ticket(path, model).eval()
        return model


def _find_ticket(source: str | os.PathLike[str], **download: Any) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if not (folder / TICKET).is_file():
            raise TicketError(f"{folder} has no {TICKET}; save_pretrained writes one")
        return folder / TICKET
    try:
        return Path(hf_hub_download(os.fspath(source), TICKET, **download))
    except HFValidationError:
        raise TicketError(f"{os.fspath(source)!r} is no folder that exists, and no repository 'user/name'") from None
    except LocalEntryNotFoundError:
        raise TicketError(
            f"the {TICKET} of {os.fspath(source)!r} is not in the cache, and the Hub is not reached; check the network "
            "connection, HF_HUB_OFFLINE and local_files_only="
        ) from None
    except (EntryNotFoundError, RepositoryNotFoundError) as error:
        raise TicketError(f"{os.fspath(source)!r} has no {TICKET} on the Hub: {first_line(error)}") from None


@torch.no_grad()
def _card(
    model: Any, data: ModelCardData, metrics: Mapping[str, Any] | None, template: str = _CARD, **fields: Any
) -> ModelCard:
    found = summary(model)
    lines = [f"- {found.kept:,} of {found.total:,} weights kept"]
    lines += [f"- {name}: {value}" for name, value in (metrics or {}).items()]
    existing = any(layer.parametrization.is_existing for layer in masked_layers(model).values())
    usual = {
        "name": type(model).__name__,
        "class_name": type(model).__name__,
        "origin": "the weights of a model that you load first" if existing else "random weights",
        "numbers": "\n".join(lines),
    }
    return ModelCard.from_template(data, template_str=template, **usual | fields)
