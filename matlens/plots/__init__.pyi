from .files import save as save
from .heatmaps import plot_atlas as plot_atlas
from .heatmaps import plot_r2 as plot_r2
from .heatmaps import plot_trajectory as plot_trajectory
from .layers import plot_layers as plot_layers
from .layers import plot_report as plot_report
