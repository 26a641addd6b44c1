"""Building a network without memory for its tensors."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutMemory(TorchFunctionMode):
    """Puts every tensor on the meta device, also one for which another device is asked."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with its device replaced."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return function(*args, **kwargs)
