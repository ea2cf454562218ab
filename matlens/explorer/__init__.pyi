from .changes import Change as Change
from .changes import compare_changes as compare_changes
from .exploration import explore as explore
from .exploration import load_lens as load_lens
from .server import LiveModel as LiveModel
from .value_pages import write_value_pages as write_value_pages
