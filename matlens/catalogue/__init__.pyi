from .catalogue import Catalogue as Catalogue
