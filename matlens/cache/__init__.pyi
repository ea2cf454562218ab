from .contents import hash_contents as hash_contents
from .entries import Cache as Cache
from .entries import Entry as Entry
from .entries import default_cache as default_cache
