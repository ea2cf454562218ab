"""Shared by scripts of paper A: replaced sub-modules and predictions of layers."""

from paper_a.predictions import masked_accuracy as masked_accuracy
from paper_a.predictions import prediction_confidence as prediction_confidence
from paper_a.predictions import predictions_side_by_side as predictions_side_by_side
from paper_a.predictions import prompt_texts as prompt_texts
from paper_a.predictions import read_predictions as read_predictions
from paper_a.predictions import top_predictions as top_predictions
