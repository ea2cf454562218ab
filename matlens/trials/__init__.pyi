from .comparison import pruning_table as pruning_table
from .evaluation import compare_pruned as compare_pruned
from .gone import added_perplexity as added_perplexity
from .harness import task_scores as task_scores
from .timing import Speed as Speed
from .timing import compare_costs as compare_costs
from .timing import speed as speed
