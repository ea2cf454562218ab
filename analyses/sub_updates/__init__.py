"""Extreme sub-updates and their clusters of value vectors (paper B, section 5.2)."""

from sub_updates.extremes import concentration as concentration
from sub_updates.extremes import extreme_tables as extreme_tables
from sub_updates.frequency import TokenFrequency as TokenFrequency
from sub_updates.linkages import compare_linkages as compare_linkages
