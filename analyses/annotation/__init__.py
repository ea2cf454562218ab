"""What people or a corpus judge: concepts of value vectors, and whether predictions fit."""

from annotation.concept_sheets import Annotation as Annotation
from annotation.concept_sheets import read_concept_sheets as read_concept_sheets
from annotation.concept_sheets import sheet_code as sheet_code
from annotation.concept_sheets import write_concept_sheets as write_concept_sheets
from annotation.concepts import MIN_PATTERN_TOKENS as MIN_PATTERN_TOKENS
from annotation.concepts import annotator_agreement as annotator_agreement
from annotation.concepts import draw_concept_sample as draw_concept_sample
from annotation.concepts import read_concept_sample as read_concept_sample
from annotation.concepts import tally_concepts as tally_concepts
from annotation.descriptions import WordNet as WordNet
from annotation.patterns import distinct_concepts as distinct_concepts
from annotation.patterns import find_patterns as find_patterns
from annotation.patterns import pattern_shares as pattern_shares
from annotation.patterns import search_concepts as search_concepts
from annotation.plausibility import make_plausibility_sheet as make_plausibility_sheet
from annotation.plausibility import plausibility_rates as plausibility_rates
from annotation.plausibility import read_plausibility_sheet as read_plausibility_sheet
from annotation.sheets import write_sheet as write_sheet
from annotation.word_similarity import WordSimilarity as WordSimilarity
