from .app import main as main
from .options import PositionChoice as PositionChoice
from .printing import print_atlas as print_atlas
from .printing import print_members as print_members
