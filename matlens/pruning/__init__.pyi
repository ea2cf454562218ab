from .evaluation import compare_costs as compare_costs
from .evaluation import compare_pruned as compare_pruned
from .folding import Method as Method
from .layouts import plain_copy as plain_copy
from .pruned import Pruned as Pruned
from .pruned import prune as prune
from .pruned import prune_attention as prune_attention
from .saving import save_pruned as save_pruned
