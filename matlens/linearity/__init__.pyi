from .atlas import atlas_seconds as atlas_seconds
from .atlas import linearity_atlas as linearity_atlas
from .ranking import rank_correlations as rank_correlations
