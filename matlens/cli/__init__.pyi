from .options import Disk as Disk
from .options import Dominant as Dominant
from .options import LinkageChoice as LinkageChoice
from .options import LinkageOption as LinkageOption
from .options import Memory as Memory
from .options import Patched as Patched
from .scripts import Report as Report
from .scripts import run_study as run_study
