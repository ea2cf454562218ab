from .agglomeration import agglomerate as agglomerate
from .products import split_product as split_product
