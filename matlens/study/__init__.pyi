from .plan import Shape as Shape
from .plan import plan_study as plan_study
from .steps import fit_maps as fit_maps
from .steps import origin_of as origin_of
from .study import Study as Study
from .study import cluster_values as cluster_values
from .study import slug as slug
