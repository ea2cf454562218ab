from .dominant import dominant_cells as dominant_cells
from .exploration import Exploration as Exploration
from .exploration import explore as explore
from .exploration import load_lens as load_lens
