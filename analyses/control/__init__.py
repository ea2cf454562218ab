"""Toxicity and perplexity of steering and its baselines (paper B, section 6.1, Table 5)."""

from control.baselines import SelfDebiasing as SelfDebiasing
from control.baselines import word_filter as word_filter
from control.comparison import ModelChange as ModelChange
from control.comparison import changes_to_compare as changes_to_compare
from control.comparison import compare_control as compare_control
from control.comparison import main_scores as main_scores
from control.generation import CONTINUATION_TOKENS as CONTINUATION_TOKENS
from control.generation import continue_prompts as continue_prompts
from control.graders import ATTRIBUTES as ATTRIBUTES
from control.graders import GRADERS as GRADERS
from control.graders import Grader as Grader
from control.graders import make_grader as make_grader
from control.perplexity import debiased_losses as debiased_losses
from control.prompts import PROMPT_FIELD as PROMPT_FIELD
from control.prompts import read_prompts as read_prompts
from control.selection import choose_values as choose_values
from control.selection import draw_harmless as draw_harmless
from control.selection import grade_values as grade_values
from control.selection import tokens_of_chosen as tokens_of_chosen
