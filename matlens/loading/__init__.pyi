from .bridges import wrap as wrap
from .loading import load as load
from .places import SMOLLM2 as SMOLLM2
from .places import locate as locate
from .places import smollm2_path as smollm2_path
