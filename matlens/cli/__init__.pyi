from .app import main as main
from .printing import print_members as print_members
