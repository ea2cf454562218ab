from .dominant import dominant_cells as dominant_cells
from .exploration import Exploration as Exploration
from .exploration import explore as explore
from .exploration import load_lens as load_lens
from .usage import Usage as Usage
from .usage import find_usage as find_usage
from .usage import shortened as shortened
from .value_pages import write_value_pages as write_value_pages
