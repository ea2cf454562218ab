from .app import main as main
from .scripts import report as report
from .scripts import run_script as run_script
from .scripts import run_study as run_study
