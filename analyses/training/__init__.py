"""Train small language models in minutes: text, resumable training, baselines."""

from training.ngrams import NgramModel as NgramModel
from training.running import TrainingRun as TrainingRun
from training.running import train as train
from training.running import warmed_cosine as warmed_cosine
from training.tables import compare_with_ngrams as compare_with_ngrams
from training.tables import training_table as training_table
from training.vocabularies import bpe_tokenizer as bpe_tokenizer
from training.vocabularies import token_sequences as token_sequences
from training.wikilm import WikiLMConfig as WikiLMConfig
from training.wikilm import WikiLMForCausalLM as WikiLMForCausalLM
from training.wikilm import word_dictionary as word_dictionary
from training.wikilm import write_wikilm as write_wikilm
