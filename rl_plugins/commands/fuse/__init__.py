"""`rl-plugins fuse`: experts that were trained from one base become one model, folder by folder, tensor by tensor."""

from rl_plugins.commands.fuse.command import fuse_folders
from rl_plugins.commands.fuse.plan import FusionPlan

__all__ = ["FusionPlan", "fuse_folders"]
