"""The command `p2pdist`, one module for each verb."""

from p2pdist.cli.launch import launch

launch()
