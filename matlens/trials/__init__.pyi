from .comparison import added_perplexity as added_perplexity
from .comparison import pruning_table as pruning_table
from .evaluation import Speed as Speed
from .evaluation import compare_pruned as compare_pruned
from .evaluation import speed as speed
from .harness import task_scores as task_scores
