from .activations import Activations as Activations
from .collecting import Rows as Rows
from .collecting import collect as collect
from .collecting import default_batch_tokens as default_batch_tokens
from .collecting import stream as stream
from .sinks import find_sinks as find_sinks
from .sinks import outlying_rows as outlying_rows
from .sinks import sink_rows as sink_rows
