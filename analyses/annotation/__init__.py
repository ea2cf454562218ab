"""Concepts of value vectors, by annotators or by a corpus."""

from annotation.concept_sheets import Annotation as Annotation
from annotation.concept_sheets import read_concept_sheets as read_concept_sheets
from annotation.concept_sheets import sheet_code as sheet_code
from annotation.concept_sheets import wordnet as wordnet
from annotation.concept_sheets import write_concept_sheets as write_concept_sheets
from annotation.concepts import MIN_PATTERN_TOKENS as MIN_PATTERN_TOKENS
from annotation.concepts import annotator_agreement as annotator_agreement
from annotation.concepts import draw_concept_sample as draw_concept_sample
from annotation.concepts import read_concept_sample as read_concept_sample
from annotation.concepts import tally_concepts as tally_concepts
from annotation.patterns import distinct_concepts as distinct_concepts
from annotation.patterns import find_patterns as find_patterns
from annotation.patterns import pattern_shares as pattern_shares
from annotation.patterns import search_concepts as search_concepts
from annotation.sheets import read_sheet as read_sheet
from annotation.sheets import refuse_rows as refuse_rows
from annotation.sheets import sheet_text as sheet_text
from annotation.sheets import write_sheets as write_sheets
from annotation.word_similarity import WordSimilarity as WordSimilarity
