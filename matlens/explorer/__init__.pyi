from .exploration import explore as explore
from .server import LiveModel as LiveModel
from .value_pages import write_value_pages as write_value_pages
