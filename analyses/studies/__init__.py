"""Shared by analysis scripts: studies, reports, stored results, and common options."""

from studies.cells import Cells as Cells
from studies.scripts import SECONDS as SECONDS
from studies.scripts import AtlasText as AtlasText
from studies.scripts import Clustering as Clustering
from studies.scripts import Patched as Patched
from studies.scripts import Report as Report
from studies.scripts import TwoOrMore as TwoOrMore
from studies.scripts import run_study as run_study
from studies.scripts import show as show
from studies.study import Model as Model
from studies.study import Study as Study
from studies.study import head_pairs as head_pairs
from studies.tables import LayerRow as LayerRow
from studies.tables import bootstrap as bootstrap
from studies.tables import layer_table as layer_table
