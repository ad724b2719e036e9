"""The commands that join `stormplus` through the entry points of this distribution."""
