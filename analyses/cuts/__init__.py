"""Linear maps of the stream at the cuts of pruned models, and what these models write."""

from cuts.continuations import beginnings as beginnings
from cuts.continuations import compare as compare
from cuts.continuations import continuation_losses as continuation_losses
from cuts.continuations import continue_prompts as continue_prompts
from cuts.continuations import measures as measures
from cuts.maps import Cut as Cut
from cuts.maps import insert_map as insert_map
from cuts.maps import without_blocks as without_blocks
