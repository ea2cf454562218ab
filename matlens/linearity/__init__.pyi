from .atlas import atlas_seconds as atlas_seconds
from .atlas import linearity_atlas as linearity_atlas
from .atlas import sum_parts as sum_parts
from .parts import model_parts as model_parts
from .ranking import rank_correlations as rank_correlations
