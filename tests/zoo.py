"""Import timm where torchvision is missing: timm's models need a few of its names, none of its functions."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

STAND_INS = Path(__file__).parent / "stand_ins"


def import_timm() -> ModuleType:
    """timm, imported with a stand-in for torchvision if there is none; other packages do not get to see that."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    else:
        return importlib.import_module("timm")
    sys.path.insert(0, str(STAND_INS))
    try:
        return importlib.import_module("timm")
    finally:
        sys.path.remove(str(STAND_INS))
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
