from .images import make_image_examples as make_image_examples
from .pairs import make_pairs as make_pairs
