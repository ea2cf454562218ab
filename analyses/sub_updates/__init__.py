"""Value vectors and sub-updates over a corpus: what only the figures and tables of paper B need."""

from sub_updates.dominance import dominance as dominance
from sub_updates.events import event_tables as event_tables
from sub_updates.extremes import concentration as concentration
from sub_updates.extremes import extreme_tables as extreme_tables
from sub_updates.frequency import TokenFrequency as TokenFrequency
from sub_updates.linkages import compare_linkages as compare_linkages
from sub_updates.overlap import norm_overlap as norm_overlap
from sub_updates.removal_table import removal_table as removal_table
