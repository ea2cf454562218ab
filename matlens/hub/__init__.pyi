from .repository import HubRepository as HubRepository
from .repository import HubSnapshot as HubSnapshot
