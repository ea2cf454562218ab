from .stacks import STACKS as STACKS
from .stacks import Stack as Stack
