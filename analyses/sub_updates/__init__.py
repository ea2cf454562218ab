"""Extreme sub-updates and the clusters of value vectors that they are of (paper B, section 5.2)."""

from sub_updates.extremes import concentration as concentration
from sub_updates.extremes import extreme_tables as extreme_tables
from sub_updates.frequency import TokenFrequency as TokenFrequency
from sub_updates.linkages import compare_linkages as compare_linkages
