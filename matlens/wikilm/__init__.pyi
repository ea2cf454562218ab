from .adapter import register as register
from .checkpoint import read_wikilm as read_wikilm
from .checkpoint import write_wikilm as write_wikilm
from .dictionary import WordDictionary as WordDictionary
from .dictionary import words_of as words_of
from .modelling import WikiLMConfig as WikiLMConfig
from .modelling import WikiLMForCausalLM as WikiLMForCausalLM
