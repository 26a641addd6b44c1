"""Names that timm's data module subclasses or refers to when it is imported."""

import sys
from enum import Enum


class InterpolationMode(Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ToTensor:
    pass


functional = sys.modules[__name__]
sys.modules[f"{__name__}.functional"] = functional
