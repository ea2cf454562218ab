from .images import make_image_examples as make_image_examples
from .judged import JudgedText as JudgedText
from .judged import make_judged_text as make_judged_text
from .pairs import make_pairs as make_pairs
