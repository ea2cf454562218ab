from .trajectory import LensCells as LensCells
from .trajectory import UpdateCells as UpdateCells
from .trajectory import trajectory_page as trajectory_page
