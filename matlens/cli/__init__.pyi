from .app import main as main
from .options import Dominant as Dominant
from .options import Memory as Memory
from .options import Patched as Patched
from .scripts import Report as Report
from .scripts import run_study as run_study
