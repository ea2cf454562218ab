from .artifact import Artifact as Artifact
from .files import write_files as write_files
from .tables import csv_text as csv_text
from .tables import read_table as read_table
from .tables import result_row as result_row
from .tables import result_table as result_table
from .tables import write_results as write_results
from .verification import verify as verify
