"""Early exit by sub-updates, classifiers and others (paper B, section 6.2, Table 6)."""

from exits.classifiers import FEWEST_EVENTS as FEWEST_EVENTS
from exits.classifiers import FOLDS as FOLDS
from exits.classifiers import LASSO as LASSO
from exits.classifiers import PENALTY_STRENGTHS as PENALTY_STRENGTHS
from exits.classifiers import RIDGE as RIDGE
from exits.comparison import classifier_sites as classifier_sites
from exits.comparison import compare_exits as compare_exits
from exits.outcomes import EvaluatedExits as EvaluatedExits
from exits.outcomes import summarize_exits as summarize_exits
from exits.readings import EXIT_CLUSTERS as EXIT_CLUSTERS
from exits.readings import compare_readings as compare_readings
