from .catalogue import Catalogue as Catalogue
from .weights import WeightFiles as WeightFiles
