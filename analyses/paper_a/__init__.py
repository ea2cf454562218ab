"""What the scripts of paper A compute: parts replaced, schemes, attention sinks, fits and costs."""

from paper_a.alternation import scheme_quality as scheme_quality
from paper_a.costs import exit_costs as exit_costs
from paper_a.fits import compare_fits as compare_fits
from paper_a.fits import fit_drawn_and_all as fit_drawn_and_all
from paper_a.fits import fit_quality_by_size as fit_quality_by_size
from paper_a.fits import fits_side_by_side as fits_side_by_side
from paper_a.heads import head_ablation as head_ablation
from paper_a.predictions import masked_accuracy as masked_accuracy
from paper_a.predictions import prediction_confidence as prediction_confidence
from paper_a.predictions import predictions_table as predictions_table
from paper_a.predictions import prompt_texts as prompt_texts
from paper_a.predictions import read_predictions as read_predictions
from paper_a.predictions import side_by_side as side_by_side
from paper_a.predictions import top_predictions as top_predictions
from paper_a.sinks import fit_quality_without_sinks as fit_quality_without_sinks
from paper_a.sinks import later_sinks as later_sinks
from paper_a.sinks import sink_norms as sink_norms
from paper_a.submodules import CONTEXTUAL as CONTEXTUAL
from paper_a.submodules import precision_by_layer as precision_by_layer
from paper_a.submodules import rows_of_replacement as rows_of_replacement
from paper_a.submodules import submodule_alone as submodule_alone
from paper_a.submodules import submodule_layers as submodule_layers
from paper_a.submodules import submodule_positions as submodule_positions
