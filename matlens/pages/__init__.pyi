from .assembly import assemble as assemble
from .assembly import packed as packed
from .trajectory import LensCells as LensCells
from .trajectory import UpdateCells as UpdateCells
from .trajectory import trajectory_page as trajectory_page
